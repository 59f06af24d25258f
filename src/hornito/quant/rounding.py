"""Rounding to 8 and 4 bits: each group of a row gets the scale that leaves the least squared error.

The scale is rounded to its fp16 before the error is measured, and the integers are those of the
rounded scale, so the search judges what is stored. Candidates come from the largest magnitude and
from fewer and more steps than it asks for; each is followed by the least-squares scale of its
integers. The result depends on the numbers alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hornito.errors import UnsupportedError
from hornito.quant.formats import Bytes, Floats, WeightFormat
from hornito.quant.planes import pack_nibbles

GROUPS_AT_ONCE = 1 << 11
"""Groups that are searched together: their temporaries stay in the processor's cache."""

_HALF_MAX = np.float32(65504.0)
_INT8_STEPS = (127.0, 125.5, 124.0)
_INT4_STEPS = tuple(sign * step for sign in (-1, 1) for step in (8.5, 8.0, 7.5, 7.0, 6.5, 6.0))
_INT4M_STEPS = (15.0, 14.4, 13.8, 15.7)


def quantise(fmt: WeightFormat, values: Floats) -> list[Bytes]:
    """The planes' blocks of float32 `[n, K]`, one uint8 array `[n K / block, bytes]` a plane.

    Raises:
        UnsupportedError: there is no rounding to that format.
    """
    search = {2: _int8, 3: _int4, 4: _int4m}.get(fmt.number)
    if search is None:
        raise UnsupportedError(f"numbers can't be rounded to {fmt.name}, only blocks repacked")
    groups = values.reshape(-1, fmt.block)
    parts = [
        search(groups[start : start + GROUPS_AT_ONCE])
        for start in range(0, len(groups), GROUPS_AT_ONCE)
    ]
    return [np.concatenate(planes) for planes in zip(*parts, strict=True)]


def to_half(values: Floats) -> npt.NDArray[np.float16]:
    """fp16, rounded to nearest even, saturating."""
    return np.clip(values, -_HALF_MAX, _HALF_MAX).astype("<f2")


def _divided(a: Floats, b: Floats) -> Floats:
    """a / b, 0 where b is 0."""
    quotient: Floats = np.divide(a, b, out=np.zeros_like(a), where=b != 0)
    return quotient


def _rounded(x: Floats, scale: Floats, low: int, high: int) -> Floats:
    """Integers of x in steps of scale `[n, 1]`, as floats."""
    inverse = _divided(np.ones_like(scale), scale)
    steps: Floats = np.clip(np.rint(x * inverse), low, high)
    return steps


def _symmetric(
    x: Floats, steps: tuple[float, ...], low: int, high: int
) -> tuple[Floats, npt.NDArray[np.float16]]:
    """Integers and scales `[n, 1]` of groups `[n, g]`."""
    at = np.abs(x).argmax(axis=1)[:, None]
    extreme = np.take_along_axis(x, at, axis=1)
    best = np.full((len(x), 1), np.inf, np.float32)
    quants, scales = np.zeros_like(x), np.zeros((len(x), 1), np.float16)
    for step in steps:
        scale = to_half(extreme / np.float32(step))
        for _ in range(2):
            q = _rounded(x, scale.astype(np.float32), low, high)
            error = np.square(x - q * scale.astype(np.float32)).sum(axis=1, keepdims=True)
            better = error < best
            best = np.where(better, error, best)
            quants = np.where(better, q, quants)
            scales = np.where(better, scale, scales)
            scale = to_half(
                _divided((x * q).sum(axis=1, keepdims=True), (q * q).sum(axis=1, keepdims=True))
            )
    return quants, scales


def _int8(x: Floats) -> list[Bytes]:
    quants, scales = _symmetric(x, _INT8_STEPS, -127, 127)
    return [quants.astype(np.int8).view(np.uint8), scales.view(np.uint8)]


def _int4(x: Floats) -> list[Bytes]:
    quants, scales = _symmetric(x, _INT4_STEPS, -8, 7)
    return [pack_nibbles((quants + 8).astype(np.uint8)), scales.view(np.uint8)]


def _int4m(x: Floats) -> list[Bytes]:
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    best = np.full((len(x), 1), np.inf, np.float32)
    quants = np.zeros_like(x)
    pairs = np.zeros((len(x), 2), np.float16)
    for step in _INT4M_STEPS:
        scale, base = to_half((high - low) / np.float32(step)), to_half(low)
        for _ in range(2):
            s, m = scale.astype(np.float32), base.astype(np.float32)
            q = _rounded(x - m, s, 0, 15)
            error = np.square(x - (s * q + m)).sum(axis=1, keepdims=True)
            better = error < best
            best = np.where(better, error, best)
            quants = np.where(better, q, quants)
            pairs = np.where(better, np.concatenate([scale, base], axis=1), pairs)
            # The straight line through (q, x) with the least squared error.
            q_mean, x_mean = q.mean(axis=1, keepdims=True), x.mean(axis=1, keepdims=True)
            spread = np.square(q - q_mean).sum(axis=1, keepdims=True)
            slope = _divided(((q - q_mean) * (x - x_mean)).sum(axis=1, keepdims=True), spread)
            scale, base = to_half(slope), to_half(x_mean - slope * q_mean)
    return [pack_nibbles(quants.astype(np.uint8)), pairs.view(np.uint8)]
