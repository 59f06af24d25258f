"""Products with weights: projections and their biases, the embedding, residual sums."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hornito.graph.weights import TransposedData, WeightData
from hornito.importers.onnx.blocks import transposed
from hornito.importers.onnx.match.attention import multiply, weigh
from hornito.importers.onnx.match.columns import as_rows, settle
from hornito.importers.onnx.match.rope import turn_angles
from hornito.importers.onnx.match.shapes import need
from hornito.importers.onnx.registry import Inputs, binary, handles
from hornito.importers.onnx.tensors import as_weight
from hornito.importers.onnx.values import (
    Active,
    Capped,
    Const,
    Grid,
    Ids,
    Keys,
    Lookup,
    Matrix,
    Norm,
    Rows,
    Scores,
    Unmatched,
    Value,
    columns,
    shape_of,
)

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift
    from hornito.importers.onnx.reader import OpNode

ROWS_LIKE = (Rows, Active, Norm, Capped)


def weight_of(value: Value) -> WeightData:
    """A constant matrix as `[in, out]` data would be applied: here transposed to `[out, in]`."""
    if isinstance(value, Const) and value.array.ndim >= 2:
        lead = value.array.shape[:-2]
        if any(d != 1 for d in lead):
            raise Unmatched(f"a product with a stack of matrices {value.array.shape}")
        matrix = value.array.reshape(value.array.shape[-2:])
        return as_weight(replace(value, array=matrix.T))
    if isinstance(value, Matrix):
        return transposed(value.data)
    raise Unmatched(f"a product with {type(value).__name__}")


def project(cx: Lift, x: Value, weight: WeightData, index: int) -> Rows:
    """`x @ weight.T`, the last axis of x being all of its columns."""
    if isinstance(x, Rows) and x.factor != 1.0:
        raise Unmatched(f"a product of activations times {x.factor:g}")
    rows = settle(cx, as_rows(cx, x, cx.root(index)), cx.root(index))
    shape = rows.terms[0].cols.shape
    if rows.axis == len(shape) - 1 or shape[-1] != rows.terms[0].cols.size:
        raise Unmatched("a product over a part of the columns")
    if weight.shape[1] != shape[-1]:
        raise ValueError(f"{shape[-1]} columns times a weight {weight.shape}")
    name = cx.dag.weight(weight)
    made = cx.dag.linear(rows.value, name, "", root=cx.now)
    cx.note("projection")
    return columns(made, (*shape[:-1], weight.shape[0]), rows.axis, rows.dim)


@handles("MatMul")
def matmul(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Projections, angles of RoPE, queries times keys, attention weights times values."""
    a, b = need(x, 0), need(x, 1)
    if isinstance(a, Const) and isinstance(b, Const):
        return Const(a.numbers() @ b.numbers(), a.sources + b.sources)
    for grid, table in ((a, b), (b, a)):
        if isinstance(grid, Grid) and isinstance(table, Const):
            inner = {shape_of(a)[-1], shape_of(b)[-2] if len(shape_of(b)) > 1 else None}
            if inner != {1}:
                raise Unmatched("a product of positions over more than one term")
            return turn_angles(cx, grid, table)
    if isinstance(a, Scores) and isinstance(b, Keys):
        return weigh(cx, a, b)
    if isinstance(b, Keys):
        return multiply(cx, as_rows(cx, a, cx.root(0)), b, cx.root(0))
    if isinstance(a, ROWS_LIKE) and isinstance(b, Rows):
        return _without_past(cx, a, b)
    if isinstance(a, Scores) and isinstance(b, Rows):
        return weigh(cx, a, _fresh(cx, b, "value"))
    if isinstance(a, ROWS_LIKE):
        return project(cx, a, weight_of(b), 0)
    raise Unmatched(f"a product of {type(a).__name__} and {type(b).__name__}")


def _without_past(cx: Lift, a: Value, b: Rows) -> Value:
    """Queries times keys of a model without a past: the keys are the call's own rows."""
    if b.axis != len(b.shape) - 1:
        raise Unmatched("a product of activations with activations")
    return multiply(cx, as_rows(cx, a, cx.root(0)), _fresh(cx, b, "key"), cx.root(0))


def _fresh(cx: Lift, rows: Rows, part: str) -> Keys:
    """Keys or values of a model without a past."""
    if cx.past != 0:
        raise Unmatched("attention over new keys alone, without the cached ones")
    factor = rows.factor
    bare = rows.terms[0].cols
    node = cx.dag.nodes[rows.value]
    plain = rows.plain and int(bare.max()) + 1 == node.width
    if plain and len(np.unique(bare)) == node.width:
        return Keys(-1, part, rows.value, cx.root(1), rows.axis, rows.dim, bare, factor)
    settled = settle(cx, replace(rows, factor=1.0), cx.root(1))
    cols = settled.terms[0].cols
    return Keys(-1, part, settled.value, cx.root(1), settled.axis, settled.dim, cols, factor)


