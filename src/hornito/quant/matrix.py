"""A matrix becomes the bytes of its format: outlier columns, scales, rounding, and what is lost.

Rows are rounded in blocks, several at a time on the processor's threads; the bytes depend on
neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hornito.graph.finite import finite_rows
from hornito.graph.weights import WeightData
from hornito.parallel import Workers, workers_or_own
from hornito.quant.compensate import Columns, Sweep, round_compensated, sweep
from hornito.quant.formats import Bytes, Floats, WeightFormat
from hornito.quant.planes import unpack
from hornito.quant.rounding import (
    ELEMENTS_AT_ONCE,
    Grid,
    blocks,
    divided,
    integers,
    numbers,
    range_of,
    search,
    to_half,
)
from hornito.quant.scratch import SCRATCH

TASK_ELEMENTS = 1 << 20
"""Weights that a thread reads at a time: rows that a source gives in runs, or transposed, cost more
the fewer are asked for."""

SAMPLE_RUNS = 8
SAMPLE_ROWS = 64
"""Outliers are chosen, and losses measured, by up to this many runs of this many rows."""

DAMPING = 0.1
"""Of the mean second moment, added to all: see `compensate.sweep`."""


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
    """What rounding the rows of a matrix takes, and the bytes that they become."""

    fmt: WeightFormat
    data: WeightData
    stored: Bytes
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
    workers: Workers | None = None,
) -> Rounded:
    """Round a matrix `[N, K]`.

    Args:
        fmt: one of the formats that numbers can be rounded to, with or without outliers.
        statistics: of the layer's inputs; without them the weights alone decide.
        shift_from: the least share of the error from which a shift is wanted.
        advance: told about the rows that are done.
        workers: whose threads work; None for some of the matrix' own.

    Raises:
        UnsupportedError: there is no rounding to that format.
        FormatError: a number is not finite.
    """
    with workers_or_own(workers) as threads:
        job = _rounded(threads, fmt, data, statistics, advance)
        return _measured(threads, job, statistics, shift_from)


def quantised_bytes(fmt: WeightFormat, data: WeightData, workers: Workers | None = None) -> Bytes:
    """The bytes of a matrix `[N, K]` that is rounded by its weights alone.

    Raises:
        UnsupportedError: there is no rounding to that format.
        FormatError: a number is not finite.
    """
    with workers_or_own(workers) as threads:
        return _rounded(threads, fmt, data, None, None).stored


def _rounded(
    workers: Workers,
    fmt: WeightFormat,
    data: WeightData,
    statistics: Statistics | None,
    advance: Callable[[int], None] | None,
) -> _Job:
    """The job of a matrix, done."""
    moments = None if statistics is None else statistics.moments
    importance = None if moments is None else np.diag(moments).astype(np.float32)
    outliers = _salient_columns(workers, fmt, data, importance)
    if len(outliers):
        importance = np.ones(data.shape[1], np.float32) if importance is None else importance.copy()
        importance[outliers] = 0.0
    plan = None
    if moments is not None and fmt.number != 2:  # at 8 bits there is little to make up for
        plan = sweep(moments, outliers, DAMPING)
    stored = np.zeros(fmt.nbytes(data.shape), np.uint8)
    job = _Job(fmt, data, stored, importance, outliers, plan)
    for count in workers.in_order(partial(_round_rows, job), _row_runs(data.shape)):
        if advance is not None:
            advance(count)
    if fmt.outliers:
        columns = outliers.astype("<u4").view(np.uint8)
        stored[sum(fmt.plane_sizes(data.shape)[:-1]) :][: columns.size] = columns
    return job


def _row_runs(
    shape: tuple[int, ...], elements: int | None = None, start: int = 0, stop: int | None = None
) -> list[tuple[int, int]]:
    """Rows `[start, stop)` in runs of about so many elements, else of `TASK_ELEMENTS`."""
    step = max(1, (elements or TASK_ELEMENTS) // shape[1])
    stop = shape[0] if stop is None else stop
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]


def _round_rows(job: _Job, rows: tuple[int, int]) -> int:
    """Round some rows into the job's bytes, and return how many.

    Without a sweep they are rounded a few at a time, whose temporaries stay in the cache.
    """
    start, stop = rows
    x = finite_rows(job.data, start, stop)
    runs = [rows] if job.plan else _row_runs(job.data.shape, ELEMENTS_AT_ONCE, start, stop)
    for first, last in runs:
        _keep(job, first, last, _planes(job, x[first - start : last - start]))
    return stop - start


def _keep(job: _Job, start: int, stop: int, planes: list[Bytes]) -> None:
    """Put the planes' bytes of some rows in their places."""
    base = 0
    for plane, size in zip(planes, job.fmt.plane_sizes(job.data.shape), strict=False):
        row = plane.size // (stop - start)
        job.stored[base + start * row : base + stop * row] = plane.reshape(-1)
        base += size


def _planes(job: _Job, x: Floats) -> list[Bytes]:
    """The planes' bytes of some rows; behind them the outliers' numbers, where there are any."""
    fmt, rest = job.fmt, x
    if len(job.outliers):
        rest = SCRATCH.take("rest", x.shape)
        rest[:] = x
        rest[:, job.outliers] = 0.0
    grid = search(fmt, rest, job.importance)
    if job.plan is None:
        quants, kept = integers(fmt, x, grid, SCRATCH.take("quants", x.shape)), x
    else:
        quants, kept = round_compensated(fmt, x, grid, job.plan)
    if not len(job.outliers):
        return blocks(fmt, quants, grid)
    more = _split_outliers(fmt, quants, kept, grid, job.outliers)
    return [*blocks(fmt, quants, grid), np.ascontiguousarray(to_half(more)).view(np.uint8)]


