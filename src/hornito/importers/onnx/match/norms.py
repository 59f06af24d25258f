"""RMS norm and layer norm, spelled out or as one op."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hornito.importers.families import decimal
from hornito.importers.onnx.affine import axis_of
from hornito.importers.onnx.match.columns import as_rows, settle
from hornito.importers.onnx.match.numbers import number, rounded
from hornito.importers.onnx.match.shapes import axes_of, need
from hornito.importers.onnx.registry import Inputs, binary, handles, unary
from hornito.importers.onnx.tensors import as_weight
from hornito.importers.onnx.values import (
    Const,
    Folded,
    Norm,
    Poly,
    Rows,
    Unmatched,
    Value,
    columns,
    shape_of,
)

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift
    from hornito.importers.onnx.reader import OpNode


@handles("ReduceMean")
def mean(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """The mean of squares (RMS norm, variance), or of the values (layer norm)."""
    value = need(x, 0)
    if isinstance(value, Const):
        axes = axes_of(node, x)
        keep = bool(node.attrs.get("keepdims", 1))
        return Const(np.mean(value.numbers(), axis=axes, keepdims=keep), value.sources)
    rank = len(shape_of(value))
    axes = axes_of(node, x)
    last = axes is not None and [axis_of(a, rank) for a in axes] == [rank - 1]
    if not last or not node.attrs.get("keepdims", 1):
        raise Unmatched("a mean that is not over the last axis")
    if isinstance(value, Poly) and value.coefs == {2: 1.0}:
        return Norm("mean_square", value.x)
    if isinstance(value, Norm) and value.stage == "square":
        return replace(value, stage="mean_square")
    if isinstance(value, Rows):
        return Norm("mean", value)
    raise Unmatched(f"a mean of {type(value).__name__}")


@binary("Sub")
def centred(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """`x - mean(x)`."""
    of_mean = isinstance(b, Norm) and b.stage == "mean"
    if isinstance(a, Rows) and isinstance(b, Norm) and of_mean and same_columns(a, b.x):
        return Norm("centred", a, centred=True)
    return None


def same_columns(a: Rows, b: Rows) -> bool:
    """Whether two tensors hold the same columns of the same value."""
    if a is b:
        return True
    return (
        (a.value, a.axis, a.factor, len(a.terms)) == (b.value, b.axis, b.factor, len(b.terms))
        and a.shape == b.shape
        and all(np.array_equal(p, q) for p, q in zip(a.arrays, b.arrays, strict=True))
    )


@binary("Pow", "Mul")
def squared(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """The square of centred values."""
    if not isinstance(a, Norm) or a.stage != "centred":
        return None
    if (op == "Pow" and number(b) == 2.0) or (op == "Mul" and b is a):
        return replace(a, stage="square")
    return None


@binary("Add")
def stable(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """The epsilon."""
    for value, other in ((a, b), (b, a)):
        if isinstance(value, Norm) and value.stage == "mean_square" and isinstance(other, Const):
            eps = rounded(other)
            if eps is not None:
                return replace(value, stage="stable", eps=eps)
    return None


@unary("Sqrt", "Reciprocal")
def root(cx: Lift, op: str, value: Value) -> Value | None:
    """The root mean square and its inverse."""
    stages = {("Sqrt", "stable"): "root", ("Reciprocal", "root"): "inverse"}
    if isinstance(value, Norm) and (op, value.stage) in stages:
        return replace(value, stage=stages[op, value.stage])
    return None


@binary("Pow")
def root_power(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """`x ^ -0.5` and `x ^ 0.5`."""
    if isinstance(a, Norm) and a.stage == "stable" and number(b) in (0.5, -0.5):
        return replace(a, stage="root" if number(b) == 0.5 else "inverse")
    return None


@binary("Div", "Mul")
def normed(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """`x / root`, `x * inverse`, `1 / root`."""
    if op == "Div":
        if not isinstance(b, Norm) or b.stage != "root":
            return None
        if number(a) == 1.0:
            return replace(b, stage="inverse")
        return _normed(a, b)
    for value, other in ((a, b), (b, a)):
        if isinstance(other, Norm) and other.stage == "inverse":
            return _normed(value, other)
    return None


def _normed(value: Value, norm: Norm) -> Value | None:
    if norm.centred:
        if isinstance(value, Norm) and value.stage == "centred" and same_columns(value.x, norm.x):
            return replace(norm, stage="normed")
    elif isinstance(value, Rows) and same_columns(value, norm.x):
        return replace(norm, stage="normed")
    return None


@binary("Mul")
def weighted(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """The norm's weight; that of a layer norm waits for its bias."""
    for value, other in ((a, b), (b, a)):
        if isinstance(value, Norm) and value.stage == "normed" and isinstance(other, Const):
            if value.centred:
                return replace(value, stage="weighted", weight=other)
            return finish(cx, value, other, None, cx.now)
    return None


