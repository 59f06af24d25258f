"""The functions of tensor ops on known numbers, in numpy: how constants fold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hornito.tensor.graph import Array


def _div(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b)
    quotient = np.abs(a) // np.abs(safe)
    signed = np.where((a < 0) != (b < 0), -quotient, quotient) if a.dtype.kind == "i" else quotient
    return np.where(b == 0, 0, signed)


def _mod(a: Array, b: Array) -> Array:
    return np.asarray(np.mod(a, b))


FOLDED: dict[str, Callable[..., Any]] = {
    "identity": np.array,
    "abs": np.abs,
    "neg": np.negative,
    "ceil": np.ceil,
    "floor": np.floor,
    "round": np.rint,
    "sqrt": np.sqrt,
    "reciprocal": lambda a: np.ones((), a.dtype) / a,
    "exp": np.exp,
    "log": np.log,
    "sin": np.sin,
    "cos": np.cos,
    "sign": np.sign,
    "is_nan": np.isnan,
    "not": np.logical_not,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _div,
    "pow": np.power,
    "max": np.maximum,
    "min": np.minimum,
    "mod": _mod,
    "fmod": np.fmod,
    "equal": np.equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "where": np.where,
}
FOLDED |= {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}

FOLDED_REDUCTIONS: dict[str, Callable[[Array, tuple[int, ...]], Any]] = {
    "sum": lambda a, axes: np.sum(a, axes, dtype=a.dtype),
    "prod": lambda a, axes: np.prod(a, axes, dtype=a.dtype),
    "max": lambda a, axes: np.max(a, axes),
    "min": lambda a, axes: np.min(a, axes),
}
