"""Rounding to 8 and 4 bits: each group of a row gets the scale that leaves the least squared error.

The scale is rounded to its fp16 before the error is measured, so the search judges what is stored.
Candidates come from the largest magnitude and from fewer and more steps than it asks for; of the
integers that each gives, the least-squares scale is taken. Columns may count by how much a model's
activations make of them. The result depends on the numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import UnsupportedError
from hornito.quant.formats import Bytes, Floats, WeightFormat
from hornito.quant.planes import pack_nibbles
from hornito.quant.scratch import SCRATCH

ELEMENTS_AT_ONCE = 1 << 18
"""Weights that are searched together: their temporaries stay in the processor's cache, and threads
seldom wait for Python's lock, which every operation of numpy takes."""

_HALF_MAX = np.float32(65504.0)
_INT8_STEPS = ((1, 127.0), (1, 125.5), (1, 124.0))
_INT4_STEPS = (
    *((-1, size) for size in (8.6, 8.2, 7.8, 7.4, 6.9, 6.3)),
    *((1, size) for size in (8.6, 8.2, 7.8)),
)
"""Which sign the largest magnitude gets, and how many steps. Where nothing is clipped one sign is
as good as the other."""
_INT4M_STEPS = ((15.0, 0.0), (14.3, 0.0), (14.3, 0.5), (13.4, 0.5), (12.4, 0.5), (15.7, 0.0))
"""Steps between the least and the largest weight, and how many of them the grid begins higher."""


@dataclass(frozen=True, slots=True)
class Range:
    """What a format's integers are: `low` to `high`; `stored` is what the bytes add to them."""

    low: int
    high: int
    stored: int
    has_base: bool


RANGES: dict[int, Range] = {
    2: Range(-127, 127, 0, False),
    3: Range(-8, 7, 8, False),
    4: Range(0, 15, 0, True),
}
"""By a format's number; numbers can be rounded to these formats only."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales and bases of the groups of rows, `[n, K / group]`, as the fp16 that is stored."""

    scale: Floats
    base: Floats


def range_of(fmt: WeightFormat) -> Range:
    """The integers of a format.

    Raises:
        UnsupportedError: there is no rounding to that format.
    """
    if fmt.number not in RANGES:
        raise UnsupportedError(f"numbers can't be rounded to {fmt.name}, only blocks repacked")
    return RANGES[fmt.number]


