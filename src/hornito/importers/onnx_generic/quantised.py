"""ONNX ops between numbers and small integers: QuantizeLinear and its kin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hornito.errors import UnsupportedError
from hornito.importers.onnx.reader import OpNode
from hornito.importers.onnx_generic.builder import Builder, Ref, known
from hornito.importers.onnx_generic.table import (
    axis_of,
    handles,
    inputs,
    integer,
    of_type,
    optional,
    type_name,
)
from hornito.tensor.graph import FLOATS

_QUANTS = ("uint8", "int8", "uint16", "int16")


@handles("DequantizeLinear")
def _dequantize(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, scale = inputs(x, 2)
    of_type(a, (*_QUANTS, "int32"))
    zero = optional(x, 2)
    dtype = (
        type_name(integer(node, "output_dtype", 0))
        if node.attrs.get("output_dtype")
        else scale.dtype
    )
    apart = b.cast(a, "int32")
    if zero is not None:
        apart = b.map("sub", [apart, b.cast(_along(b, node, zero, a), "int32")])
    factor = b.cast(_along(b, node, scale, a), "float32")
    return [b.cast(b.map("mul", [b.cast(apart, "float32"), factor]), dtype)]


@handles("QuantizeLinear")
def _quantize(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, scale = inputs(x, 2)
    zero = optional(x, 2)
    dtype = "uint8"
    if zero is not None:
        dtype = zero.dtype
    elif node.attrs.get("output_dtype"):
        dtype = type_name(integer(node, "output_dtype", 0))
    if dtype not in _QUANTS:
        raise UnsupportedError(f"type {dtype} is not supported here; {', '.join(_QUANTS)} are")
    of_type(a, (*FLOATS, "int32"))
    factor = b.cast(_along(b, node, scale, a), "float32")
    rounded = b.map("round", [b.map("div", [b.cast(a, "float32"), factor])])
    if zero is not None:
        shift = b.cast(_along(b, node, zero, a), "float32")
        rounded = b.map("add", [rounded, shift])
    return [_saturated(b, rounded, dtype)]


def _saturated(b: Builder, x: Ref, dtype: str) -> Ref:
    info: Any = np.iinfo(dtype)
    low, high = (known(np.float32(v)) for v in (info.min, info.max))
    return b.cast(b.map("min", [b.map("max", [x, low]), high]), dtype)


def _along(b: Builder, node: OpNode, parameter: Ref, a: Ref) -> Ref:
    """A scale or zero point in a shape that broadcasts with `a`: one, per axis, or per block."""
    if parameter.size == 1:
        return b.reshape(parameter, ())
    axis = axis_of(integer(node, "axis", 1), a.rank)
    if parameter.rank == 1:
        return b.reshape(parameter, [d if i == axis else 1 for i, d in enumerate(a.shape)])
    block = integer(node, "block_size", 0)
    blocks = parameter.shape[axis]
    if block < 1 or blocks != math.ceil(a.shape[axis] / block):
        raise UnsupportedError(f"blocks of {block} for scales of shape {parameter.shape}")
    return b.take(parameter, {axis: [i // block for i in range(a.shape[axis])]})


@handles("DynamicQuantizeLinear")
def _dynamic(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    of_type(a, ("float32",))
    axes = list(range(a.rank))
    nothing = known(np.float32(0))
    low = b.map("min", [b.reduce("min", a, axes, False), nothing])
    high = b.map("max", [b.reduce("max", a, axes, False), nothing])
    step = b.map("div", [b.map("sub", [high, low]), known(np.float32(255))])
    # All zeros: any step will do, but 0.
    scale = b.map("where", [b.map("equal", [step, nothing], "bool"), known(np.float32(1)), step])
    shift = b.map("round", [b.map("div", [b.map("sub", [nothing, low]), scale])])
    zero = _saturated(b, shift, "uint8")
    rounded = b.map("round", [b.map("div", [a, scale])])
    return [_saturated(b, b.map("add", [rounded, b.cast(zero, "float32")]), "uint8"), scale, zero]
