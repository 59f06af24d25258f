"""The picture of a benchmark: decode speed by context depth, time to the first token by prompt."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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


Points = Sequence[tuple[float, float]]


def plot(report: BenchReport, path: str | os.PathLike[str], peer: PeerRun | None = None) -> None:
    """Write a PNG with both curves.

    Raises:
        UsageError: matplotlib is not installed, or the file can't be written.
    """
    decode = [row for row in report.rows if row.test.startswith("tg")]
    prompts = [row for row in report.rows if row.test.startswith("pp") and row.depth == 0]
    speeds: dict[str, Points] = {"Hornito": [(row.depth, row.median) for row in decode]}
    times: dict[str, Points] = {"Hornito": [(row.tokens, row.median_ms) for row in prompts]}
    if peer is not None:
        speeds[peer.label] = _points(peer, decode, lambda row, speed: (row.depth, speed))
        times[peer.label] = _points(
            peer, prompts, lambda row, speed: (row.tokens, 1e3 * row.tokens / speed)
        )
    draw(path, f"{report.model}, {report.weights}, {report.device}", speeds, times)


def draw(
    path: str | os.PathLike[str],
    title: str,
    speeds: Mapping[str, Points],
    times: Mapping[str, Points],
) -> None:
    """Write a PNG of curves by label.

    Args:
        speeds: (tokens of context, tokens a second).
        times: (tokens of prompt, milliseconds to the first token).

    Raises:
        UsageError: matplotlib is not installed, or the file can't be written.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, curves in ((left, speeds), (right, times)):
        for label, points in curves.items():
            ordered = sorted(points)
            if ordered:
                axes.plot([x for x, _ in ordered], [y for _, y in ordered], marker="o", label=label)
    left.set(title="decode", xlabel="tokens of context", ylabel="tokens a second")
    right.set(title="time to first token", xlabel="tokens of prompt", ylabel="milliseconds")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title, fontsize=9)
    FigureCanvasAgg(figure)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"can't write the picture {path}: {error}") from error


def _points(peer: PeerRun, rows: Sequence[BenchRow], point: Any) -> Points:
    speeds = [(row, peer.find(row)) for row in rows]
    return [point(row, speed) for row, speed in speeds if speed]
