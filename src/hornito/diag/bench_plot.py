"""The picture of a benchmark: decode speed by context depth, time to the first token by prompt."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hornito.diag.bench_report import BenchReport, BenchRow, PeerRun
from hornito.errors import UsageError

DEPTHS = (0, 512, 1024, 2048, 4096)
PROMPTS = (32, 128, 512, 2048)
"""What is measured for a picture when nothing else was asked for, as far as the context allows."""


def check_matplotlib() -> None:
    """Raise UsageError when pictures can't be drawn; ask before measuring for minutes."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "--plot needs matplotlib, which is not installed: pip install 'hornito[plot]'"
        ) from error


def plot(report: BenchReport, path: str | os.PathLike[str], peer: PeerRun | None = None) -> None:
    """Write a PNG with both curves.

    Raises:
        UsageError: matplotlib is not installed, or the file can't be written.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    decode = [row for row in report.rows if row.test.startswith("tg")]
    prompts = [row for row in report.rows if row.test.startswith("pp") and row.depth == 0]
    _curve(left, "Hornito", [(row.depth, row.median) for row in decode])
    _curve(right, "Hornito", [(row.tokens, row.median_ms) for row in prompts])
    if peer is not None:
        _curve(left, peer.label, _points(peer, decode, lambda row, speed: (row.depth, speed)))
        times = _points(peer, prompts, lambda row, speed: (row.tokens, 1e3 * row.tokens / speed))
        _curve(right, peer.label, times)
    left.set(title="decode", xlabel="tokens of context", ylabel="tokens a second")
    right.set(title="time to first token", xlabel="tokens of prompt", ylabel="milliseconds")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{report.model}, {report.weights}, {report.device}", fontsize=9)
    FigureCanvasAgg(figure)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"can't write the picture {path}: {error}") from error


def _points(peer: PeerRun, rows: Sequence[BenchRow], point: Any) -> list[tuple[float, float]]:
    speeds = [(row, peer.find(row)) for row in rows]
    return [point(row, speed) for row, speed in speeds if speed]


def _curve(axes: Any, label: str, points: Sequence[tuple[float, float]]) -> None:
    ordered = sorted(points)
    if ordered:
        axes.plot([x for x, _ in ordered], [y for _, y in ordered], marker="o", label=label)