def search(fmt: WeightFormat, values: Floats, importance: Floats | None = None) -> Grid:
    """The scales that leave the least error.

    Args:
        values: float32 `[n, K]`.
        importance: of each column, `[K]`; how much a squared error in it counts.

    Raises:
        UnsupportedError: there is no rounding to that format.
    """
    limits = range_of(fmt)
    n, k = values.shape
    groups = k // fmt.group
    weights = np.ones(k, np.float32) if importance is None else importance.astype(np.float32)
    # A group that never counts is rounded as if all of it did.
    weights = np.maximum(
        weights, np.float32(1e-9) * max(weights.max(initial=0.0), np.float32(1e-30))
    )
    by_group = weights.reshape(groups, fmt.group)
    by_group = by_group / by_group.mean(axis=1, keepdims=True)
    scale, base = np.zeros((n, groups), np.float32), np.zeros((n, groups), np.float32)
    step = max(1, ELEMENTS_AT_ONCE // k)
    for start in range(0, n, step):
        x = np.ascontiguousarray(values[start : start + step]).reshape(-1, groups, fmt.group)
        part = slice(start, start + len(x))
        with np.errstate(over="ignore", invalid="ignore"):
            if limits.has_base:
                scale[part], base[part] = _affine(x, by_group)
            else:
                steps = _INT8_STEPS if fmt.number == 2 else _INT4_STEPS
                scale[part] = _symmetric(x, by_group, steps, limits)
    return Grid(scale, base)


def to_half(values: Floats) -> npt.NDArray[np.float16]:
    """fp16, rounded to nearest even, saturating."""
    return np.clip(values, -_HALF_MAX, _HALF_MAX).astype("<f2")


def divided(a: Any, b: Floats) -> Floats:
    """a / b, 0 where b is 0."""
    quotient: Floats = np.divide(a, b, out=np.zeros_like(b), where=b != 0)
    return quotient


def _stored(values: Floats) -> Floats:
    return to_half(values).astype(np.float32)


def _symmetric(
    x: Floats, weights: Floats, steps: tuple[tuple[int, float], ...], limits: Range
) -> Floats:
    """Scales `[n, G]` of groups `[n, G, g]`."""
    alike = bool((weights == 1).all())
    whole, clipped = SCRATCH.take("whole", x.shape), SCRATCH.take("clipped", x.shape)
    counted = SCRATCH.take("counted", x.shape)
    weighted = x if alike else np.multiply(x, weights, out=SCRATCH.take("weighted", x.shape))
    squares = np.einsum("ngk,ngk->ng", weighted, x)
    at = np.abs(x, out=whole).argmax(axis=2)[..., None]
    extreme = np.take_along_axis(x, at, axis=2)[..., 0]
    products = np.empty((len(steps), *extreme.shape), np.float32)
    norms = np.empty_like(products)
    signs, sizes = (np.array(part, np.float32)[:, None, None] for part in zip(*steps, strict=True))
    inverses = divided(sizes, np.broadcast_to(extreme, products.shape))
    before = 0.0
    for place, (sign, size) in sorted(enumerate(steps), key=lambda step: step[1][1]):
        if size != before:
            np.rint(np.multiply(x, inverses[place, ..., None], out=whole), out=whole)
            before = size
        q = whole  # of a negative sign: the integers' negatives
        # The first is clipped in any case: it stays finite in a group of subnormal numbers.
        if place == 0 or size >= limits.high + 0.5:
            ends = (limits.low, limits.high) if sign > 0 else (-limits.high, -limits.low)
            q = np.clip(whole, *ends, out=clipped)
        np.einsum("ngk,ngk->ng", weighted, q, out=products[place])
        by_weight = q if alike else np.multiply(q, weights, out=counted)
        np.einsum("ngk,ngk->ng", by_weight, q, out=norms[place])
    products = signs * products + np.float32(0.0)  # no negative zero
    scales = _stored(divided(products, norms))
    best, found = _least(squares + scales * (scales * norms - 2 * products))
    scales = np.take_along_axis(scales, best, axis=0)
    scales[~found] = 0.0
    chosen: Floats = scales[0]
    return chosen


def _affine(x: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Scales and bases `[n, G]` of groups `[n, G, g]`."""
    q, counted = SCRATCH.take("whole", x.shape), SCRATCH.take("counted", x.shape)
    weighted = np.multiply(x, weights, out=SCRATCH.take("weighted", x.shape))
    squares, sums = np.einsum("ngk,ngk->ng", weighted, x), weighted.sum(axis=2)
    total = weights.sum(axis=1)
    low, high = x.min(axis=2), x.max(axis=2)
    sizes, shifts = np.array(_INT4M_STEPS, np.float32).T[..., None, None]
    widths = (high - low) / sizes
    starts, inverses = low + widths * shifts, divided(np.float32(1.0), widths)
    products = np.empty_like(widths)
    q_sum, q_norm = np.empty_like(products), np.empty_like(products)
    for place in range(len(_INT4M_STEPS)):
        np.subtract(x, starts[place, ..., None], out=q)
        q *= inverses[place, ..., None]
        np.clip(np.rint(q, out=q), 0, 15, out=q)
        np.multiply(q, weights, out=counted)
        counted.sum(axis=2, out=q_sum[place])
        np.einsum("ngk,ngk->ng", counted, q, out=q_norm[place])
        np.einsum("ngk,ngk->ng", weighted, q, out=products[place])
    # The straight line through (q, x) with the least squared error.
    spread = total * q_norm - q_sum * q_sum
    scale = _stored(divided(total * products - q_sum * sums, spread))
    base = _stored((sums - scale * q_sum) / total)
    error = squares + scale * (scale * q_norm - 2 * products + 2 * base * q_sum)
    error += base * (base * total - 2 * sums)
    best, found = _least(error)
    scales, bases = (np.take_along_axis(values, best, axis=0) for values in (scale, base))
    scales[~found] = bases[~found] = 0.0
    return scales[0], bases[0]


def _least(errors: Floats) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """The first candidate with the least error of `[candidates, n, G]`, and whether any is finite,
    both `[1, n, G]`."""
    errors = np.where(errors < np.inf, errors, np.float32(np.inf))  # NaN is none
    best = errors.argmin(axis=0)[None]
    return best, np.take_along_axis(errors, best, axis=0) < np.inf


def integers(fmt: WeightFormat, values: Floats, grid: Grid, out: Floats | None = None) -> Floats:
    """The nearest integers, as floats `[n, K]`, in `out` if it is given."""
    limits = range_of(fmt)
    x = values.reshape(len(values), -1, fmt.group)
    q = (np.empty(values.shape, np.float32) if out is None else out).reshape(x.shape)
    if limits.has_base:
        x = np.subtract(x, grid.base[..., None], out=q)
    np.multiply(x, divided(np.float32(1.0), grid.scale)[..., None], out=q)
    np.clip(np.rint(q, out=q), limits.low, limits.high, out=q)
    return q.reshape(values.shape)


def numbers(fmt: WeightFormat, quants: Floats, grid: Grid, out: Floats | None = None) -> Floats:
    """What integers stand for, `[n, K]`, in `out` if it is given."""
    q = quants.reshape(len(quants), -1, fmt.group)
    x = (np.empty(quants.shape, np.float32) if out is None else out).reshape(q.shape)
    np.multiply(q, grid.scale[..., None], out=x)
    x += grid.base[..., None]
    return x.reshape(quants.shape)


def blocks(fmt: WeightFormat, quants: Floats, grid: Grid) -> list[Bytes]:
    """Integers and scales as uint8 `[n K / block, bytes]`, one array a plane."""
    limits = range_of(fmt)
    scales = to_half(grid.scale).reshape(-1, 1)
    if limits.has_base:
        scales = np.concatenate([scales, to_half(grid.base).reshape(-1, 1)], axis=1)
    if fmt.number == 2:
        body = quants.astype(np.int8).view(np.uint8).reshape(-1, fmt.block)
    else:
        stored = quants
        if limits.stored:
            stored = np.add(quants, limits.stored, out=SCRATCH.take("stored", quants.shape))
        body = pack_nibbles(stored.astype(np.uint8).reshape(-1, fmt.block))
    return [body, np.ascontiguousarray(scales).view(np.uint8)]
