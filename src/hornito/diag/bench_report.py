"""What `hornito bench` reports: rows, what they depend on, and a peer's figures beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hornito.errors import FormatError

NEAR_DEPTH = 64
"""A peer's decode row counts as ours when their depths differ by no more tokens than this."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One test: tokens a second and the milliseconds behind them.

    Attributes:
        test: `pp<n>` or `tg<n>`, with `@d<n>` behind a context of n tokens.
        tokens, depth: evaluated or generated tokens, and the context before them.
        median, least, p90: tokens a second of the runs; p90 is what nine of ten do not exceed.
        median_ms, least_ms, p90_ms: milliseconds to the first token (pp), of the runs; or for each
            token (tg), of all tokens of all runs.
        host_share: processor time of this process over wall time.
        host_us: processor time of the calling thread for each token, microseconds.
        kept_objects: Python objects for each token that were still there afterwards.
        gbps: of tg rows, weight bytes of a step times `median`, in GB/s; None for prompts.
        peer, ratio: the peer's tokens a second, and ours over them; None without a peer.
    """

    test: str
    tokens: int
    depth: int
    median: float
    least: float
    p90: float
    median_ms: float
    least_ms: float
    p90_ms: float
    host_share: float
    host_us: float
    kept_objects: float
    gbps: float | None = None
    peer: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Rows with everything that they depend on.

    Attributes:
        load_seconds: of this process, caches as they were.
        cold_start_seconds, warm_start_seconds: of processes of their own, from the call of `load`
            to the first token: with empty pipeline and driver caches, and again with the caches
            that this left; None when not measured.
        step_bytes: weight bytes that a step of one row reads; the gathered rows of embedding tables
            and the KV cache are not among them.
        device_bytes: what the plan holds on the device.
        anonymous_bytes: host memory of this process that no file backs, at the end; None where the
            system does not tell.
        max_rss_bytes: largest resident memory of this process, mapped files included.
        peer: label of the run that was compared with.
    """

    model: str
    device: str
    weights: str
    precision: str
    kv: str
    context: int
    steps_per_submission: int
    runs: int
    load_seconds: float
    step_bytes: int
    device_bytes: int
    max_rss_bytes: int
    anonymous_bytes: int | None
    rows: tuple[BenchRow, ...]
    cold_start_seconds: float | None = None
    warm_start_seconds: float | None = None
    peer: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)

    def to_markdown(self) -> str:
        """A header line and a table."""
        anonymous = ""
        if self.anonymous_bytes is not None:
            anonymous = f"{self.anonymous_bytes / 1e6:.0f} MB of anonymous host memory, "
        starts = ""
        if self.cold_start_seconds is not None and self.warm_start_seconds is not None:
            starts = (
                f" (to the first token: cold {self.cold_start_seconds:.2f} s, warm "
                f"{self.warm_start_seconds:.2f} s)"
            )
        lines = [
            f"{self.model}: {self.weights} weights, {self.precision}, KV {self.kv}, context "
            f"{self.context}; {self.device}; loaded in {self.load_seconds:.2f} s{starts}, "
            f"{self.device_bytes / 1e6:.0f} MB on the device, {anonymous}"
            f"{self.max_rss_bytes / 1e6:.0f} MB resident at most; a step reads "
            f"{self.step_bytes / 1e6:.1f} MB of weights; medians of {self.runs} runs, "
            f"{self.steps_per_submission} steps a submission",
            "",
        ]
        names = ["test", "tok/s", "slowest", "p90", "ms", "fastest", "p90 ms", "GB/s"]
        names += ["host share", "host us/token", "objects kept/token"]
        if self.peer:
            names += [self.peer.replace("|", "/"), "ratio"]
        lines += [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
        lines += [f"| {' | '.join(self._cells(row))} |" for row in self.rows]
        return "\n".join(lines)

    def _cells(self, r: BenchRow) -> list[str]:
        cells = [r.test, f"{r.median:.1f}", f"{r.least:.1f}", f"{r.p90:.1f}"]
        cells += [f"{r.median_ms:.2f}", f"{r.least_ms:.2f}", f"{r.p90_ms:.2f}"]
        cells.append("-" if r.gbps is None else f"{r.gbps:.1f}")
        cells += [f"{r.host_share:.0%}", f"{r.host_us:.1f}", f"{r.kept_objects:.1f}"]
        if self.peer:
            cells.append("-" if r.peer is None else f"{r.peer:.1f}")
            cells.append("-" if r.ratio is None else f"{r.ratio:.2f}")
        return cells

    def to_csv(self) -> str:
        """The rows, one a line."""
        names = [field.name for field in fields(BenchRow)]
        lines = [",".join(names)]
        for row in self.rows:
            values = (getattr(row, name) for name in names)
            lines.append(",".join("" if value is None else str(value) for value in values))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class PeerRun:
    """The JSON of another run: `label`, and rows with `test`, `tokens`, `depth` and `median`.

    `benchmarks/peer/bench_llamacpp.py` writes it, and so does `hornito bench -o json`.
    """

    label: str
    rows: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PeerRun:
        """Read a file.

        Raises:
            FormatError: it is no such JSON; says what is missing.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FormatError(f"{path}: no JSON of a benchmark run: {error}") from error
        rows = data.get("rows") if isinstance(data, dict) else None
        if not isinstance(rows, list) or not rows:
            raise FormatError(f"{path}: no JSON of a benchmark run: it has no rows")
        for row in rows:
            numbers = [row.get(k) for k in ("tokens", "depth", "median")] if _is_row(row) else []
            if not numbers or not all(isinstance(n, int | float) and n >= 0 for n in numbers):
                raise FormatError(
                    f"{path}: a row lacks test, tokens, depth or median: {row!s:.120}"
                )
        label = data.get("label") or f"{data.get('model', 'peer')} ({data.get('weights', '?')})"
        return cls(str(label), tuple(rows))

    def find(self, row: BenchRow) -> float | None:
        """The peer's tokens a second in the same test; None when it has none.

        Prompts must be equal. Decoding is compared at the nearest depth that is near enough.
        """
        kind = row.test[:2]
        found = [r for r in self.rows if str(r["test"]).startswith(kind)]
        if kind == "pp":
            found = [r for r in found if (r["tokens"], r["depth"]) == (row.tokens, row.depth)]
        near = min(found, key=lambda r: abs(r["depth"] - row.depth), default=None)
        if near is None or abs(near["depth"] - row.depth) > NEAR_DEPTH:
            return None
        return float(near["median"])


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and str(row.get("test", ""))[:2] in ("pp", "tg")


def compared(report: BenchReport, peer: PeerRun) -> BenchReport:
    """The report with a peer's figures beside its own."""
    rows = []
    for row in report.rows:
        theirs = peer.find(row)
        ratio = row.median / theirs if theirs else None
        rows.append(replace(row, peer=theirs, ratio=ratio))
    return replace(report, rows=tuple(rows), peer=peer.label)


def quantile(values: Sequence[float], part: float) -> float:
    """The value that a part of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
