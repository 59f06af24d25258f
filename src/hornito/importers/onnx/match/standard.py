"""Ops of opset 23 and 24 that say what they are: Attention, RotaryEmbedding, TensorScatter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hornito.importers.onnx import affine, layout
from hornito.importers.onnx.match.attention import append, multiply, weigh, with_mask
from hornito.importers.onnx.match.columns import as_rows, settle, turn, turn_pairs
from hornito.importers.onnx.match.masks import as_mask, combine
from hornito.importers.onnx.match.rope import from_tables, snapped
from hornito.importers.onnx.match.shapes import need, row_axis
from hornito.importers.onnx.registry import Inputs, handles
from hornito.importers.onnx.values import (
    Atom,
    Choice,
    Const,
    Floats,
    Grid,
    Keys,
    Lookup,
    Mask,
    Past,
    Rows,
    Scores,
    Trig,
    Unmatched,
    Value,
)

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift
    from hornito.importers.onnx.reader import OpNode


def split_heads(value: Value, heads: int) -> Value:
    """`[1, N, heads * D]` as `[1, heads, N, D]`."""
    size = value.shape[-1]  # type: ignore[union-attr]
    if not isinstance(size, int) or heads < 1 or size % heads:
        raise Unmatched(f"rows of {size} in {heads} heads")
    sizes = (*value.shape[:-1], heads, size // heads)  # type: ignore[union-attr]
    return layout.transpose(layout.reshape(value, sizes, allow_zero=True), [0, 2, 1, 3])


def join_heads(rows: Rows) -> Rows:
    """The inverse of `split_heads`."""
    turned = layout.transpose(rows, [0, 2, 1, 3])
    shape = turned.shape  # type: ignore[union-attr]
    size = affine.times(shape[-2], shape[-1])
    joined = layout.reshape(turned, (*shape[:-2], size), allow_zero=True)
    if not isinstance(joined, Rows):
        raise TypeError("heads of no activations")
    return joined


def repeated(keys: Keys, heads: int) -> Keys:
    """Keys `[1, kv_heads, .., D]` with every head repeated for its group of query heads."""
    kv_heads = keys.cols.shape[1]
    if heads % kv_heads:
        raise Unmatched(f"{heads} heads over {kv_heads} KV heads")
    return replace(keys, cols=np.repeat(keys.cols, heads // kv_heads, axis=1))


def causal(cx: Lift, scores: Scores) -> Mask:
    """The causal mask of scores `[.., N, P + N]`, as truth."""
    steps = (0,) * (len(scores.shape) - 2) + (1, -1)
    atom = Atom("ge0", affine.as_dim(cx.past), steps)
    return Mask(scores.shape, (atom,), np.array([False, True]))


def additive(mask: Mask) -> Mask:
    """A mask of truths as one that is added to scores."""
    if mask.table.dtype != bool:
        return mask
    zero, low = Mask((), (), np.array(0.0)), Mask((), (), np.array(-np.inf))
    return combine(np.where, [mask, zero, low])


def scaled_attention(
    cx: Lift,
    q: Rows,
    keys: Keys,
    values: Keys,
    *,
    scale: float | None,
    softcap: float,
    masks: list[Mask],
    is_causal: bool,
) -> Rows:
    """Attention of queries `[1, H, N, D]` over keys and values `[1, kv_heads, P + N, D]`."""
    heads = q.terms[0].cols.shape[1]
    turned = layout.transpose(repeated(keys, heads), [0, 1, 3, 2])
    if not isinstance(turned, Keys):
        raise TypeError("keys of no cache")
    scores = multiply(cx, q, turned, cx.root(0))
    factor = scores.head_dim**-0.5 if scale is None else scale
    scores = replace(scores, factor=scores.factor * factor, cap=softcap)
    if is_causal:
        scores = with_mask(scores, additive(causal(cx, scores)))
    for mask in masks:
        scores = with_mask(scores, additive(mask))
    return weigh(cx, replace(scores, soft=True), repeated(values, heads))


@handles("TensorScatter")
def tensor_scatter(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """New keys or values written behind the cached ones."""
    past, new = need(x, 0), need(x, 1)
    where = x[2] if len(x) > 2 else None
    if not isinstance(past, Past) or node.attrs.get("mode", "linear") != "linear":
        raise Unmatched("a scatter that is no append to a cache")
    if not isinstance(where, Const) or affine.as_dim(where.array.reshape(-1)[0]) != cx.past:
        raise Unmatched("new keys are not written behind the cached ones")
    rank = len(past.shape)
    return append(cx, past, new, 1, node.attrs.get("axis", -2) % rank)


@handles("Attention")
def attention(cx: Lift, node: OpNode, x: Inputs) -> list[Value | None]:
    """Attention of opset 23 (past as inputs) and 24 (a cache of fixed size, or none)."""
    facts = node.attrs
    q, k, v = (need(x, i) for i in range(3))
    mask, past_k, past_v, length = (x[i] if len(x) > i else None for i in range(3, 7))
    flat = len(q.shape) == 3  # type: ignore[union-attr]
    q = as_rows(cx, q, cx.root(0))
    if flat:
        kv_heads = int(facts["kv_num_heads"])
        q = split_heads(q, int(facts["q_num_heads"]))
        k, v = split_heads(k, kv_heads), split_heads(v, kv_heads)
    rows_given = isinstance(k, Rows)
    keys = _keys(cx, past_k, k, 1)
    values = _keys(cx, past_v, v, 2)
    if not isinstance(q, Rows):
        raise TypeError("queries of no activations")
    is_causal = bool(facts.get("is_causal", 0))
    if is_causal and not rows_given and length is None and cx.past != 0:
        raise Unmatched("is_causal over a past that the op does not know of")
    if length is not None:
        ok = isinstance(length, Const) and affine.as_dim(length.array.reshape(-1)[0]) == cx.total
        if not ok:
            raise Unmatched("a count of valid keys that is not the total length")
    explained_mask = as_mask(mask)
    if mask is not None and explained_mask is None:
        raise Unmatched("a mask that is not explained")
    result = scaled_attention(
        cx,
        q,
        keys,
        values,
        scale=facts.get("scale"),
        softcap=float(facts.get("softcap", 0.0)),
        masks=[explained_mask] if explained_mask is not None else [],
        is_causal=is_causal,
    )
    return [join_heads(result) if flat else result, keys, values]


def _keys(cx: Lift, past: Value | None, new: Value, index: int) -> Keys:
    if isinstance(new, Keys):
        return new
    if past is not None and not isinstance(past, Past):
        raise Unmatched("cached keys that are no past input")
    if past is None and cx.past != 0:
        raise Unmatched("attention over new keys alone, without the cached ones")
    made = append(cx, past, new, index, 2)
    return made


# -- RoPE -----------------------------------------------------------------------------------


def rotate(
    cx: Lift, rows: Rows, freq: Floats, scale: float, index: int, *, pairs: bool = False
) -> Rows:
    """RoPE of the first `2 * len(freq)` dims of heads `[1, heads, N, D]`, on their halves, or on
    pairs of neighbours."""
    x = settle(cx, rows, cx.root(index))
    head_dim = x.terms[0].cols.shape[-1]
    if 2 * len(freq) > head_dim:
        raise Unmatched(f"RoPE of {2 * len(freq)} dims in heads of {head_dim}")
    cx.note("RoPE op")
    return (turn_pairs if pairs else turn)(cx, x, freq, scale, cx.now)


def tables(cos: Value | None, sin: Value | None, rotary_dim: int) -> tuple[Floats, float]:
    """Frequencies and scale of a RoPE op's cos and sin."""
    if isinstance(cos, Trig) and isinstance(sin, Trig):
        freq = cos.freq.reshape(-1)
        coef = cos.coef.reshape(-1)
        same = np.array_equal(freq, sin.freq.reshape(-1)) and (coef == coef[0]).all()
        if (cos.kind, sin.kind) != (1, 2) or not same or (sin.coef != coef[0]).any():
            raise Unmatched("cos and sin of different angles")
        scale = float(coef[0])
    elif isinstance(cos, Lookup) and isinstance(sin, Lookup):
        freq, scale = const_tables(cos.table, sin.table)
    elif isinstance(cos, Const) and isinstance(sin, Const):
        freq, scale = const_tables(cos, sin)
    elif isinstance(cos, Choice) and isinstance(sin, Choice):
        raise Unmatched("RoPE tables that are chosen by length, in this op")
    else:
        raise Unmatched("cos and sin that are no tables")
    half = rotary_dim // 2 if rotary_dim else len(freq)
    if len(freq) < half:
        raise ValueError(f"{len(freq)} frequencies for {rotary_dim} dims")
    return freq[:half], scale