def _split_outliers(
    fmt: WeightFormat, quants: Floats, kept: Floats, grid: Grid, outliers: Columns
) -> Floats:
    """Give the outliers their integers, and return what each has besides, `[n, outliers]`.

    An outlier's integer is the nearest one: its fp16 number then holds little, and that exactly.
    """
    limits, group = range_of(fmt), outliers // fmt.group
    x, scale, base = kept[:, outliers], grid.scale[:, group], grid.base[:, group]
    nearest = (x - base) * divided(np.float32(1.0), scale)
    np.clip(np.rint(nearest, out=nearest), limits.low, limits.high, out=nearest)
    quants[:, outliers] = nearest
    nearest *= scale
    nearest += base
    return x - nearest


def _sample(data: WeightData) -> list[tuple[int, int]]:
    """Runs of rows that stand for the matrix."""
    n = data.shape[0]
    if n <= SAMPLE_RUNS * SAMPLE_ROWS:
        return [(0, n)]
    starts = np.linspace(0, n - SAMPLE_ROWS, SAMPLE_RUNS).astype(int).tolist()
    return [(start, start + SAMPLE_ROWS) for start in starts]


def _salient_columns(
    workers: Workers, fmt: WeightFormat, data: WeightData, importance: Floats | None
) -> Columns:
    """The columns whose rounding costs most, ascending: what they lose themselves, and what the
    others of their groups lose to the scale that they ask for."""
    if not fmt.outliers:
        return np.zeros(0, np.intp)
    k = data.shape[1]
    counts = np.ones(k, np.float32) if importance is None else importance
    cost: Any = np.zeros(k, np.float64)
    by_group = counts.reshape(-1, fmt.group).sum(axis=1, keepdims=True)
    for own, excess in workers.in_order(partial(_column_costs, fmt, data), _sample(data)):
        cost = cost + own * counts
        cost += (excess * by_group).reshape(-1)
    return np.sort(np.argsort(-cost, kind="stable")[: fmt.outliers])


def _column_costs(
    fmt: WeightFormat, data: WeightData, rows: tuple[int, int]
) -> tuple[Floats, Floats]:
    """What rounding some rows loses in each column `[K]`, and what each makes others lose, by
    groups `[G, g]`."""
    limits = range_of(fmt)
    # A step is the group's largest number over `steps`, and rounding loses a twelfth of its square.
    steps = (limits.high - limits.low) / 2
    x = finite_rows(data, *rows)
    grid = search(fmt, x)  # one that does not favour the columns in question
    quants = integers(fmt, x, grid, SCRATCH.take("quants", x.shape))
    change = numbers(fmt, quants, grid, SCRATCH.take("whole", x.shape))
    np.subtract(x, change, out=change)
    own = np.square(change, out=change).sum(axis=0)
    squares = np.square(x, out=change).reshape(len(x), -1, fmt.group)
    ordered = SCRATCH.take("rest", squares.shape)
    ordered[:] = squares
    usual = fmt.group - 1 - fmt.group // 8  # an eighth of a group is larger
    ordered.partition(usual, axis=2)
    squares -= ordered[..., usual, None]
    excess = np.maximum(squares, 0, out=squares).sum(axis=0) / (12 * steps**2)
    return own, excess


def _measured(
    workers: Workers, job: _Job, statistics: Statistics | None, shift_from: float
) -> Rounded:
    lost = total = shifted = 0.0
    for parts in workers.in_order(partial(_loss, job, statistics), _sample(job.data)):
        lost, total, shifted = lost + parts[0], total + parts[1], shifted + parts[2]
    error = (lost / total) ** 0.5 if total > 0 else 0.0
    share = shifted / lost if lost > 0 else 0.0
    if statistics is None or share < shift_from:
        return Rounded(job.stored, error, None, share)
    mean = partial(_mean_errors, job, statistics.mean)
    shift = np.concatenate(list(workers.in_order(mean, _row_runs(job.data.shape))))
    return Rounded(job.stored, error, shift, share)


def _change(job: _Job, rows: tuple[int, int], x: Any) -> Any:
    return unpack(job.fmt, job.stored, job.data.shape, *rows) - x


def _loss(
    job: _Job, statistics: Statistics | None, rows: tuple[int, int]
) -> tuple[float, float, float]:
    """Squared error of some rows' outputs (weights without statistics), their own squares, and the
    part of the error that is the outputs' means."""
    x = job.data.rows(*rows).astype(np.float64)
    change = _change(job, rows, x)
    if statistics is None:
        return float(np.square(change).sum()), float(np.square(x).sum()), 0.0
    return (
        float(np.einsum("nk,nk->", change @ statistics.moments, change)),
        float(np.einsum("nk,nk->", x @ statistics.moments, x)),
        float(np.square(change @ statistics.mean).sum()),
    )


def _mean_errors(job: _Job, mean: Floats, rows: tuple[int, int]) -> Floats:
    """The mean error of some rows' outputs."""
    shift: Floats = (_change(job, rows, job.data.rows(*rows)) @ mean).astype(np.float32)
    return shift
