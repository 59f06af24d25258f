"""ONNX ops that choose elements by computed indices."""

from __future__ import annotations

import math

import numpy as np

from hornito.errors import UnsupportedError
from hornito.importers.onnx.reader import OpNode
from hornito.importers.onnx_generic.builder import Builder, Ref, known
from hornito.importers.onnx_generic.table import axis_of, handles, inputs, integer, of_type
from hornito.tensor.graph import SIGNED, Attr
from hornito.tensor.kernels import strides_of

MAX_MAP = 1 << 16
"""Known indices up to this many become a map instead of a table lookup."""


@handles("Gather")
def _gather(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    data, indices = inputs(x, 2)
    axis = axis_of(integer(node, "axis", 0), data.rank)
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    dim = data.shape[axis]
    if indices.array is not None and indices.size <= MAX_MAP:
        chosen = indices.array.reshape(-1).astype(np.int64)
        if chosen.size and (chosen.min() < -dim or chosen.max() >= dim):
            raise UnsupportedError(f"an index lies outside an axis of {dim}")
        return [b.reshape(b.take(data, {axis: (chosen % max(dim, 1)).tolist()}), shape)]
    attrs: dict[str, Attr] = {
        "fn": "gather",
        "p": [dim, math.prod(data.shape[axis + 1 :]), indices.size, 0],
    }
    return [b.node("gather", [data, of_type(indices, SIGNED)], data.dtype, shape, attrs)]


@handles("GatherElements")
def _gather_elements(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    data, indices = inputs(x, 2)
    axis = axis_of(integer(node, "axis", 0), data.rank)
    attrs: dict[str, Attr] = {
        "fn": "elements",
        "p": [data.shape[axis], 0, axis, 0],
        "dims": list(indices.shape),
        "strides": strides_of(data.shape),
    }
    return [b.node("gather", [data, of_type(indices, SIGNED)], data.dtype, indices.shape, attrs)]


@handles("GatherND")
def _gather_nd(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    data, indices = inputs(x, 2)
    batch = integer(node, "batch_dims", 0)
    depth = indices.shape[-1]
    own = strides_of(data.shape)
    rest = data.shape[batch + depth :]
    attrs: dict[str, Attr] = {
        "fn": "tuples",
        "dims": list(data.shape[batch : batch + depth]),
        "strides": own[batch : batch + depth],
        "p": [
            math.prod(data.shape[batch:]),
            math.prod(rest),
            depth,
            math.prod(indices.shape[batch:-1]),
        ],
    }
    shape = (*indices.shape[:-1], *rest)
    return [b.node("gather", [data, of_type(indices, SIGNED)], data.dtype, shape, attrs)]


@handles("OneHot")
def _one_hot(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    indices, depth, values = inputs(x, 3)
    count = b.integers(depth, "OneHot's depth")[0]
    axis = axis_of(integer(node, "axis", -1), indices.rank + 1)
    shape = (*indices.shape[:axis], count, *indices.shape[axis:])
    attrs: dict[str, Attr] = {
        "fn": "one_hot",
        "p": [count, math.prod(indices.shape[axis:]), 0, 0],
    }
    chosen = indices if indices.dtype in SIGNED else b.cast(indices, "int64")
    return [b.node("gather", [values, chosen], values.dtype, shape, attrs)]


@handles("ScatterElements", "Scatter")
def _scatter_elements(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    data, indices, updates = inputs(x, 3)
    axis = axis_of(integer(node, "axis", 0), data.rank)
    attrs: dict[str, Attr] = {
        "fn": str(node.attrs.get("reduction", "none")),
        "tuples": 0,
        "p": [axis, 0, 0, 0],
        "dims": list(data.shape),
        "strides": [],
    }
    operands = [data, of_type(indices, SIGNED), of_type(updates, (data.dtype,))]
    return [b.node("scatter", operands, data.dtype, data.shape, attrs)]


@handles("ScatterND")
def _scatter_nd(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    data, indices, updates = inputs(x, 3)
    depth = indices.shape[-1]
    tuples = math.prod(indices.shape[:-1])
    if tuples == 0:
        return [data]
    attrs: dict[str, Attr] = {
        "fn": str(node.attrs.get("reduction", "none")),
        "tuples": 1,
        "p": [tuples, math.prod(data.shape[depth:]), depth, 0],
        "dims": list(data.shape[:depth]),
        "strides": strides_of(data.shape)[:depth],
    }
    operands = [data, of_type(indices, SIGNED), of_type(updates, (data.dtype,))]
    return [b.node("scatter", operands, data.dtype, data.shape, attrs)]


@handles("Compress")
def _compress(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    data, condition = inputs(x, 2)
    chosen = np.flatnonzero(b.numbers(condition, "Compress's condition"))
    if "axis" not in node.attrs:
        data, axis = b.reshape(data, (data.size,)), 0
    else:
        axis = axis_of(integer(node, "axis", 0), data.rank)
    return [b.take(data, {axis: chosen.tolist()})]


@handles("NonZero")
def _non_zero(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    found = np.nonzero(b.numbers(a, "NonZero's input"))
    return [known(np.stack(found).astype(np.int64) if found else np.zeros((0, 0), np.int64))]