def const_tables(cos: Const, sin: Const) -> tuple[Floats, float]:
    """Frequencies and scale of tables made at export, plain RoPE's exactly."""
    freq, scale = from_tables(cos, sin)
    half = cos.bf16 or cos.array.dtype == np.float16
    length = len(cos.array)
    return snapped(freq, (2e-3 if half else 2e-6) / length * 4), scale


@handles("RotaryEmbedding")
def rotary_embedding(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """RoPE as one op: tables of the call's rows, or tables by position with position ids."""
    facts = node.attrs
    value = as_rows(cx, need(x, 0), cx.root(0))
    positions = x[3] if len(x) > 3 else None
    if positions is not None:
        if not isinstance(positions, Grid):
            raise Unmatched("positions that are not understood")
        row_axis(cx, positions)
    elif isinstance(x[1], Const):
        raise Unmatched("tables of cos and sin without positions")
    flat = len(value.shape) == 3
    heads = split_heads(value, int(facts["num_heads"])) if flat else value
    if not isinstance(heads, Rows):
        raise TypeError("heads of no activations")
    freq, scale = tables(x[1], x[2], int(facts.get("rotary_embedding_dim", 0)))
    result = rotate(cx, heads, freq, scale, 0, pairs=bool(facts.get("interleaved")))
    return join_heads(result) if flat else result