@binary("Add")
def biased(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """The bias of a layer norm."""
    for value, other in ((a, b), (b, a)):
        waits = isinstance(value, Norm) and value.stage == "weighted"
        if isinstance(value, Norm) and waits and value.weight and isinstance(other, Const):
            return finish(cx, value, value.weight, other, cx.now)
    return None


def finish(cx: Lift, norm: Norm, weight: Const, bias: Const | None, root: int) -> Rows:
    """The raised norm, of whole rows or of each head."""
    x = settle(cx, norm.x, root)
    sizes = x.terms[0].cols.shape
    width = sizes[-1]
    for part in (weight, bias):
        if part is not None and (part.size != width or part.array.shape[-1:] != (width,)):
            raise Unmatched(f"a norm over {width} columns with weights {part.array.shape}")
    total = cx.dag.nodes[x.value].width
    heads = total // width
    if norm.x.factor != 1.0:
        raise Unmatched("a norm of scaled activations")
    names = [
        cx.dag.weight(as_weight(replace(p, array=p.array.reshape(-1)))) if p is not None else ""
        for p in (weight, bias)
    ]
    eps = decimal(norm.eps)
    if bias is not None or norm.centred:
        if heads != 1:
            raise Unmatched("a layer norm of each head")
        inputs = [x.value, names[0], "", names[1]]
        made = cx.dag.emit("layer_norm", inputs, {"eps": eps}, width=total, root=root)
        cx.note("layer norm")
    else:
        attrs = {"eps": eps} if heads == 1 else {"eps": eps, "heads": heads}
        made = cx.dag.emit("rms_norm", [x.value, names[0], ""], attrs, width=total, root=root)
        cx.note("RMS norm" if heads == 1 else "RMS norm of each head")
    return columns(made, sizes, x.axis, x.dim)


def last_axis(node: OpNode, value: Value) -> bool:
    """Whether a norm's axis is the last one."""
    rank = len(shape_of(value))
    return axis_of(int(node.attrs.get("axis", -1)), rank) == rank - 1


@handles("LayerNormalization")
def layer_normalization(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """A layer norm as one op."""
    value, weight = need(x, 0), need(x, 1)
    bias = x[2] if len(x) > 2 else None
    rows = as_rows(cx, value, cx.root(0))
    if not isinstance(weight, Const) or not last_axis(node, value):
        raise Unmatched("a layer norm that is not over the last axis by constants")
    if bias is None:
        bias = Const(np.zeros(weight.size, np.float32))
    if not isinstance(bias, Const):
        raise Unmatched("a layer norm whose bias is computed")
    norm = Norm("normed", rows, node.attrs.get("epsilon", 1e-5), centred=True)
    return finish(cx, norm, weight, bias, cx.now)


@handles(
    "RMSNormalization", "SimplifiedLayerNormalization", "com.microsoft:SimplifiedLayerNormalization"
)
def rms_normalization(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """An RMS norm as one op."""
    value, weight = need(x, 0), need(x, 1)
    folded = isinstance(value, Folded)
    rows = value.inner if isinstance(value, Folded) else as_rows(cx, value, cx.root(0))
    if not isinstance(weight, Const) or not last_axis(node, value):
        raise Unmatched("an RMS norm that is not over the last axis by constants")
    norm = Norm("normed", rows, node.attrs.get("epsilon", 1e-5))
    result = finish(cx, norm, weight, None, cx.now)
    return Folded(result) if folded else result


@handles("com.microsoft:SkipSimplifiedLayerNormalization", "com.microsoft:SkipLayerNormalization")
def skip_norm(cx: Lift, node: OpNode, x: Inputs) -> list[Value | None]:
    """A residual sum and a norm of it; the fourth result is the sum."""
    from hornito.importers.onnx.match.linear import residual

    rms = node.op == "SkipSimplifiedLayerNormalization"
    a, b = (as_rows(cx, need(x, i), cx.root(i)) for i in range(2))
    weight = need(x, 2)
    bias = None if rms else (x[3] if len(x) > 3 else None)
    skip_bias = x[3 if rms else 4] if len(x) > (3 if rms else 4) else None
    if skip_bias is not None:
        raise Unmatched("a residual sum with a bias")
    if not isinstance(weight, Const) or not isinstance(bias, Const | None):
        raise Unmatched("a norm whose weights are computed")
    total = residual(cx, a, b)
    default = 1e-5 if rms else 1e-12
    norm = Norm("normed", total, node.attrs.get("epsilon", default), centred=not rms)
    if not rms and bias is None:
        bias = Const(np.zeros(weight.size, np.float32))
    return [finish(cx, norm, weight, bias, cx.now), None, None, total]
