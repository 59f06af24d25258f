"""What a shared prefix costs and saves: medians in milliseconds, with counters; JSON on stdout.

    python benchmarks/random_model.py 0.5b model.vxm && python benchmarks/prefix.py model.vxm

Rows: opening the model, evaluating the prefix, a plain step behind it, restoring it and the first
step, a chunk of 32 tokens behind it, and a token of decoding. `ratio` is restore + first step over
the plain step. Prompts are token ids, so no tokenizer is needed. Exits with 1 when a prefix token
was evaluated again, or more was copied than the partly filled tail block.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import hornito
from hornito.runtime.decode import decode
from hornito.runtime.session import Session

CHUNK = 32


def milliseconds(call: Callable[[], object]) -> float:
    """Wall-clock time of a call."""
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def measure(llm: hornito.LLM, tokens: int, runs: int, decoded: int) -> dict[str, Any]:
    """Every row for a prefix of so many tokens; restoring and plain steps take turns."""
    engine = llm.engine
    ids = [1 + (7 * i) % 1000 for i in range(tokens)]
    rows: dict[str, list[float]] = {
        name: [] for name in ("prefix", "plain_step", "restore_and_step", "chunk_32", "token")
    }
    evaluated = copied = 0
    with Session(engine) as session, Session(engine) as plain:
        for _ in range(2):  # the first one records command buffers and compiles
            session.rewind(0)
            rows["prefix"] = [milliseconds(lambda: session.prefill(ids))]
        with session.snapshot() as snapshot:
            for run in range(runs + 1):
                plain.restore(snapshot)
                plain.step(5)
                found = {"plain_step": milliseconds(lambda: plain.step(6))}
                counters = engine.counters
                before = counters.evaluated_tokens, counters.copied_bytes

                def restore_and_step() -> None:
                    session.restore(snapshot)
                    session.step(5)

                found["restore_and_step"] = milliseconds(restore_and_step)
                evaluated += counters.evaluated_tokens - before[0] - 1
                copied = max(copied, counters.copied_bytes - before[1])
                session.restore(snapshot)
                found["chunk_32"] = milliseconds(lambda: session.prefill(ids[:CHUNK]))
                made = decode([session], [decoded], ignore_eos=True, steps=llm.steps_per_submission)
                found["token"] = milliseconds(lambda: list(made)) / decoded  # noqa: B023
                for name, value in found.items():
                    if run:
                        rows[name].append(value)
    medians = {name: statistics.median(values) for name, values in rows.items()}
    tail = sum(pool.kind.block_bytes for pool in engine.pools) if tokens % 64 else 0
    return {
        "tokens": tokens,
        "milliseconds": {name: round(value, 3) for name, value in medians.items()},
        "ratio": round(medians["restore_and_step"] / medians["plain_step"], 3),
        "evaluated_again": evaluated,
        "copied_bytes": copied,
        "tail_block_bytes": tail,
    }


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[843, 832])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--decode", type=int, default=32, help="tokens of one decode run")
    parser.add_argument("--precision", default="normal")
    arguments = parser.parse_args()
    context = max(arguments.tokens) + CHUNK + arguments.decode + 2
    began = time.perf_counter()
    with hornito.load(
        arguments.model, context=context, slots=2, precision=arguments.precision
    ) as llm:
        opened = 1e3 * (time.perf_counter() - began)
        prefixes = [measure(llm, n, arguments.runs, arguments.decode) for n in arguments.tokens]
        print(
            json.dumps(
                {
                    "model": arguments.model,
                    "device": llm.device_line,
                    "open_ms": round(opened, 1),
                    "prefixes": prefixes,
                },
                indent=1,
            )
        )
    wrong = [
        row
        for row in prefixes
        if row["evaluated_again"] or row["copied_bytes"] > row["tail_block_bytes"]
    ]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
