"""Activation functions, gated or not, and soft caps: sigmoid, tanh and erf of polynomials."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hornito.importers.onnx.match.columns import as_rows, settle
from hornito.importers.onnx.match.norms import same_columns
from hornito.importers.onnx.match.numbers import number
from hornito.importers.onnx.match.shapes import need
from hornito.importers.onnx.registry import Inputs, binary, handles, unary
from hornito.importers.onnx.values import (
    Active,
    Capped,
    Const,
    Curve,
    Poly,
    Rows,
    Unmatched,
    Value,
    columns,
)

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift
    from hornito.importers.onnx.reader import OpNode


def as_poly(value: Value) -> Poly | None:
    """A polynomial of plain activations, or None."""
    if isinstance(value, Poly):
        return value
    if isinstance(value, Rows) and value.plain:
        return Poly(replace(value, factor=1.0), {1: value.factor})
    return None


def _near(a: float, b: float, tolerance: float = 2e-3) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-9)


@binary("Pow")
def power(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """Powers of activations."""
    exponent = number(b)
    if isinstance(a, Rows) and a.plain and exponent in (2.0, 3.0):
        degree = int(exponent)
        return Poly(replace(a, factor=1.0), {degree: a.factor**degree})
    return None


@binary("Mul", "Div")
def products(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """Products of polynomials and curves of the same activations, and with numbers."""
    for value, other in ((a, b), (b, a)):
        by = number(other)
        if by is not None and not (op == "Div" and value is b):
            by = 1.0 / by if op == "Div" else by
            if isinstance(value, Poly):
                return Poly(value.x, {n: c * by for n, c in value.coefs.items()})
            if isinstance(value, Curve):
                return _named(replace(value, poly={n: c * by for n, c in value.poly.items()}))
            if isinstance(value, Active):
                return None
    if op == "Div":
        return None
    left, right = as_poly(a), as_poly(b)
    if left is not None and right is not None and same_columns(left.x, right.x):
        return Poly(left.x, _times(left.coefs, right.coefs))
    for bent, poly in ((a, right), (b, left)):
        if isinstance(bent, Curve) and poly is not None and same_columns(bent.x, poly.x):
            return _named(replace(bent, poly=_times(bent.poly, poly.coefs)))
    return None


def _times(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
    out: dict[int, float] = {}
    for m, x in a.items():
        for n, y in b.items():
            out[m + n] = out.get(m + n, 0.0) + x * y
    return out


@binary("Add", "Sub")
def sums(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """Sums of polynomials of the same activations, and of curves with numbers."""
    sign = 1.0 if op == "Add" else -1.0
    for value, other in ((a, b), (b, a)):
        by = number(other)
        if by is None or (op == "Sub" and value is b):
            continue
        if isinstance(value, Curve) and value.poly == {0: 1.0}:
            return replace(value, alpha=value.alpha + sign * by)
        if isinstance(value, Poly):
            coefs = dict(value.coefs)
            coefs[0] = coefs.get(0, 0.0) + sign * by
            return Poly(value.x, coefs)
    if not isinstance(a, Poly) and not isinstance(b, Poly):
        return None
    left, right = as_poly(a), as_poly(b)
    if left is None or right is None or not same_columns(left.x, right.x):
        return None
    coefs = dict(left.coefs)
    for n, c in right.coefs.items():
        coefs[n] = coefs.get(n, 0.0) + sign * c
    return Poly(left.x, coefs)


@unary("Sigmoid", "Tanh", "Erf")
def curve(cx: Lift, op: str, value: Value) -> Value | None:
    """Sigmoid, tanh and erf of a polynomial."""
    poly = as_poly(value)
    if poly is None:
        return None
    c = poly.coefs
    first = c.get(1, 0.0)
    if set(c) == {1}:
        if op == "Sigmoid":
            name = "sigmoid" if first == 1.0 else f"sigmoid of {first:g} x"
        elif op == "Erf":
            name = "erf" if _near(first, 2**-0.5) else f"erf of {first:g} x"
        else:
            name = f"tanh:{1.0 / first!r}"
        return Curve(poly.x, name, 0.0, 1.0)
    cubic = op == "Tanh" and set(c) == {1, 3} and _near(c[3] / first, 0.044715)
    if cubic and _near(first, math.sqrt(2 / math.pi)):
        return Curve(poly.x, "tanh_gelu", 0.0, 1.0)
    return None


def _named(curve: Curve) -> Value:
    """A curve that is a known activation or a soft cap, as that."""
    p = curve.poly
    if set(p) == {0} and curve.function.startswith("tanh:") and curve.alpha == 0.0:
        cap = float(curve.function[5:])
        if _near(curve.beta * p[0], cap, 1e-5):
            return Capped(curve.x, float(round(cap, 4)))
    if set(p) != {1}:
        return curve
    alpha, beta = curve.alpha * p[1], curve.beta * p[1]
    if curve.function == "sigmoid" and alpha == 0.0 and _near(beta, 1.0, 1e-6):
        return Active(curve.x, "silu")
    halves = _near(alpha, 0.5, 1e-6) and _near(beta, 0.5, 1e-6)
    if curve.function == "tanh_gelu" and halves:
        return Active(curve.x, "gelu_tanh")
    if curve.function == "erf" and halves:
        return Active(curve.x, "gelu")
    return curve


@handles("Gelu", "com.microsoft:Gelu", "com.microsoft:FastGelu")
def gelu(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """GELU as one op."""
    if len(x) > 1 and x[1] is not None:
        raise Unmatched("a GELU with a bias")
    rows = as_rows(cx, need(x, 0), cx.root(0))
    tanh = node.attrs.get("approximate") == "tanh" or node.op == "FastGelu"
    return Active(rows, "gelu_tanh" if tanh else "gelu")


@handles("com.microsoft:QuickGelu", "Swish")
def swish(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """`x * sigmoid(alpha * x)`; SiLU when alpha is 1."""
    default = 1.702 if node.op == "QuickGelu" else 1.0
    if node.attrs.get("alpha", default) != 1.0:
        raise Unmatched(f"x * sigmoid({node.attrs.get('alpha', default):g} x)")
    return Active(as_rows(cx, need(x, 0), cx.root(0)), "silu")


@binary("Mul")
def gated(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """`activation(gate) * up`."""
    for i, (active, up) in enumerate(((a, b), (b, a))):
        if not isinstance(active, Active) or not isinstance(up, Rows):
            continue
        gate = settle(cx, active.x, cx.root(i))
        other = settle(cx, up, cx.root(1 - i))
        width = cx.dag.nodes[gate.value].width
        attrs = {"activation": active.activation}
        inputs = [gate.value, other.value]
        made = cx.dag.emit("gated_activation", inputs, attrs, width=width, root=cx.now)
        cx.note(f"gated {active.activation}")
        return columns(made, gate.terms[0].cols.shape, gate.axis, gate.dim)
    return None


@handles("Clip")
def clip(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Clips that only keep fp16 from overflowing; Hornito's activations are fp32."""
    value = need(x, 0)
    low = number(x[1]) if len(x) > 1 and x[1] is not None else node.attrs.get("min")
    high = number(x[2]) if len(x) > 2 and x[2] is not None else node.attrs.get("max")
    if isinstance(value, Const) and value.array.dtype != object:
        array = value.numbers()
        floor, ceiling = -np.inf if low is None else low, np.inf if high is None else high
        return Const(np.clip(array, floor, ceiling).astype(array.dtype), value.sources)
    wide = (low is None or low <= -65000) and (high is None or high >= 65000)
    if isinstance(value, Rows) and wide:
        cx.note("clip to the range of fp16 left out")
        return value
    raise Unmatched("a clip")
