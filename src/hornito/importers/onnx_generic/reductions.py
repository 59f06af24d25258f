"""ONNX ops over axes: reductions, softmax, norms, running sums, the best."""

from __future__ import annotations

import math

import numpy as np

from hornito.errors import UnsupportedError
from hornito.importers.onnx.reader import OpNode
from hornito.importers.onnx_generic.builder import Builder, Ref, known
from hornito.importers.onnx_generic.elementwise import NUMBERS
from hornito.importers.onnx_generic.table import (
    axis_of,
    handles,
    inputs,
    integer,
    number,
    of_type,
    optional,
)
from hornito.tensor.graph import FLOATS, Attr

_REDUCTIONS = {
    "ReduceSum": "sum",
    "ReduceMean": "mean",
    "ReduceMax": "max",
    "ReduceMin": "min",
    "ReduceProd": "prod",
    "ReduceL1": "l1",
    "ReduceL2": "l2",
    "ReduceSumSquare": "sum_square",
    "ReduceLogSum": "log_sum",
    "ReduceLogSumExp": "log_sum_exp",
}


@handles(*_REDUCTIONS)
def _reduce(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    if a.dtype != "bool" or node.op not in ("ReduceMax", "ReduceMin"):
        of_type(a, NUMBERS)
    given = optional(x, 1)
    axes = node.attrs.get("axes")
    if given is not None:
        axes = b.integers(given, f"{node.op}'s axes")
    if not axes:
        if integer(node, "noop_with_empty_axes", 0):
            return [_nothing(b, node.op, a)]
        axes = list(range(a.rank))
    keep = bool(integer(node, "keepdims", 1))
    fn = _REDUCTIONS[node.op]
    axes = [axis_of(i, a.rank) for i in axes]
    if fn == "log_sum_exp" and a.dtype not in FLOATS:
        whole = b.reduce(fn, b.cast(a, "float32"), axes, keep)
        return [b.cast(whole, a.dtype)]
    return [b.reduce(fn, a, axes, keep)]


def _nothing(b: Builder, op: str, a: Ref) -> Ref:
    """A reduction over no axis: what it does to one number."""
    if op in ("ReduceL1", "ReduceL2"):
        return b.map("abs", [a])
    if op == "ReduceSumSquare":
        return b.map("mul", [a, a])
    if op == "ReduceLogSum":
        return b.map("log", [a])
    return a


@handles("ArgMax", "ArgMin")
def _arg(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    axis = axis_of(integer(node, "axis", 0), a.rank)
    fn = "arg_max" if node.op == "ArgMax" else "arg_min"
    keep, last = bool(integer(node, "keepdims", 1)), bool(integer(node, "select_last_index", 0))
    return [b.reduce(fn, of_type(a, NUMBERS), [axis], keep, "int64", last)]


@handles("Softmax", "LogSoftmax", "Hardmax")
def _softmax(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    fn = {"Softmax": "softmax", "LogSoftmax": "log_softmax"}.get(node.op, "hardmax")
    return [b.rows(fn, of_type(a, FLOATS), [axis_of(integer(node, "axis", -1), a.rank)])]


@handles("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def _norm(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, scale = inputs(x, 2)
    bias = optional(x, 2)
    axis = axis_of(integer(node, "axis", -1), a.rank)
    axes = list(range(axis, a.rank))
    epsilon = number(node, "epsilon", 1e-5)
    centred = node.op == "LayerNormalization"
    made = b.rows("layer_norm" if centred else "rms_norm", of_type(a, FLOATS), axes, epsilon)
    result = b.map("mul", [made, scale])
    if bias is not None:
        result = b.map("add", [result, bias])
    if len(node.outputs) == 1 or not centred:
        return [result]
    mean = b.reduce("mean", a, axes, True)
    apart = b.map("sub", [a, mean])
    variance = b.reduce("mean", b.map("mul", [apart, apart]), axes, True)
    shifted = b.map("add", [variance, known(np.float32(epsilon), a.dtype)])
    inverse = b.map("reciprocal", [b.map("sqrt", [shifted])])
    return [result, mean, inverse][: len(node.outputs)]


@handles("CumSum", "CumProd")
def _scan(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, given = inputs(x, 2)
    axis = axis_of(b.integers(given, f"{node.op}'s axis")[0], a.rank)
    attrs: dict[str, Attr] = {
        "fn": "prod" if node.op == "CumProd" else "sum",
        "length": a.shape[axis],
        "inner": math.prod(a.shape[axis + 1 :]),
        "exclusive": integer(node, "exclusive", 0),
        "reverse": integer(node, "reverse", 0),
    }
    return [b.node("scan", [of_type(a, NUMBERS)], a.dtype, a.shape, attrs)]


@handles("TopK")
def _topk(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, count = inputs(x, 2)
    axis = axis_of(integer(node, "axis", -1), a.rank)
    k = b.integers(count, "TopK's k")[0]
    if not 0 < k <= a.shape[axis]:
        raise UnsupportedError(f"the best {k} of {a.shape[axis]}")
    moved, kept, _ = b.rows_last(of_type(a, NUMBERS), [axis])
    shape = (*moved.shape[:-1], k)
    attrs: dict[str, Attr] = {
        "width": a.shape[axis],
        "k": k,
        "largest": integer(node, "largest", 1),
    }
    values, indices = b.pair("topk", [moved], (a.dtype, "int64"), shape, attrs)
    order = [*kept, axis]
    back = [order.index(i) for i in range(a.rank)]
    return [b.transpose(values, back), b.transpose(indices, back)]
