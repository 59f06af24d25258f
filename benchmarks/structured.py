"""What a grammar's mask adds to a decode step.

Usage: structured.py MODEL [--steps N] [--rounds R]

A session makes one step a submission, at temperature 1: freely, and inside quotes, where almost
every token of the vocabulary may come next and none is forced. The rounds take turns; the
medians are printed, and beside them how long the host takes to find a mask.
"""

from __future__ import annotations

import argparse
import statistics
import time

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


def step_seconds(llm: LLM, steps: int, constraint: Timed | None) -> list[float]:
    """Seconds of each step of an answer."""
    sampler = Sampler(SamplingParams(temperature=1.0), 7, 4, constraint)
    times = []
    with llm.session() as session:
        session.prefill([5, 6, 7, 8], sampler=sampler)
        run = DecodeRun([session], [steps], ignore_eos=[True], steps=1, samplers=[sampler])
        while run.left:
            began = time.perf_counter()
            run.submit()
            run.receive()
            times.append(time.perf_counter() - began)
        run.stop()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with TerminalProgress() as progress:
        llm = hornito.load(arguments.model, context=512, progress=progress)
    with llm:
        print(f"{llm.device_line}; vocabulary {llm.engine.vocabulary}")
        step_seconds(llm, 4, None)
        step_seconds(llm, 4, Timed(llm))
        free: list[float] = []
        masked: list[float] = []
        found: list[float] = []
        for _ in range(arguments.rounds):
            free += step_seconds(llm, arguments.steps, None)
            timed = Timed(llm)
            masked += step_seconds(llm, arguments.steps, timed)
            found += timed.seconds
        a, b = statistics.median(free), statistics.median(masked)
        print(
            f"step without a mask {a * 1e3:.2f} ms, with one {b * 1e3:.2f} ms: {b / a - 1:+.1%}; "
            f"the mask itself {statistics.median(found) * 1e3:.2f} ms on the host"
        )


if __name__ == "__main__":
    main()
