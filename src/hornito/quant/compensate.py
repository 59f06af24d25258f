"""Rounding in which each column's error is made up for by the columns that are rounded after it.

With H the second moments of a layer's inputs, a change D of the weights changes the outputs by
`tr(D H D^T)`. Columns are rounded one by one, those that inputs make most of first; what rounding
leaves of a column is spread over the columns still to come, in the way that H says keeps the
outputs. Outliers come last: they are kept in fp16 and take up what is left.

The method is GPTQ's (Frantar et al., 2022) with scales that are fixed beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hornito.quant.formats import Floats, WeightFormat
from hornito.quant.rounding import Grid, divided, range_of

BLOCK = 64
"""Columns whose errors are spread over the rest together."""

Columns = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Sweep:
    """How errors spread: the order of the columns, the outliers at its end, and the upper factor of
    the inverse moments in that order, `[K, K]`."""

    order: Columns
    outliers: int
    factor: Floats


def sweep(moments: Floats, outliers: Columns, damping: float) -> Sweep:
    """Prepare the rounding of matrices that read inputs with these second moments `[K, K]`.

    Args:
        outliers: columns that are not rounded.
        damping: of the mean moment, added to all: how little the moments are trusted.
    """
    k = len(moments)
    h = moments.astype(np.float64)
    diagonal = np.diag(h).copy()
    h[np.diag_indices(k)] += damping * max(diagonal.mean(), 1e-30)
    key = diagonal
    key[outliers] = -np.inf
    order = np.argsort(-key, kind="stable")
    lower = np.linalg.cholesky(h[np.ix_(order[::-1], order[::-1])])
    # The upper factor of the inverse is the inverse of the lower one, turned round.
    inverse = np.linalg.inv(lower)
    factor = np.ascontiguousarray(inverse[::-1, ::-1])
    return Sweep(order, len(outliers), factor.astype(np.float32))


def round_compensated(
    fmt: WeightFormat, values: Floats, grid: Grid, plan: Sweep
) -> tuple[Floats, Floats]:
    """Integers `[n, K]`, and weights `[n, K]` of which only those of outliers count.

    Args:
        values: float32 `[n, K]`.
        grid: the scales.
    """
    limits = range_of(fmt)
    n, k = values.shape
    x = np.ascontiguousarray(values[:, plan.order].T)  # [K, n]
    quants = np.zeros_like(x)
    scale, base = np.ascontiguousarray(grid.scale.T), np.ascontiguousarray(grid.base.T)
    inverse = divided(np.float32(1.0), scale)
    group = plan.order // fmt.group
    last = k - plan.outliers
    for begin in range(0, last, BLOCK):
        end = min(begin + BLOCK, last)
        errors = np.empty((end - begin, n), np.float32)
        for j in range(begin, end):
            g, q, error = group[j], quants[j], errors[j - begin]
            np.subtract(x[j], base[g], out=q)
            q *= inverse[g]
            np.clip(np.rint(q, out=q), limits.low, limits.high, out=q)
            np.multiply(q, scale[g], out=error)
            error += base[g]
            np.subtract(x[j], error, out=error)
            error /= plan.factor[j, j]
            if j + 1 < end:
                x[j + 1 : end] -= plan.factor[j, j + 1 : end, None] * error
        if end < k:
            x[end:] -= plan.factor[begin:end, end:].T @ errors
    back = np.empty_like(plan.order)
    back[plan.order] = np.arange(k)
    return np.ascontiguousarray(quants[back].T), np.ascontiguousarray(x[back].T)
