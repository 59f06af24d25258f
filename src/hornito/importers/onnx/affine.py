"""Sizes and indices that are known up to two numbers: `N`, the rows of a call, and `P`, the past.

The batch is 1: a session is one sequence. Values are Python integers or `Affine` expressions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.graph.shapes import Affine, Dim, symbol

N = symbol("N")
P = symbol("P")
ENDLESS = symbol("E")
"""The size of a table made at export for all positions: more than any call needs."""
_LEAST = {"N": 1, "P": 0}

Dims = tuple[Dim, ...]
Objects = npt.NDArray[Any]


def plus(a: Dim, b: Dim) -> Dim:
    """`a + b`."""
    return a + b


def minus(a: Dim, b: Dim) -> Dim:
    """`a - b`."""
    return a + b * -1


def times(a: Dim, b: Dim) -> Dim:
    """`a * b`; ValueError when both depend on the call."""
    if isinstance(a, int):
        return b * a
    if isinstance(b, int):
        return a * b
    raise ValueError(f"{a} times {b} is not linear")


def divided(a: Dim, b: Dim) -> Dim:
    """`a / b`, exact or a plain integer division; ValueError otherwise."""
    if not isinstance(b, int) or b == 0:
        raise ValueError(f"{a} divided by {b}")
    if isinstance(a, int):
        # ONNX integer division truncates toward zero.
        return int(a / b) if abs(a) < 1 << 52 else a // b
    if a.const % b or any(c % b for _, c in a.terms):
        raise ValueError(f"{a} is no multiple of {b}")
    total: Dim = a.const // b
    for name, coefficient in a.terms:
        total = total + symbol(name) * (coefficient // b)
    return total


def least(a: Dim) -> int | None:
    """The smallest value that `a` can take; None when it has no lower bound."""
    if isinstance(a, int):
        return a
    if any(name == "E" and c > 0 for name, c in a.terms):
        return 1 << 60
    if any(c < 0 for _, c in a.terms):
        return None
    return a.const + sum(c * _LEAST[name] for name, c in a.terms)


def at_least(a: Dim, b: Dim) -> bool:
    """Whether `a >= b` for every call."""
    low = least(minus(a, b))
    return low is not None and low >= 0


def same(a: Dim, b: Dim) -> bool | None:
    """Whether `a == b`: always, never, or None when it depends on the call."""
    difference = minus(a, b)
    if isinstance(difference, int):
        return difference == 0
    for low in (least(difference), least(difference * -1)):
        if low is not None and low > 0:
            return False
    return None


def equal(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are the same for every call."""
    return len(a) == len(b) and all(x == y for x, y in zip(a, b, strict=True))


def as_dim(value: Any) -> Dim:
    """An element of an integer array as a dimension."""
    return value if isinstance(value, Affine) else int(value)


def objects(values: Sequence[Dim] | Objects) -> Objects:
    """An object array of dimensions with the shape of `values`."""
    source = np.asarray(values, dtype=object)
    out = np.empty(source.shape, dtype=object)
    for index in np.ndindex(source.shape):
        out[index] = as_dim(source[index])
    return out


def is_symbolic(array: Objects) -> bool:
    """Whether some element depends on the call."""
    return array.dtype == object and any(isinstance(v, Affine) for v in array.ravel())


def simplified(array: Objects) -> Objects:
    """An object array without symbols as int64."""
    if array.dtype == object and not is_symbolic(array):
        return array.astype(np.int64)
    return array


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front; ValueError when there is none."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of {rank}")
    return axis % rank


def whole(shape: Sequence[Dim]) -> tuple[int, ...]:
    """A shape that must not depend on the call; ValueError when it does."""
    found = tuple(d for d in shape if isinstance(d, int))
    if len(found) != len(shape):
        raise ValueError(f"{shape_text(shape)} depends on the call")
    return found


def broadcast(a: Sequence[Dim], b: Sequence[Dim]) -> Dims:
    """The shape that two shapes broadcast to; ValueError when they do not."""
    rank = max(len(a), len(b))
    left = (1,) * (rank - len(a)) + tuple(a)
    right = (1,) * (rank - len(b)) + tuple(b)
    out: list[Dim] = []
    for x, y in zip(left, right, strict=True):
        if x == y or y == 1:
            out.append(x)
        elif x == 1:
            out.append(y)
        else:
            raise ValueError(f"{shape_text(a)} and {shape_text(b)} do not broadcast")
    return tuple(out)


def shape_text(shape: Sequence[Dim]) -> str:
    """`[1, N, 64]`."""
    return "[" + ", ".join(map(str, shape)) + "]"


def resolve_reshape(old: Sequence[Dim], target: Sequence[Dim], *, allow_zero: bool) -> Dims:
    """The shape that ONNX Reshape makes; ValueError when the sizes do not fit.

    A size that depends on the call must stand in the target as it is, or be the -1.
    """
    new = [
        old[i] if d == 0 and not allow_zero and i < len(old) else d for i, d in enumerate(target)
    ]
    symbols, size = _factors(old)
    known, holes = 1, []
    for i, d in enumerate(new):
        if d == -1:
            holes.append(i)
            continue
        (part,), factor = _factors([d]) if not isinstance(d, int) else ((None,), d)
        known *= factor
        if part is not None:
            if part not in symbols:
                raise ValueError(f"{shape_text(old)} can't be reshaped to {shape_text(target)}")
            symbols.remove(part)
    fits = len(holes) == 1 and len(symbols) <= 1 and known and size % known == 0
    if fits:
        rest = size // known
        new[holes[0]] = symbols[0] * rest if symbols else rest
    elif holes or symbols or known != size:
        raise ValueError(
            f"{shape_text(old)} can't be reshaped to {shape_text(target)}; a size was probably "
            "fixed when the model was exported"
        )
    return tuple(new)


def _factors(sizes: Sequence[Dim]) -> tuple[list[Dim], int]:
    """The parts of sizes that depend on the call, and the whole factor of all the rest."""
    parts: list[Dim] = []
    whole = 1
    for d in sizes:
        if isinstance(d, int):
            whole *= d
            continue
        factor = math.gcd(d.const, *(c for _, c in d.terms))
        parts.append(divided(d, factor))
        whole *= factor
    return parts, whole
