"""Speed of a loaded model, in the rows that users of llama-bench know.

`pp512` evaluates a prompt of 512 tokens, `tg128` generates 128 tokens, and `@d4096` does so behind
4096 tokens of context. Every row is repeated in one process; figures of different runs of this
program are not comparable on a shared machine.
"""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hornito.diag.bench_report import BenchReport, BenchRow, quantile
from hornito.errors import UsageError
from hornito.progress import Progress
from hornito.runtime.decode import decode
from hornito.runtime.session import Session

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.plan.plan import Plan

Test = tuple[int, str, int]
"""Depth, `pp` or `tg`, and tokens."""

WARM_SECONDS = 0.5
"""How long a discrete GPU works on a row before it counts."""

GATHERS = ("embedding/", "position_embedding/")
"""Kernels that read a few rows of a table, by the beginning of their names."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of a test: wall and processor seconds, those of the calling thread, objects that
    were kept, and seconds of each token (tg)."""

    wall: float
    process: float
    thread: float
    kept: int
    tokens: tuple[float, ...]


def tests_of(prompts: Sequence[int], generate: Sequence[int], depths: Sequence[int]) -> list[Test]:
    """Every prompt length and generation length behind every depth."""
    return [
        (depth, kind, n)
        for depth in depths
        for kind, ns in (("pp", prompts), ("tg", generate))
        for n in ns
    ]


def bench(
    llm: LLM,
    *,
    model: str,
    load_seconds: float,
    tests: Sequence[Test],
    runs: int,
    progress: Progress,
    done: Callable[[BenchRow], None] | None = None,
) -> BenchReport:
    """Measure the tests.

    A first, uncounted run of each row records command buffers and, on software drivers, compiles.
    On discrete GPUs more of them follow for `WARM_SECONDS`, since idle ones lower their clocks.

    Args:
        done: called with each row when it is measured.

    Raises:
        UsageError: a row does not fit the context.
    """
    for depth, kind, n in tests:
        before = _before(depth, kind)
        if before + n > llm.context:
            raise UsageError(
                f"{kind}{n} behind {before} token{'' if before == 1 else 's'} needs {before + n} "
                f"positions; the context has {llm.context}. Load with --context {before + n}"
            )
    progress.start("measuring", len(tests) * (runs + 1))
    rows: list[BenchRow] = []
    step_bytes = step_weight_bytes(llm.engine.plan)
    for depth, kind, n in tests:
        _warm_up(llm, depth, kind, n)
        progress.advance(1)
        measured = []
        for _ in range(runs):
            measured.append(_once(llm, depth, kind, n))
            progress.advance(1)
        rows.append(_row(depth, kind, n, measured, step_bytes))
        if done is not None:
            done(rows[-1])
    progress.finish()
    quant = llm.package_manifest.quant
    return BenchReport(
        model=model,
        device=llm.device_line,
        weights=str(quant.get("weights")),
        precision=llm.precision,
        kv="fp16" if llm.engine.options.kv_half else "fp32",
        context=llm.context,
        steps_per_submission=llm.steps_per_submission,
        runs=runs,
        load_seconds=load_seconds,
        step_bytes=step_bytes,
        device_bytes=llm.engine.memory.total,
        max_rss_bytes=_max_rss(),
        anonymous_bytes=anonymous_bytes(),
        rows=tuple(rows),
    )


def step_weight_bytes(plan: Plan) -> int:
    """Bytes of weights that a greedy step of one row reads, each range once.

    Of embedding tables a step gathers one row, which is not counted.
    """
    bucket = plan.buckets["batch", 1]
    ranges = {
        operand
        for dispatch in (*bucket.body.dispatches, *bucket.tails["argmax"].dispatches)
        if not dispatch.kernel.startswith(GATHERS)
        for operand in dispatch.reads
        if operand.name in plan.weight_bytes
    }
    return sum(operand.size for operand in ranges)


def warm_seconds(llm: LLM) -> float:
    """How long a row is worked on before it counts, beyond its first run."""
    return WARM_SECONDS if llm.device_kind == "discrete" else 0.0


def _warm_up(llm: LLM, depth: int, kind: str, n: int) -> None:
    """Uncounted runs of a row."""
    seconds = warm_seconds(llm)
    began = time.perf_counter()
    _once(llm, depth, kind, n)
    while time.perf_counter() - began < seconds:
        _once(llm, depth, kind, n)


def prompt_ids(count: int, vocabulary: int) -> list[int]:
    """Token ids that stand for a prompt; speed does not depend on them."""
    return [(1 + 7 * i) % vocabulary for i in range(count)]


def _before(depth: int, kind: str) -> int:
    """Tokens that a row finds in its session: generating goes on from one at the least."""
    return depth if kind == "pp" else max(1, depth)


def _once(llm: LLM, depth: int, kind: str, n: int) -> _Run:
    """One run of a row."""
    ids = prompt_ids(depth + n, llm.engine.vocabulary)
    with Session(llm.engine) as session:
        before = _before(depth, kind)
        if before:
            session.prefill(ids[:before])
        gc.collect()
        objects = sys.getallocatedblocks()
        wall, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
        tokens: list[float] = []
        if kind == "pp":
            session.prefill(ids[depth:])
        else:
            tokens = _generate(llm, session, n)
            if len(tokens) != n:
                raise UsageError(f"tg{n} behind {depth} tokens gave {len(tokens)} tokens")
        run = _Run(
            time.perf_counter() - wall,
            time.process_time() - process,
            time.thread_time() - thread,
            sys.getallocatedblocks() - objects - len(tokens),
            tuple(tokens),
        )
        return run


def _generate(llm: LLM, session: Session, count: int) -> list[float]:
    """Seconds of each new token: those of its submission, in equal parts."""
    tokens: list[float] = []
    at = time.perf_counter()
    steps = llm.steps_per_submission
    for (new,) in decode([session], [count], ignore_eos=True, steps=steps):
        now = time.perf_counter()
        tokens += [(now - at) / len(new)] * len(new)
        at = now
    return tokens


def _row(depth: int, kind: str, n: int, measured: Sequence[_Run], step_bytes: int) -> BenchRow:
    speeds = sorted(n / run.wall for run in measured)
    if kind == "pp":
        times = [1e3 * run.wall for run in measured]
    else:
        times = [1e3 * seconds for run in measured for seconds in run.tokens]
    median = statistics.median(speeds)
    return BenchRow(
        test=f"{kind}{n}" + (f"@d{depth}" if depth else ""),
        tokens=n,
        depth=depth,
        median=median,
        least=speeds[0],
        p90=quantile(speeds, 0.9),
        median_ms=statistics.median(times),
        least_ms=min(times),
        p90_ms=quantile(times, 0.9),
        host_share=statistics.median(run.process / run.wall for run in measured),
        host_us=statistics.median(1e6 * run.thread / n for run in measured),
        kept_objects=statistics.median(run.kept / n for run in measured),
        gbps=median * step_bytes / 1e9 if kind == "tg" else None,
    )


def _max_rss() -> int:
    """Largest resident memory of this process in bytes; Linux counts kB, macOS bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def anonymous_bytes() -> int | None:
    """Resident memory of this process that no file backs; None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("RssAnon:")]
    return int(found[0][1]) * 1024 if found else None
