"""ONNX ops on elements: arithmetic, functions, comparisons, logic, casts."""

from __future__ import annotations

from functools import reduce

import numpy as np

from hornito.errors import UnsupportedError
from hornito.importers.onnx.reader import OpNode
from hornito.importers.onnx_generic.builder import Builder, Ref, known
from hornito.importers.onnx_generic.table import (
    handles,
    inputs,
    integer,
    need,
    number,
    of_type,
    optional,
    type_name,
)
from hornito.tensor.graph import FLOATS, SIGNED, UNSIGNED

INTEGERS = tuple(t for t in (*SIGNED, *UNSIGNED) if t != "bool")
NUMBERS = (*FLOATS, *INTEGERS)

_FLOAT_UNARY = {
    "Ceil": "ceil",
    "Floor": "floor",
    "Round": "round",
    "Sqrt": "sqrt",
    "Reciprocal": "reciprocal",
    "Exp": "exp",
    "Log": "log",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Asin": "asin",
    "Acos": "acos",
    "Atan": "atan",
    "Sinh": "sinh",
    "Cosh": "cosh",
    "Tanh": "tanh",
    "Asinh": "asinh",
    "Acosh": "acosh",
    "Atanh": "atanh",
    "Erf": "erf",
    "Sigmoid": "sigmoid",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "HardSwish": "hard_swish",
    "Mish": "mish",
}
_NUMBER_UNARY = {"Abs": "abs", "Neg": "neg", "Sign": "sign", "Relu": "relu"}
#: Function, and its two parameters as (attribute, default).
_WITH_PARAMETERS: dict[str, tuple[str, tuple[tuple[str, float], ...]]] = {
    "Elu": ("elu", (("alpha", 1.0),)),
    "Selu": ("selu", (("alpha", 1.6732632423543772), ("gamma", 1.0507009873554805))),
    "Celu": ("celu", (("alpha", 1.0),)),
    "LeakyRelu": ("leaky_relu", (("alpha", 0.01),)),
    "ThresholdedRelu": ("thresholded_relu", (("alpha", 1.0),)),
    "HardSigmoid": ("hard_sigmoid", (("alpha", 0.2), ("beta", 0.5))),
    "Swish": ("swish", (("alpha", 1.0),)),
    "Shrink": ("shrink", (("lambd", 0.5), ("bias", 0.0))),
}
_ARITHMETIC = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div"}
_COMPARISONS = {
    "Equal": "equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
}
_LOGIC = {"And": "and", "Or": "or", "Xor": "xor"}
_BITS = {"BitwiseAnd": "and", "BitwiseOr": "or", "BitwiseXor": "xor"}


