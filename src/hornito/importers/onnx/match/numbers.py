"""Constants and shape arithmetic, folded; casts; and the way elementwise ops find their matcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hornito.importers.onnx import affine
from hornito.importers.onnx.registry import BINARY, ELEMENTWISE, UNARY, Inputs, handles
from hornito.importers.onnx.values import (
    MAX_COMPUTED,
    Active,
    Array,
    Capped,
    Const,
    Curve,
    Grid,
    Ids,
    Longer,
    Mask,
    Matrix,
    NanFlag,
    Rows,
    Scaled,
    Scores,
    Unmatched,
    Value,
)

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift
    from hornito.importers.onnx.reader import OpNode

_FLOATS = {1: np.float32, 10: np.float16, 11: np.float64, 16: np.float32}
_INTS = {
    2: np.uint8,
    3: np.int8,
    5: np.int16,
    6: np.int32,
    7: np.int64,
    12: np.uint32,
    13: np.uint64,
}
BOOL = 9

_NUMPY_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Max": np.maximum,
    "Min": np.minimum,
}
_NUMPY_UNARY: dict[str, Callable[[Any], Any]] = {
    "Neg": np.negative,
    "Abs": np.abs,
    "Sqrt": np.sqrt,
    "Reciprocal": np.reciprocal,
    "Exp": np.exp,
    "Log": np.log,
    "Cos": np.cos,
    "Sin": np.sin,
    "Tanh": np.tanh,
    "Not": np.logical_not,
    "IsNaN": np.isnan,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
_SYMBOLIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": affine.plus,
    "Sub": affine.minus,
    "Mul": affine.times,
    "Div": affine.divided,
    "Equal": affine.same,
    "GreaterOrEqual": lambda a, b: _order(a, b, 0),
    "Greater": lambda a, b: _order(a, b, 1),
    "LessOrEqual": lambda a, b: _order(b, a, 0),
    "Less": lambda a, b: _order(b, a, 1),
    "Max": lambda a, b: a if affine.at_least(a, b) else _other(b, a),
    "Min": lambda a, b: b if affine.at_least(a, b) else _other(a, b),
}
ELEMENTWISE_BINARY = (*_NUMPY_BINARY, "Div", "Pow")
ELEMENTWISE_UNARY = (*_NUMPY_UNARY, "Erf")
ELEMENTWISE.update(ELEMENTWISE_BINARY, ELEMENTWISE_UNARY)


def _order(a: Any, b: Any, margin: int) -> bool | None:
    """Whether `a - b >= margin`; None when it depends on the call."""
    if affine.at_least(a, affine.plus(b, margin)):
        return True
    return False if affine.at_least(affine.plus(b, margin - 1), a) else None


def _other(a: Any, b: Any) -> Any:
    if affine.at_least(a, b):
        return a
    raise Unmatched(f"which of {a} and {b} is larger depends on the call")


def number(value: Value | None) -> float | None:
    """The one number that a value is everywhere, or None."""
    if isinstance(value, Const):
        return value.scalar()
    if isinstance(value, Mask) and not value.atoms:
        return float(value.table)
    return None


def rounded(value: Const) -> float | None:
    """Its one number as the shortest decimal of its type: fp16's 1.0133e-06 is 1e-6."""
    plain = value.scalar()
    if plain is None or value.array.dtype not in (np.float16, np.float32):
        return plain
    return float(str(value.array.dtype.type(plain)))


def fold_binary(op: str, a: Const, b: Const) -> Const:
    """An elementwise operation of two constants, symbols included."""
    left, right = a.numbers(), b.numbers()
    sources = a.sources + b.sources
    if left.dtype == object or right.dtype == object:
        return Const(affine.simplified(_symbolic(op, left, right)), sources)
    if op == "Div":
        if left.dtype.kind in "iu" and right.dtype.kind in "iu":
            return Const((np.trunc(left / right)).astype(left.dtype), sources)
        return Const(np.asarray(left / right), sources)
    if op == "Pow":
        return Const(np.asarray(np.power(left, right), left.dtype), sources)
    with np.errstate(all="ignore"):
        return Const(np.asarray(_NUMPY_BINARY[op](left, right)), sources)


def _item(value: Any) -> Any:
    """An element as a Python number (whole if it can be) or an expression."""
    plain = value.item() if isinstance(value, np.generic) else value
    return int(plain) if isinstance(plain, float) and plain == int(plain) else plain


def _longer(cx: Lift, op: str, a: Const, b: Const) -> Longer | None:
    """A comparison of the total length with a number."""
    offsets = {"Greater": 1, "GreaterOrEqual": 0, "Less": 0, "LessOrEqual": 1}
    if op not in offsets or a.size != 1 or b.size != 1 or cx.past == 0:
        return None
    left, right = (affine.as_dim(_item(v.numbers().reshape(-1)[0])) for v in (a, b))
    turned = op.startswith("Less")
    if isinstance(left, int):
        left, right = right, left
        turned = not turned
        offsets = {"Greater": 0, "GreaterOrEqual": 1, "Less": 1, "LessOrEqual": 0}
    if left != cx.total or not isinstance(right, int):
        return None
    # total > right, or total >= right, that is total > right - 1.
    return Longer(right - 1 + offsets[op], turned)


