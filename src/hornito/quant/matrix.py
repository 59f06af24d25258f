"""A matrix becomes the bytes of its format: outlier columns, scales, rounding, and what is lost.

Rows are rounded in blocks, several at a time on the processor's threads; the bytes depend on
neither.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hornito.graph.weights import WeightData
from hornito.quant.compensate import Columns, Sweep, round_compensated, sweep
from hornito.quant.formats import Bytes, Floats, WeightFormat
from hornito.quant.planes import unpack
from hornito.quant.rounding import (
    Grid,
    blocks,
    integers,
    numbers,
    range_of,
    search,
    to_half,
)

TASK_ELEMENTS = 1 << 20
"""Weights that a thread rounds at a time."""

SAMPLE_RUNS = 8
SAMPLE_ROWS = 64
"""Outliers are chosen, and losses measured, by up to this many runs of this many rows."""

DAMPING = 0.1
"""Of the mean second moment, added to all: see `compensate.sweep`."""

THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Statistics:
    """The inputs of a layer over a text: second moments `[K, K]` and means `[K]`."""

    moments: Floats
    mean: Floats


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded matrix.

    Attributes:
        data: its bytes, plane by plane.
        error: root of the squared error of the outputs over that of the outputs themselves (of the
            weights without statistics).
        shift: mean error of each output `[N]`, which a bias can take back; None when that is not
            asked for, or without statistics.
        shift_share: part of the squared error of the outputs that it is.
    """

    data: Bytes
    error: float
    shift: Floats | None = None
    shift_share: float = 0.0


@dataclass(frozen=True, slots=True)
class _Job:
    """What rounding the rows of a matrix takes."""

    fmt: WeightFormat
    data: WeightData
    importance: Floats | None
    outliers: Columns
    plan: Sweep | None


def quantise_matrix(
    fmt: WeightFormat,
    data: WeightData,
    statistics: Statistics | None = None,
    *,
    shift_from: float = 0.0,
    advance: Callable[[int], None] | None = None,
) -> Rounded:
    """Round a matrix `[N, K]`.

    Args:
        fmt: one of the formats that numbers can be rounded to, with or without outliers.
        statistics: of the layer's inputs; without them the weights alone decide.
        shift_from: the least share of the error from which a shift is wanted.
        advance: told about the rows that are done.

    Raises:
        UnsupportedError: there is no rounding to that format.
    """
    moments = None if statistics is None else statistics.moments
    importance = None if moments is None else np.diag(moments).astype(np.float32)
    outliers = _salient_columns(fmt, data, importance)
    if len(outliers):
        importance = np.ones(data.shape[1], np.float32) if importance is None else importance.copy()
        importance[outliers] = 0.0
    plan = None
    if moments is not None and fmt.number != 2:  # at 8 bits there is little to make up for
        plan = sweep(moments, outliers, DAMPING)
    job = _Job(fmt, data, importance, outliers, plan)
    stored = np.zeros(fmt.nbytes(data.shape), np.uint8)
    bases = np.cumsum([0, *fmt.plane_sizes(data.shape)]).tolist()
    tasks = _row_runs(data.shape)
    with ThreadPoolExecutor(THREADS) as pool:
        for (start, stop), planes in zip(
            tasks, pool.map(partial(_round_rows, job), tasks), strict=True
        ):
            for base, plane in zip(bases, planes, strict=False):
                row = plane.size // (stop - start)
                stored[base + start * row : base + stop * row] = plane.reshape(-1)
            if advance is not None:
                advance(stop - start)
    if fmt.outliers:
        columns = outliers.astype("<u4").view(np.uint8)
        stored[bases[-2] :][: columns.size] = columns
    return _measured(job, stored, statistics, shift_from)


