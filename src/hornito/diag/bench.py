"""Speed of a loaded model, in the rows that users of llama-bench know.

`pp512` evaluates a prompt of 512 tokens, `tg128` generates 128 tokens, and `@d4096` does so behind
4096 tokens of context. Every row is repeated in one process; figures of different runs of this
program are not comparable on a shared machine.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hornito.errors import UsageError
from hornito.progress import Progress
from hornito.runtime.decode import decode
from hornito.runtime.session import Session

if TYPE_CHECKING:
    from hornito.api import LLM


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One test: tokens a second (median, least, 90th percentile) and what they mean in time.

    Attributes:
        test: `pp<n>` or `tg<n>`, with `@d<n>` behind a context of n tokens.
        tokens, depth: evaluated or generated tokens, and the context before them.
        median, least, p90: tokens a second.
        median_ms: milliseconds to the first token (pp) or for each token (tg).
        host_share: processor time over wall time of this process.
    """

    test: str
    tokens: int
    depth: int
    median: float
    least: float
    p90: float
    median_ms: float
    host_share: float


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Rows with everything that they depend on."""

    model: str
    device: str
    weights: str
    precision: str
    kv: str
    context: int
    steps_per_submission: int
    runs: int
    load_seconds: float
    device_bytes: int
    max_rss_bytes: int
    rows: tuple[BenchRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)

    def to_markdown(self) -> str:
        """A header line and a table."""
        lines = [
            f"{self.model}: {self.weights} weights, {self.precision}, KV {self.kv}, context "
            f"{self.context}; {self.device}; loaded in {self.load_seconds:.2f} s, "
            f"{self.device_bytes / 1e6:.0f} MB on the device, {self.max_rss_bytes / 1e6:.0f} MB "
            f"resident; medians of {self.runs} runs",
            "",
            "| test | tok/s | least | p90 | ms | host share |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r.test} | {r.median:.1f} | {r.least:.1f} | {r.p90:.1f} | {r.median_ms:.2f} | "
            f"{r.host_share:.0%} |"
            for r in self.rows
        ]
        return "\n".join(lines)

    def to_csv(self) -> str:
        """The rows, one a line."""
        names = list(BenchRow.__dataclass_fields__)
        lines = [",".join(names)]
        lines += [",".join(str(getattr(row, name)) for name in names) for row in self.rows]
        return "\n".join(lines)


def bench(
    llm: LLM,
    *,
    model: str,
    load_seconds: float,
    prompts: Sequence[int],
    generate: Sequence[int],
    depths: Sequence[int],
    runs: int,
    progress: Progress,
    done: Callable[[BenchRow], None] | None = None,
) -> BenchReport:
    """Measure every prompt length and generation length behind every depth.

    A first, uncounted run of each row records command buffers and, on software drivers, compiles.

    Args:
        done: called with each row when it is measured.

    Raises:
        UsageError: a row does not fit the context.
    """
    tests = [
        (depth, kind, n)
        for depth in depths
        for kind, ns in (("pp", prompts), ("tg", generate))
        for n in ns
    ]
    for depth, kind, n in tests:
        if depth + n > llm.context:
            raise UsageError(
                f"{kind}{n} behind {depth} tokens needs {depth + n} positions; the context has "
                f"{llm.context}. Load with --context {depth + n}"
            )
    progress.start("measuring", len(tests) * (runs + 1))
    rows: list[BenchRow] = []
    for depth, kind, n in tests:
        measured = []
        for _ in range(runs + 1):
            measured.append(_once(llm, depth, kind, n))
            progress.advance(1)
        rows.append(_row(depth, kind, n, measured[1:]))
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
        device_bytes=llm.engine.memory.total,
        max_rss_bytes=_max_rss(),
        rows=tuple(rows),
    )


def prompt_ids(count: int, vocabulary: int) -> list[int]:
    """Token ids that stand for a prompt; speed does not depend on them."""
    return [(1 + 7 * i) % vocabulary for i in range(count)]


def _once(llm: LLM, depth: int, kind: str, n: int) -> tuple[float, float]:
    """(wall seconds, processor seconds) of one run of a row."""
    ids = prompt_ids(depth + n, llm.engine.vocabulary)
    with Session(llm.engine) as session:
        before = depth if kind == "pp" else max(1, depth)
        if before:
            session.prefill(ids[:before])
        wall, cpu = time.perf_counter(), time.process_time()
        if kind == "pp":
            session.prefill(ids[depth:])
        else:
            steps = llm.steps_per_submission
            runs = decode([session], [n], ignore_eos=True, steps=steps)
            made = sum(len(new) for (new,) in runs)
            if made != n:
                raise UsageError(f"tg{n} behind {depth} tokens gave {made} tokens")
        return time.perf_counter() - wall, time.process_time() - cpu


def _row(depth: int, kind: str, n: int, measured: Sequence[tuple[float, float]]) -> BenchRow:
    speeds = sorted(n / wall for wall, _ in measured)
    median = statistics.median(speeds)
    wall = statistics.median(wall for wall, _ in measured)
    return BenchRow(
        test=f"{kind}{n}" + (f"@d{depth}" if depth else ""),
        tokens=n,
        depth=depth,
        median=median,
        least=speeds[0],
        p90=speeds[min(len(speeds) - 1, int(0.9 * len(speeds)))],
        median_ms=1e3 * wall / (1 if kind == "pp" else n),
        host_share=statistics.median(cpu / wall for wall, cpu in measured),
    )


def _max_rss() -> int:
    """Largest resident memory of this process in bytes; Linux counts kB, macOS bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