def _symbolic(op: str, left: Array, right: Array) -> Array:
    if op not in _SYMBOLIC:
        raise Unmatched(f"{op} of sizes that depend on the call")
    a, b = np.broadcast_arrays(left, right)
    out = np.empty(a.shape, dtype=object)
    for index in np.ndindex(a.shape):
        x, y = _item(a[index]), _item(b[index])
        result = _SYMBOLIC[op](x, y)
        if result is None:
            raise Unmatched(f"{op} of {x} and {y} depends on the call")
        out[index] = result
    if all(isinstance(v, bool) for v in out.ravel()):
        return out.astype(bool)
    return out


@handles(*ELEMENTWISE_BINARY)
def elementwise(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Folds constants, else asks the matchers of the op in turn. Max and Min take any number."""
    if len(x) == 1 and x[0] is not None:
        return x[0]
    result = x[0]
    for other in x[1:]:
        if result is None or other is None:
            raise ValueError("an operand is absent")
        result = apply_binary(cx, node.op, result, other)
    if result is None:
        raise ValueError("no operand")
    return result


def apply_binary(cx: Lift, op: str, a: Value, b: Value) -> Value:
    """One elementwise operation on values."""
    if isinstance(a, Const) and isinstance(b, Const):
        longer = _longer(cx, op, a, b)
        return fold_binary(op, a, b) if longer is None else longer
    for matcher in BINARY.get(op, ()):
        found = matcher(cx, op, a, b)
        if found is not None:
            return found
    raise Unmatched(f"{op} of {type(a).__name__} and {type(b).__name__} is not understood")


@handles(*ELEMENTWISE_UNARY)
def elementwise_unary(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Folds a constant, else asks the matchers of the op in turn."""
    (value,) = x
    if value is None:
        raise ValueError("no operand")
    if isinstance(value, Const) and node.op in _NUMPY_UNARY:
        array = value.numbers()
        if array.dtype == object:
            if node.op != "Neg":
                raise Unmatched(f"{node.op} of a size that depends on the call")
            return Const(_symbolic("Mul", array, np.array(-1)), value.sources)
        with np.errstate(all="ignore"):
            return Const(np.asarray(_NUMPY_UNARY[node.op](array)), value.sources)
    for matcher in UNARY.get(node.op, ()):
        found = matcher(cx, node.op, value)
        if found is not None:
            return found
    raise Unmatched(f"{node.op} of {type(value).__name__} is not understood")


@handles("Constant")
def constant(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """A constant node in any of its spellings."""
    for name, value in node.attrs.items():
        if isinstance(value, Const):
            return value
        if name in ("value_int", "value_ints"):
            return Const(np.asarray(value, np.int64))
        if name in ("value_float", "value_floats"):
            return Const(np.asarray(value, np.float32))
    raise Unmatched("a constant of a type that is not supported")


@handles("Identity", "Dropout")
def identity(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Passes its input on (Dropout does nothing at inference)."""
    if x[0] is None:
        raise ValueError("no operand")
    return x[0]


@handles("Cast", "CastLike")
def cast(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Types are Hornito's own: a cast of activations between float types means nothing, and
    positions stay integers whatever the file rounds them to."""
    value = x[0]
    if value is None:
        raise ValueError("no operand")
    to = node.attrs.get("to", 1) if node.op == "Cast" else 1
    if isinstance(value, Const):
        return _cast_const(value, to)
    if isinstance(value, Mask):
        if to == BOOL:
            return Mask(value.shape, value.atoms, value.table != 0)
        kind = np.float64 if to in _FLOATS else np.int64
        table = value.table.astype(np.float64)
        if kind is np.int64:
            table = np.trunc(table)
        return Mask(value.shape, value.atoms, table.astype(kind))
    if isinstance(value, Grid) and (to in _FLOATS or to in _INTS):
        return value
    if isinstance(value, Ids | Matrix) and to in (6, 7):
        return value
    if isinstance(value, NanFlag) and to == BOOL:
        return value
    if to in _FLOATS and not isinstance(value, Grid | Ids | NanFlag):
        return value
    raise Unmatched(f"a cast of {type(value).__name__} to type {to}")


def _cast_const(value: Const, to: int) -> Const:
    if value.array.dtype == object:
        if to in _INTS or to in _FLOATS:
            return value
        raise Unmatched(f"a size that depends on the call is cast to type {to}")
    floats = value.array.dtype.kind == "f" or value.bf16
    if value.array.size > MAX_COMPUTED:
        if floats and to in _FLOATS:
            return value
        raise Unmatched(f"a constant of {value.array.size} elements is cast to type {to}")
    array = value.numbers()
    if to in _FLOATS:
        if floats:
            return value  # keeps the precision and the view of the file
        return Const(array.astype(_FLOATS[to]), value.sources)
    if to == BOOL:
        return Const(array.astype(bool), value.sources)
    if to in _INTS:
        return Const(array.astype(_INTS[to]), value.sources)
    raise Unmatched(f"a cast to type {to}")


def is_activation(value: Value) -> bool:
    """Whether it holds numbers computed from token ids."""
    return isinstance(value, Rows | Active | Capped | Curve | Scores | Scaled)
