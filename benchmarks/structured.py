"""What a grammar's mask adds to a decode step.

Usage: structured.py MODEL [--steps N]

Two sessions take turns, one step a submission, at temperature 1. One is free, the other in quotes,
where almost every token of the vocabulary may come next and none is forced. Prints the medians, the
median of the pairs' ratios, and how long the host takes to find a mask.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import hornito
from hornito.api import LLM
from hornito.progress import TerminalProgress
from hornito.runtime.decode import DecodeRun
from hornito.runtime.sampler import Sampler, SamplingParams
from hornito.structured.formats import ResponseFormat


class Timed:
    """A constraint, and the seconds that each of its masks took."""

    def __init__(self, llm: LLM) -> None:
        self._state = llm.grammars.start(ResponseFormat("regex", '"[^"]{4000,}"'))
        self.seconds: list[float] = []

    @property
    def complete(self) -> bool:
        return self._state.complete

    def mask(self) -> bytes:
        began = time.perf_counter()
        found = self._state.mask()
        self.seconds.append(time.perf_counter() - began)
        return found

    def accept(self, token: int) -> None:
        self._state.accept(token)

    def take_forced(self, most: int) -> list[int]:
        return self._state.take_forced(most)


@contextmanager
def stepping(llm: LLM, steps: int, constraint: Timed | None) -> Iterator[Callable[[], float]]:
    """What makes one step of an answer and returns its seconds."""
    sampler = Sampler(SamplingParams(temperature=1.0), 7, 4, constraint)
    with llm.session() as session:
        session.prefill([5, 6, 7, 8], sampler=sampler)
        run = DecodeRun([session], [steps], ignore_eos=[True], steps=1, samplers=[sampler])

        def step() -> float:
            began = time.perf_counter()
            run.submit()
            run.receive()
            return time.perf_counter() - began

        yield step
        run.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    with TerminalProgress() as progress:
        llm = hornito.load(arguments.model, context=512, slots=2, progress=progress)
    with llm:
        print(f"{llm.device_line}; vocabulary {llm.engine.vocabulary}")
        timed, count = Timed(llm), arguments.steps + 4
        with stepping(llm, count, None) as free, stepping(llm, count, timed) as masked:
            pairs = [(free(), masked()) for _ in range(arguments.steps)][4:]
        a, b = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"step without a mask {a * 1e3:.2f} ms, with one {b * 1e3:.2f} ms: "
            f"{statistics.median(m / f for f, m in pairs) - 1:+.1%} (of {len(pairs)} pairs); "
            f"the mask itself {statistics.median(timed.seconds) * 1e3:.2f} ms on the host"
        )


if __name__ == "__main__":
    main()
