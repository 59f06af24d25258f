"""The functions of the op `map` in numpy, and the types of its results.

Numbers are float64 or int64 whatever the element type; `cast` and `wrap` bring them back to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from hornito.tensor.graph import EXACT, FLOATS, Array, round_bfloat16

Unary = Callable[[Array, float, float], Array]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def apply(fn: str, x: Sequence[Array], kind: int, p: float, q: float) -> Array:
    """A function of `hornito.tensor.kernels.FUNCTIONS` over operands of one shape.

    Args:
        kind: what the operands hold: 0 floats, 1 signed, 2 unsigned integers.
        p, q: its parameters.
    """
    if fn == "where":
        return np.where(x[0] != 0, x[1], x[2])
    if fn in _COMPARISONS:
        return np.asarray(_COMPARISONS[fn](x[0], x[1]), np.int64)
    if fn == "is_nan":
        return np.asarray(np.isnan(x[0]), np.int64)
    if fn == "is_inf":
        negative, positive = (x[0] == -np.inf) & (p != 0), (x[0] == np.inf) & (q != 0)
        return np.asarray(negative | positive, np.int64)
    if fn in ("cast", "identity"):
        return x[0]
    if len(x) == 2:
        return (_binary_float if kind == 0 else _binary_integer)(fn, x[0], x[1])
    if kind == 0:
        return _UNARY[fn](x[0], p, q)
    return _INTEGER[fn](x[0])


def cast(numbers: Array, dtype: str) -> Array:
    """Numbers as an element type takes them: rounded, cut to 32 bits, or 0 and 1."""
    if dtype in FLOATS:
        floats = np.asarray(numbers, np.float64)
        if dtype == "float16":
            floats = floats.astype(np.float32).astype(np.float16)
        if dtype == "bfloat16":
            floats = round_bfloat16(floats.astype(np.float32))
        return np.asarray(floats, np.float64)
    if dtype == "bool":
        return np.asarray(numbers != 0, np.int64)
    if numbers.dtype.kind == "f":
        low, high = (0, (1 << 32) - 1) if dtype[0] == "u" else (-(1 << 31), (1 << 31) - 1)
        low = min(low, -(1 << 31))
        numbers = np.clip(np.nan_to_num(np.trunc(numbers)), low, high).astype(np.int64)
    return wrap(numbers, dtype)


def wrap(numbers: Array, dtype: str) -> Array:
    """Integers as their type holds them; 64-bit ones stay as they are."""
    whole = numbers.astype(np.int64)
    if dtype == "bool":
        return np.asarray(whole != 0, np.int64)
    return whole if dtype in EXACT else np.asarray(whole.astype(dtype), np.int64)


def _sigmoid(a: Array) -> Array:
    return 1 / (1 + np.exp(-a))


def _softplus(a: Array) -> Array:
    return np.asarray(np.logaddexp(0.0, a))


_UNARY: dict[str, Unary] = {
    "abs": lambda a, p, q: np.abs(a),
    "neg": lambda a, p, q: -a,
    "ceil": lambda a, p, q: np.ceil(a),
    "floor": lambda a, p, q: np.floor(a),
    "round": lambda a, p, q: np.rint(a),
    "sqrt": lambda a, p, q: np.sqrt(a),
    "reciprocal": lambda a, p, q: 1 / a,
    "exp": lambda a, p, q: np.exp(a),
    "log": lambda a, p, q: np.log(a),
    "sin": lambda a, p, q: np.sin(a),
    "cos": lambda a, p, q: np.cos(a),
    "tan": lambda a, p, q: np.tan(a),
    "asin": lambda a, p, q: np.arcsin(a),
    "acos": lambda a, p, q: np.arccos(a),
    "atan": lambda a, p, q: np.arctan(a),
    "sinh": lambda a, p, q: np.sinh(a),
    "cosh": lambda a, p, q: np.cosh(a),
    "tanh": lambda a, p, q: np.tanh(a),
    "asinh": lambda a, p, q: np.arcsinh(a),
    "acosh": lambda a, p, q: np.arccosh(a),
    "atanh": lambda a, p, q: np.arctanh(a),
    "erf": lambda a, p, q: _erf(a),
    "sigmoid": lambda a, p, q: _sigmoid(a),
    "softplus": lambda a, p, q: _softplus(a),
    "softsign": lambda a, p, q: a / (1 + np.abs(a)),
    "relu": lambda a, p, q: np.maximum(a, 0.0),
    "elu": lambda a, p, q: np.where(a < 0, p * np.expm1(a), a),
    "selu": lambda a, p, q: q * np.where(a > 0, a, p * np.expm1(a)),
    "celu": lambda a, p, q: np.maximum(a, 0) + np.minimum(0, p * np.expm1(a / p)),
    "leaky_relu": lambda a, p, q: np.where(a < 0, p * a, a),
    "thresholded_relu": lambda a, p, q: np.where(a > p, a, 0.0),
    "hard_sigmoid": lambda a, p, q: np.clip(p * a + q, 0, 1),
    "hard_swish": lambda a, p, q: a * np.clip(a / 6 + 0.5, 0, 1),
    "gelu": lambda a, p, q: 0.5 * a * (1 + _erf(a / math.sqrt(2))),
    "gelu_tanh": lambda a, p, q: (
        0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
    ),
    "mish": lambda a, p, q: a * np.tanh(_softplus(a)),
    "swish": lambda a, p, q: a * _sigmoid(p * a),
    "shrink": lambda a, p, q: np.where(a < -p, a + q, np.where(a > p, a - q, 0.0)),
    "sign": lambda a, p, q: np.sign(a),
}

_INTEGER: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "neg": np.negative,
    "sign": np.sign,
    "relu": lambda a: np.maximum(a, 0),
    "not": lambda a: (a == 0).astype(np.int64),
    "bit_not": np.invert,
}

_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "equal": np.equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}

_SHARED: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def _binary_float(fn: str, a: Array, b: Array) -> Array:
    if fn in _SHARED:
        return _SHARED[fn](a, b)
    if fn == "div":
        return np.asarray(a / b)
    if fn == "pow":
        return np.asarray(np.power(a, b))
    if fn == "prelu":
        return np.where(a < 0, a * b, a)
    return np.asarray(np.mod(a, b) if fn == "mod" else np.fmod(a, b))


def _binary_integer(fn: str, a: Array, b: Array) -> Array:
    if fn in _SHARED:
        return _SHARED[fn](a, b)
    if fn in _BITS:
        return _BITS[fn](a, b)
    safe = np.where(b == 0, 1, b)
    if fn == "div":  # towards zero
        whole = np.abs(a) // np.abs(safe) * np.sign(a) * np.sign(safe)
        return np.where(b == 0, 0, whole)
    if fn == "pow":
        powers = np.power(a, np.maximum(b, 0))
        return np.where(b < 0, np.where(np.abs(a) == 1, np.power(a, b & 1), 0), powers)
    return np.where(b == 0, 0, np.mod(a, safe) if fn == "mod" else np.fmod(a, safe))


_BITS: dict[str, Callable[[Array, Array], Array]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shift_left": lambda a, b: np.where((b < 0) | (b > 31), 0, a << np.clip(b, 0, 31)),
    "shift_right": lambda a, b: a >> np.where(b < 0, 63, np.minimum(b, 31)),
}