def _row_runs(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    step = max(1, TASK_ELEMENTS // shape[1])
    return [(at, min(at + step, shape[0])) for at in range(0, shape[0], step)]


def _round_rows(job: _Job, rows: tuple[int, int]) -> list[Bytes]:
    """The planes' bytes of some rows; behind them the outliers' numbers, where there are any."""
    fmt, x = job.fmt, job.data.rows(*rows)
    rest = x
    if len(job.outliers):
        rest = x.copy()
        rest[:, job.outliers] = 0.0
    grid = search(fmt, rest, job.importance)
    if job.plan is None:
        quants, kept = integers(fmt, x, grid), x
    else:
        quants, kept = round_compensated(fmt, x, grid, job.plan)
    if not len(job.outliers):
        return blocks(fmt, quants, grid)
    quants, more = _split_outliers(fmt, quants, kept, grid, job.outliers)
    return [*blocks(fmt, quants, grid), np.ascontiguousarray(to_half(more)).view(np.uint8)]


def _split_outliers(
    fmt: WeightFormat, quants: Floats, kept: Floats, grid: Grid, outliers: Columns
) -> tuple[Floats, Floats]:
    """Integers with those of the outliers, and what each outlier has besides, `[n, outliers]`.

    An outlier's integer is the nearest one: its fp16 number then holds little, and that exactly.
    """
    nearest = integers(fmt, kept, grid)
    quants[:, outliers] = nearest[:, outliers]
    return quants, (kept - numbers(fmt, nearest, grid))[:, outliers]


def _sample(data: WeightData) -> list[tuple[int, int]]:
    """Runs of rows that stand for the matrix."""
    n = data.shape[0]
    if n <= SAMPLE_RUNS * SAMPLE_ROWS:
        return [(0, n)]
    starts = np.linspace(0, n - SAMPLE_ROWS, SAMPLE_RUNS).astype(int).tolist()
    return [(start, start + SAMPLE_ROWS) for start in starts]


def _salient_columns(fmt: WeightFormat, data: WeightData, importance: Floats | None) -> Columns:
    """The columns whose rounding costs most, ascending: what they lose themselves, and what the
    others of their groups lose to the scale that they ask for."""
    if not fmt.outliers:
        return np.zeros(0, np.intp)
    k = data.shape[1]
    counts = np.ones(k, np.float32) if importance is None else importance
    limits = range_of(fmt)
    # A step is the group's largest number over `steps`, and rounding loses a twelfth of its square.
    steps = (limits.high - limits.low) / 2
    cost: Any = np.zeros(k, np.float64)
    for rows in _sample(data):
        x = data.rows(*rows)
        grid = search(fmt, x)  # one that does not favour the columns in question
        own = np.square(x - numbers(fmt, integers(fmt, x, grid), grid)).sum(axis=0)
        cost = cost + own * counts
        squares = np.square(x).reshape(len(x), -1, fmt.group)
        usual = np.partition(squares, fmt.group - 1 - fmt.group // 8, axis=2)
        usual = usual[..., fmt.group - 1 - fmt.group // 8, None]  # an eighth of a group is larger
        excess = np.maximum(squares - usual, 0).sum(axis=0) / (12 * steps**2)  # [G, g]
        cost += (excess * counts.reshape(-1, fmt.group).sum(axis=1, keepdims=True)).reshape(-1)
    return np.sort(np.argsort(-cost, kind="stable")[: fmt.outliers])


def _measured(
    job: _Job, stored: Bytes, statistics: Statistics | None, shift_from: float
) -> Rounded:
    shape = job.data.shape
    lost = total = shifted = 0.0
    for start, stop in _sample(job.data):
        x: Any = job.data.rows(start, stop).astype(np.float64)
        change = unpack(job.fmt, stored, shape, start, stop) - x
        if statistics is None:
            lost, total = lost + float(np.square(change).sum()), total + float(np.square(x).sum())
            continue
        lost += float(np.einsum("nk,nk->", change @ statistics.moments, change))
        total += float(np.einsum("nk,nk->", x @ statistics.moments, x))
        shifted += float(np.square(change @ statistics.mean).sum())
    error = (lost / total) ** 0.5 if total > 0 else 0.0
    share = shifted / lost if lost > 0 else 0.0
    if statistics is None or share < shift_from:
        return Rounded(stored, error, None, share)
    shift = np.empty(shape[0], np.float32)
    for start, stop in _row_runs(shape):
        change = unpack(job.fmt, stored, shape, start, stop) - job.data.rows(start, stop)
        shift[start:stop] = change @ statistics.mean
    return Rounded(stored, error, shift, share)