@handles(*_FLOAT_UNARY)
def _float_unary(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    return [b.map(_FLOAT_UNARY[node.op], [of_type(a, FLOATS)])]


@handles(*_NUMBER_UNARY)
def _number_unary(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    return [b.map(_NUMBER_UNARY[node.op], [of_type(a, NUMBERS)])]


@handles(*_WITH_PARAMETERS)
def _with_parameters(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    fn, parameters = _WITH_PARAMETERS[node.op]
    values = [number(node, name, default) for name, default in parameters]
    if node.op == "Shrink" and a.dtype not in FLOATS:
        shrunk = b.map(fn, [b.cast(a, "float32")], None, *values)
        return [b.cast(shrunk, a.dtype)]
    return [b.map(fn, [of_type(a, FLOATS)], None, *values)]


@handles("Gelu", "com.microsoft:Gelu", "com.microsoft:FastGelu")
def _gelu(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    bias = optional(x, 1)
    if bias is not None:
        a = b.map("add", [a, bias])
    tanh = node.attrs.get("approximate", "none") == "tanh" or node.op == "FastGelu"
    return [b.map("gelu_tanh" if tanh else "gelu", [of_type(a, FLOATS)])]


@handles("Identity")
def _identity(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    return inputs(x, 1)


@handles("Dropout")
def _dropout(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    training = optional(x, 2)
    if training is not None and bool(b.numbers(training, "Dropout's training mode").any()):
        raise UnsupportedError("Dropout in training mode")
    return [a, b.full(a.shape, 1, "bool")][: len(node.outputs)]


@handles(*_ARITHMETIC)
def _arithmetic(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, c = inputs(x, 2)
    return [b.map(_ARITHMETIC[node.op], [of_type(a, NUMBERS), of_type(c, (a.dtype,))])]


@handles("PRelu")
def _prelu(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, slope = inputs(x, 2)
    return [b.map("prelu", [of_type(a, FLOATS), slope])]


@handles("Pow")
def _pow(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, power = inputs(x, 2)
    of_type(a, NUMBERS)
    if a.dtype not in FLOATS and power.dtype in FLOATS:
        return [b.cast(b.map("pow", [b.cast(a, "float32"), power]), a.dtype)]
    return [b.map("pow", [a, b.cast(power, a.dtype)])]


@handles("Mod")
def _mod(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, c = inputs(x, 2)
    return [b.map("fmod" if integer(node, "fmod", 0) else "mod", [of_type(a, NUMBERS), c])]


@handles("Max", "Min", "Sum", "Mean")
def _variadic(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    parts = [of_type(part, NUMBERS) for part in inputs(x, len(x))]
    fn = {"Max": "max", "Min": "min"}.get(node.op, "add")
    total = reduce(lambda a, c: b.map(fn, [a, c]), parts)
    if node.op == "Mean":
        total = b.map("mul", [total, b.full((), 1 / len(parts), total.dtype)])
    return [total]


@handles("Clip")
def _clip(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a = of_type(need(x[0], "input 0"), NUMBERS)
    for fn, bound in (("max", optional(x, 1)), ("min", optional(x, 2))):
        if bound is not None:
            a = b.map(fn, [a, bound])
    return [a]


@handles(*_COMPARISONS)
def _comparison(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, c = inputs(x, 2)
    return [b.map(_COMPARISONS[node.op], [a, of_type(c, (a.dtype,))], "bool")]


@handles(*_LOGIC)
def _logic(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, c = inputs(x, 2)
    return [b.map(_LOGIC[node.op], [of_type(a, ("bool",)), of_type(c, ("bool",))])]


@handles(*_BITS)
def _bits(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, c = inputs(x, 2)
    return [b.map(_BITS[node.op], [of_type(a, INTEGERS), of_type(c, (a.dtype,))])]


@handles("BitShift")
def _shift(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, c = inputs(x, 2)
    left = node.attrs.get("direction") == "LEFT"
    return [b.map("shift_left" if left else "shift_right", [of_type(a, INTEGERS), c])]


@handles("Not")
def _not(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    return [b.map("not", [of_type(a, ("bool",))])]


@handles("BitwiseNot")
def _bitwise_not(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    return [b.map("bit_not", [of_type(a, INTEGERS)])]


@handles("IsNaN")
def _is_nan(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    return [b.map("is_nan", [of_type(a, FLOATS)], "bool")]


@handles("IsInf")
def _is_inf(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    negative, positive = (integer(node, f"detect_{s}", 1) for s in ("negative", "positive"))
    return [b.map("is_inf", [of_type(a, FLOATS)], "bool", negative, positive)]


@handles("Where")
def _where(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    condition, yes, no = inputs(x, 3)
    return [b.map("where", [of_type(condition, ("bool",)), yes, of_type(no, (yes.dtype,))])]


@handles("Cast")
def _cast(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    return [b.cast(a, type_name(integer(node, "to", 1)))]


@handles("CastLike")
def _cast_like(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, like = inputs(x, 2)
    return [b.cast(a, like.dtype)]


@handles("Constant")
def _constant(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    for name, value in node.attrs.items():
        if name == "value":
            return [const_ref(value)]
        if name in ("value_float", "value_floats"):
            return [known(np.asarray(value, np.float32))]
        if name in ("value_int", "value_ints"):
            return [known(np.asarray(value, np.int64))]
    raise UnsupportedError("a constant that is neither numbers nor a dense tensor")


def const_ref(value: object) -> Ref:
    """A constant of the reader as a ref."""
    from hornito.importers.onnx.values import Const

    if not isinstance(value, Const):
        raise UnsupportedError("an attribute that is no tensor")
    if value.bf16:
        return known(value.numbers().astype(np.float32), "bfloat16")
    return known(value.array)
