"""Turning described columns into raised values: slices of joined projections, and RoPE."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hornito.graph.graph import Attr
from hornito.graph.weights import ReorderedData
from hornito.importers.onnx.values import (
    Active,
    Capped,
    Const,
    Norm,
    Rows,
    Unmatched,
    Value,
    columns,
    plain_term,
)

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift


def as_rows(cx: Lift, value: Value | None, root: int) -> Rows:
    """Activations as columns of a raised value; pending activation functions are raised."""
    if isinstance(value, Rows):
        return value
    if isinstance(value, Active):
        x = settle(cx, value.x, root)
        width = cx.dag.nodes[x.value].width
        name = value.activation
        made = cx.dag.emit("activation", [x.value], {"activation": name}, width=width, root=root)
        cx.note(f"activation {name}")
        return columns(made, x.terms[0].cols.shape, x.axis, x.dim)
    if isinstance(value, Norm) and value.stage == "normed":
        from hornito.importers.onnx.match.norms import finish

        width = value.x.arrays[0].shape[-1]
        return finish(cx, value, Const(np.ones(width, np.float32)), None, root)
    if isinstance(value, Capped):
        raise Unmatched("a soft cap on activations that are no logits")
    raise Unmatched(f"{type(value).__name__} where activations are expected")


def settle(cx: Lift, rows: Rows, root: int, *, pairs: bool = False) -> Rows:
    """The same activations as all columns, in order, of a raised value.

    Args:
        pairs: the order of columns within a head does not matter, as queries and keys may have any
            if it is the same: see `turn_pairs`.

    Raises:
        Unmatched: they are scaled, or columns that no raised operation makes.
    """
    if rows.factor != 1.0:
        raise Unmatched(f"activations are multiplied by {rows.factor:g}")
    if not rows.plain:
        rows = _turned(cx, rows, root)
    if rows.value in cx.paired and not pairs:
        raise Unmatched("what RoPE on interleaved pairs has turned is used outside of attention")
    cols = rows.terms[0].cols
    flat = cols.reshape(-1)
    node = cx.dag.nodes[rows.value]
    if len(flat) == node.width and np.array_equal(flat, np.arange(node.width)):
        return rows
    start = int(flat[0]) if len(flat) else 0
    if node.op == "linear" and np.array_equal(flat, np.arange(start, start + len(flat))):
        made = cx.dag.sliced(node, start, start + len(flat), root=root)
        return columns(made, cols.shape, rows.axis, rows.dim)
    raise Unmatched("columns of activations in another order")


def _turned(cx: Lift, rows: Rows, root: int) -> Rows:
    """RoPE: `x * cos + rotate(x) * sin`, over the first dims of every head."""
    shape = rows.terms[0].cols.shape
    if len(shape) < 2:
        raise Unmatched("a rotation of rows without heads")
    head_dim = shape[-1]
    heads = math.prod(shape[:-1])
    lanes = _lanes(rows, heads, head_dim)
    base = int(min(lanes["own"].min(), lanes["other"].min()))
    size = heads * head_dim
    turned = lanes["coef"][0] != 0
    rotary = int(turned.sum())
    half = rotary // 2
    order = np.arange(size).reshape(heads, head_dim) + base
    lane = np.arange(rotary)
    # The lane that each is turned with, and the first of the two: on halves, on neighbours.
    spellings = ((lane + half) % rotary if rotary else lane, lane < half), (lane ^ 1, lane % 2 == 0)
    scale = float(lanes["coef"][0, 0])
    found = [
        i
        for i, (partner, first) in enumerate(spellings)
        if rotary % 2 == 0
        and rotary > 0
        and bool(turned[:rotary].all())
        and np.array_equal(lanes["own"], order)
        and np.array_equal(lanes["other"][:, :rotary], order[:, partner])
        and bool((lanes["coef"][:, :rotary] == scale).all())
        and bool((lanes["sine"][:, :rotary] == scale * np.where(first, -1.0, 1.0)).all())
        and bool((lanes["freq"][:, :rotary] == lanes["freq"][:, partner]).all())
        and bool((lanes["freq"][:, :rotary] == lanes["freq"][0, :rotary]).all())
    ]
    if not found:
        raise Unmatched("a rotation of columns that is no RoPE on halves, nor on neighbours")
    freq = lanes["freq"][0, :rotary][spellings[found[0]][1]]
    plain = Rows(rows.value, rows.axis, rows.dim, (plain_term(order.reshape(shape)),))
    x = settle(cx, plain, root)
    if found[0] == 1 and rotary > 2:
        return turn_pairs(cx, x, freq, scale, root)
    cx.note("RoPE" if rotary == head_dim else "RoPE of a part of each head")
    return turn(cx, x, freq, scale, root)


def turn(cx: Lift, x: Rows, freq: npt.NDArray[np.float64], scale: float, root: int) -> Rows:
    """RoPE on halves of the first `2 * len(freq)` dims of settled heads `[.., heads, .., D]`."""
    sizes = x.terms[0].cols.shape
    heads, head_dim = math.prod(sizes[:-1]), sizes[-1]
    table = cx.dag.frequencies(explained(freq))
    attrs: dict[str, Attr] = {"heads": heads, "head_dim": head_dim, "scale": scale}
    inputs = [x.value, "positions", table]
    made = cx.dag.emit("rope", inputs, attrs, width=heads * head_dim, root=root)
    return columns(made, sizes, x.axis, x.dim)


def turn_pairs(cx: Lift, x: Rows, freq: npt.NDArray[np.float64], scale: float, root: int) -> Rows:
    """RoPE on neighbouring lanes, as RoPE on halves of reordered heads.

    The rows of the projection are reordered: even lanes of every head first, then odd ones. Scores
    are sums over lanes, so that queries and keys may have any order if it is the same for both;
    nothing else may read the result (`Lift.paired`).
    """
    head_dim, rotary = x.terms[0].cols.shape[-1], 2 * len(freq)
    lanes = np.arange(head_dim)
    order = np.concatenate([lanes[:rotary:2], lanes[1:rotary:2], lanes[rotary:]])
    value = _reordered(cx, x.value, tuple(order.tolist()))
    cx.note("RoPE on interleaved pairs")
    result = turn(cx, Rows(value, x.axis, x.dim, x.terms), freq, scale, root)
    cx.paired[result.value] = (head_dim, rotary)
    return result


def _reordered(cx: Lift, name: str, order: tuple[int, ...]) -> str:
    """A projection, or a norm of its heads, with the lanes of every head in another order."""
    node = cx.dag.nodes[name]
    if node.op == "linear" and not node.inputs[3]:
        x, *parts, _ = node.inputs
        weight, bias = (
            cx.dag.weight(ReorderedData(cx.dag.weights[part], order)) if part else ""
            for part in parts
        )
        made = cx.dag.linear(x, weight, bias, root=max(node.roots))
    elif node.op == "rms_norm" and "heads" in node.attrs:
        inner = _reordered(cx, node.inputs[0], order)
        weight = cx.dag.weight(ReorderedData(cx.dag.weights[node.inputs[1]], order))
        inputs = [inner, weight, *node.inputs[2:]]
        made = cx.dag.emit("rms_norm", inputs, node.attrs, width=node.width, root=max(node.roots))
    else:
        raise Unmatched(f"RoPE on interleaved pairs of what {node.op} makes")
    cx.dag.nodes[made].roots |= node.roots
    return made


def _lanes(rows: Rows, heads: int, head_dim: int) -> dict[str, npt.NDArray[Any]]:
    """Per head and dim: the column times cos (or passed on), the one times sin, and how much."""
    size = (heads, head_dim)
    own, other = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    coef, sine, freq = (np.zeros(size) for _ in range(3))
    passed = np.zeros(size, bool)
    for term in rows.terms:
        cols, c, kind, f = (a.reshape(size) for a in (term.cols, term.coef, term.kind, term.freq))
        live = c != 0
        for wanted, into in ((1, own), (2, other)):
            here = live & (kind == wanted)
            if (into[here] >= 0).any():
                raise Unmatched("a sum of more rotations than RoPE has")
            into[here] = cols[here]
            (coef if wanted == 1 else sine)[here] = c[here]
            if (freq[here] != 0).any() and not np.array_equal(freq[here], f[here]):
                raise Unmatched("a rotation by two frequencies")
            freq[here] = f[here]
        here = live & (kind == 0)
        if (own[here] >= 0).any() or (c[here] != 1).any():
            raise Unmatched("a sum of columns that is no RoPE")
        own[here] = other[here] = cols[here]
        passed |= here
    if ((own < 0) | (other < 0)).any() or (passed & (coef != 0)).any():
        raise Unmatched("a rotation without cos or sin")
    return {"own": own, "other": other, "coef": coef, "sine": sine, "freq": freq}


def explained(freq: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Frequencies in fp32; those of plain RoPE, `theta^(-2i/R)`, are computed anew, so that a file
    in half precision loses nothing."""
    stored = freq.astype(np.float32)
    half = len(freq)
    positive = bool((freq > 0).all()) and half > 1
    if not positive:
        return stored
    index = np.arange(half) / half
    slope = -float(np.dot(index, np.log(freq)) / np.dot(index, index))
    theta = float(np.exp(slope))
    for digits in (1, 2, 3, 4):
        nice = float(f"{theta:.{digits - 1}e}")
        exact = nice**-index
        if float(np.abs(exact / freq - 1).max()) < 4e-7:
            return exact.astype(np.float32)
        with np.errstate(all="ignore"):
            if np.array_equal(exact.astype(np.float16), freq.astype(np.float16)) and np.array_equal(
                freq, freq.astype(np.float16)
            ):
                return exact.astype(np.float32)
    return stored