@handles("Gemm")
def gemm(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """A projection with a bias."""
    a, b = need(x, 0), need(x, 1)
    facts = node.attrs
    if facts.get("transA") or facts.get("alpha", 1.0) != 1.0 or facts.get("beta", 1.0) != 1.0:
        raise Unmatched("a Gemm with factors or a transposed input")
    weight = weight_of(b)
    if facts.get("transB"):
        weight = as_weight(b) if isinstance(b, Const) else TransposedData(weight)
    rows = project(cx, a, weight, 0)
    bias = x[2] if len(x) > 2 else None
    if bias is None:
        return rows
    found = with_bias(cx, rows, bias)
    if found is None:
        raise Unmatched("a Gemm whose bias is no constant vector")
    return found


@binary("Add")
def bias_sum(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """A constant vector added to a projection."""
    for value, other in ((a, b), (b, a)):
        if isinstance(value, Rows) and isinstance(other, Const):
            return with_bias(cx, value, other)
    return None


def with_bias(cx: Lift, rows: Rows, bias: Value) -> Rows | None:
    """The projection with that bias; None when it is none of a whole projection."""
    node = cx.dag.nodes[rows.value]
    if not isinstance(bias, Const) or node.op != "linear" or node.inputs[2] or not rows.plain:
        return None
    width = rows.terms[0].cols.shape[-1]
    lies_along = bias.size == width and bias.array.shape[-1:] == (width,)
    if not lies_along or width != node.width or rows.factor != 1.0:
        return None
    vector = cx.dag.weight(as_weight(replace(bias, array=bias.array.reshape(-1))))
    made = cx.dag.linear(node.inputs[0], node.inputs[1], vector, root=cx.now)
    return replace(rows, value=made)


@binary("Add")
def sums(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """Residual sums, and learned positions added to the embedding."""
    for i, (value, other) in enumerate(((a, b), (b, a))):
        if isinstance(value, Rows) and isinstance(other, Lookup):
            return _positioned(cx, value, other, i)
    if isinstance(a, ROWS_LIKE) and isinstance(b, ROWS_LIKE):
        return residual(cx, as_rows(cx, a, cx.root(0)), as_rows(cx, b, cx.root(1)))
    return None


def residual(cx: Lift, a: Rows, b: Rows) -> Rows:
    """The sum of two rows, the older one (the residual stream) first."""
    left, right = settle(cx, a, cx.root(0)), settle(cx, b, cx.root(1))
    if left.shape != right.shape or left.axis != right.axis:
        raise Unmatched("a sum of activations of different shapes")
    names = sorted((left.value, right.value), key=lambda name: cx.dag.nodes[name].index)
    width = cx.dag.nodes[names[0]].width
    made = cx.dag.emit("add", names, width=width, root=cx.now)
    cx.note("residual sum")
    return columns(made, left.terms[0].cols.shape, left.axis, left.dim)


def _positioned(cx: Lift, rows: Rows, table: Lookup, index: int) -> Rows:
    x = settle(cx, rows, cx.root(index))
    cols = x.terms[0].cols
    if table.cols.size != cols.size or not np.array_equal(table.cols.reshape(-1), cols.reshape(-1)):
        raise Unmatched("rows of a table of another width are added")
    places = cx.dag.weight(as_weight(table.table))
    width = cx.dag.nodes[x.value].width
    made = cx.dag.emit(
        "position_embedding", [x.value, "positions", places], width=width, root=cx.now
    )
    cx.note("learned positions")
    return columns(made, cols.shape, x.axis, x.dim)


def embed(cx: Lift, table: Value, ids: Ids, axis: int) -> Rows:
    """Rows of the embedding."""
    if axis != 0 or len(shape_of(table)) != 2:
        raise Unmatched("token ids pick no rows of a matrix")
    if isinstance(table, Const):
        data: WeightData = as_weight(table)
    elif isinstance(table, Matrix):
        data = table.data
    else:
        raise Unmatched(f"an embedding that is a {type(table).__name__}")
    name = cx.dag.weight(data)
    width = data.shape[1]
    made = cx.dag.emit("embedding", ["ids", name], width=width, root=cx.now)
    cx.note("embedding")
    axis = len(ids.shape) - 1
    sizes = (*(1 for _ in ids.shape), width)
    return columns(made, sizes, axis, ids.shape[axis])
