"""Load time, time to first token and decode speed of a package, as medians; JSON on stdout.

    python benchmarks/speed.py model.vxm --prompt 32 512 --tokens 128 [--profile]

Every figure is the median of --runs runs in this process. Prompts are token ids, so no tokenizer is
needed. Timings on shared machines drift: compare figures of one run only.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections import Counter

import hornito
from hornito.plan.recording import record_timed
from hornito.runtime.decode import decode
from hornito.runtime.session import Session


def measure(llm: hornito.LLM, prompt: int, tokens: int, runs: int) -> dict[str, float]:
    """Median seconds to the first token, and tokens a second of the rest."""
    ids = [1 + (7 * i) % 1000 for i in range(prompt)]
    first, rest, cpu = [], [], []
    for _ in range(runs + 1):
        with Session(llm.engine) as session:
            began = time.perf_counter()
            session.prefill(ids)
            prefilled, used = time.perf_counter(), time.process_time()
            made = sum(
                len(new)
                for (new,) in decode(
                    [session], [tokens], ignore_eos=True, steps=llm.steps_per_submission
                )
            )
            ended = time.perf_counter()
        first.append(prefilled - began)
        rest.append(made / (ended - prefilled))
        cpu.append((time.process_time() - used) / (ended - prefilled))
    # The first run records command buffers and, on software drivers, compiles.
    return {
        "prompt": prompt,
        "ttft_ms": 1e3 * statistics.median(first[1:]),
        "prefill_tok_s": prompt / statistics.median(first[1:]),
        "decode_tok_s": statistics.median(rest[1:]),
        "decode_cpu_share": statistics.median(cpu[1:]),
    }


def profile(llm: hornito.LLM, kind: str, rows: int, tail: str) -> list[tuple[str, str, float, int]]:
    """(kernel, role, milliseconds, launches) of one call, a barrier behind every dispatch.

    It runs again what the newest call of that kind left in the row records, so its session must
    still be open.
    """
    engine = llm.engine
    bucket = engine.plan.buckets[kind, rows]
    programs = [bucket.body, bucket.tails[tail]]
    recorder = record_timed(
        engine.device, engine.pipelines, programs, lambda operand: engine.address(kind, operand)
    )
    dispatches = [d for program in programs for d in program.dispatches]
    spent: Counter[tuple[str, str]] = Counter()
    launches: Counter[tuple[str, str]] = Counter()
    repeats = 10
    for _ in range(repeats):
        engine.wait(engine.submit([], [recorder]))
        times = engine.device.read_timestamps(recorder)
        for i, dispatch in enumerate(dispatches):
            key = (dispatch.kernel, dispatch.node.rpartition(".")[2])
            spent[key] += times[i + 1] - times[i]
            launches[key] += 1
    recorder.free()
    return [(*key, ns / 1e6 / repeats, launches[key] // repeats) for key, ns in spent.most_common()]


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--context", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None, help="decode steps a submission")
    parser.add_argument("--precision", default="normal")
    parser.add_argument("--profile", action="store_true", help="also print GPU time by kernel")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with hornito.load(
        arguments.model, context=arguments.context, precision=arguments.precision
    ) as llm:
        loaded = time.perf_counter() - began
        if arguments.steps:
            llm.steps_per_submission = arguments.steps
        report = {
            "model": arguments.model,
            "device": llm.device_line,
            "load_s": loaded,
            "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
            "device_mb": engine_megabytes(llm),
            "steps_per_submission": llm.steps_per_submission,
            "runs": [
                measure(llm, prompt, arguments.tokens, arguments.runs)
                for prompt in arguments.prompt
            ],
        }
        print(json.dumps(report, indent=1))
        if arguments.profile:
            print_profile(llm, arguments.prompt[-1])


def print_profile(llm: hornito.LLM, depth: int) -> None:
    """GPU time by kernel of the largest chunk and of one step behind it, on stderr."""
    largest = max(rows for _, rows in llm.engine.plan.buckets)
    with Session(llm.engine) as session:
        session.prefill([1 + i % 1000 for i in range(max(1, depth - 1 - largest))])
        session.prefill([7] * (largest - session.position % largest))
        session.prefill([7] * largest)
        for kind, rows in (("chunk", largest), ("batch", 1)):
            if kind == "batch":
                session.step(7)
            rows_of = profile(llm, kind, rows, "argmax")
            print(f"{kind} {rows}: {sum(row[2] for row in rows_of):.2f} ms", file=sys.stderr)
            for kernel, role, ms, count in rows_of[:14]:
                print(f"  {kernel:36} {role:14} {ms:9.3f} ms  x{count}", file=sys.stderr)


def engine_megabytes(llm: hornito.LLM) -> float:
    """Device memory that the engine planned and allocated."""
    return llm.engine.memory.total / 1e6


if __name__ == "__main__":
    main()
