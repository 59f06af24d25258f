"""Ops of com.microsoft that hold a whole attention: GroupQueryAttention, MultiHeadAttention; and
its RotaryEmbedding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hornito.graph.graph import Attr
from hornito.importers.onnx import affine, layout
from hornito.importers.onnx.match.attention import check_pairs, nice_scale
from hornito.importers.onnx.match.columns import as_rows, explained, settle
from hornito.importers.onnx.match.linear import with_bias
from hornito.importers.onnx.match.masks import as_mask, meaning
from hornito.importers.onnx.match.norms import finish
from hornito.importers.onnx.match.shapes import need, row_axis
from hornito.importers.onnx.match.standard import (
    additive,
    const_tables,
    join_heads,
    rotate,
    scaled_attention,
    split_heads,
    tables,
)
from hornito.importers.onnx.registry import Inputs, handles
from hornito.importers.onnx.values import (
    Atom,
    Choice,
    Const,
    Grid,
    Keys,
    Mask,
    Norm,
    Past,
    Rows,
    Unmatched,
    Value,
    columns,
)

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift
    from hornito.importers.onnx.reader import OpNode


def at(x: Inputs, index: int) -> Value | None:
    """Input `index`, None when it is absent."""
    return x[index] if index < len(x) else None


@handles("com.microsoft:RotaryEmbedding")
def rotary_embedding(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """RoPE by position ids and tables of all positions."""
    facts = node.attrs
    value = as_rows(cx, need(x, 0), cx.root(0))
    positions = need(x, 1)
    if facts.get("is_packed_batching"):
        raise Unmatched("RoPE of packed batches")
    pairs = bool(facts.get("interleaved"))
    if facts.get("scale", 1.0) != 1.0:
        raise Unmatched("RoPE with scaled positions")
    if isinstance(positions, Grid):
        row_axis(cx, positions)
    elif not isinstance(positions, Const) or positions.array.size != 1:
        raise Unmatched("positions that are not understood")
    elif affine.as_dim(positions.array.reshape(-1)[0]) != cx.past:
        raise Unmatched("positions that do not start after the past")
    rotary = int(facts.get("rotary_embedding_dim", 0))
    freq, scale = tables(x[2], x[3], rotary)
    flat = len(value.shape) == 3
    if flat:
        width = value.terms[0].cols.shape[-1]
        count = int(facts.get("num_heads", 0)) or width // (2 * len(freq))
        heads = split_heads(value, count)
        if not isinstance(heads, Rows):
            raise TypeError("heads of no activations")
        return join_heads(rotate(cx, heads, freq, scale, 0, pairs=pairs))
    return rotate(cx, value, freq, scale, 0, pairs=pairs)


def _refused(node: OpNode, allowed: dict[str, tuple[object, ...]]) -> None:
    for name, value in node.attrs.items():
        if name in allowed and value not in allowed[name]:
            raise Unmatched(f"{node.op} with {name}={value!r}")


@handles("com.microsoft:GroupQueryAttention")
def group_query_attention(cx: Lift, node: OpNode, x: Inputs) -> list[Value | None]:
    """Append, RoPE, q and k norms, window, cap and attention in one op; q, k and v may be one."""
    facts = node.attrs
    _refused(
        node,
        {
            "smooth_softmax": (0, -1),
            "k_quant_type": ("NONE", "", 0),
            "v_quant_type": ("NONE", "", 0),
            "kv_cache_bit_width": (0,),
        },
    )
    heads, kv_heads = int(facts["num_heads"]), int(facts["kv_num_heads"])
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise Unmatched(f"{heads} heads over {kv_heads} KV heads")
    q, k, v = _projections(cx, x, heads, kv_heads)
    for index in (11, 12, 13):
        if at(x, index) is not None:
            raise Unmatched(f"GroupQueryAttention with input {index} (sinks or a quantised cache)")
    _lengths(cx, x)
    head_dim = q.terms[0].cols.size // heads
    q, k = _normed(cx, node, q, at(x, 14)), _normed(cx, node, k, at(x, 15))
    if facts.get("do_rotary"):
        pairs = bool(facts.get("rotary_interleaved"))
        q, k = (_rotated(cx, part, x, pairs=pairs) for part in (q, k))
    window = int(facts.get("local_window_size", -1))
    softcap = float(facts.get("softcap", 0.0))
    if window == 0 or window < -1 or not softcap >= 0:
        raise Unmatched(f"local_window_size {window} with softcap {softcap:g}")
    window = max(window, 0)
    bias = at(x, 10)
    if bias is not None:
        window = _window(cx, bias, window)
    past_k, past_v = at(x, 3), at(x, 4)
    if not isinstance(past_k, Past) or not isinstance(past_v, Past):
        raise Unmatched("a cache that is no past input")
    if (past_k.part, past_v.part) != ("key", "value") or past_k.layer != past_v.layer:
        raise Unmatched("cached keys and values of different layers")
    names = [settle(cx, part, cx.now, pairs=part is not v).value for part in (q, k, v)]
    check_pairs(cx, names[0], names[1])
    shape: dict[str, Attr] = {
        "layer": past_k.layer,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    cache = cx.dag.emit("kv_append", names[1:], shape, width=0, root=cx.now)
    attrs: dict[str, Attr] = {
        **shape,
        "heads": heads,
        "scale": nice_scale(float(facts.get("scale", 0.0)) or head_dim**-0.5, head_dim),
        "window": window,
        "softcap": softcap,
    }
    made = cx.dag.emit("attention", [names[0], cache], attrs, width=heads * head_dim, root=cx.now)
    cx.note("GroupQueryAttention")
    result = columns(made, (1, 1, heads * head_dim), 1, affine.N)
    cached = [
        _present(cx, past, name) for past, name in zip((past_k, past_v), names[1:], strict=True)
    ]
    return [result, *cached]


def _present(cx: Lift, past: Past, value: str) -> Keys:
    return Keys(past.layer, past.part, value, cx.now, past.axis, cx.total, past.cols)


def _projections(cx: Lift, x: Inputs, heads: int, kv_heads: int) -> list[Rows]:
    """q, k and v as `[1, heads, N, D]`."""
    first = as_rows(cx, need(x, 0), cx.root(0))
    if at(x, 1) is None:
        width = first.terms[0].cols.shape[-1]
        count = heads + 2 * kv_heads
        if width % count:
            raise ValueError(f"rows of {width} hold no {count} heads")
        head_dim = width // count
        ends = [heads * head_dim, (heads + kv_heads) * head_dim, width]
        parts: list[Value] = [
            layout.cut(first, -1, a, b) for a, b in zip([0, *ends[:2]], ends, strict=True)
        ]
    else:
        parts = [first, *(as_rows(cx, need(x, i), cx.root(i)) for i in (1, 2))]
    split = [split_heads(p, n) for p, n in zip(parts, (heads, kv_heads, kv_heads), strict=True)]
    return [p for p in split if isinstance(p, Rows)]


def _lengths(cx: Lift, x: Inputs) -> None:
    """The counts must be those of a cache without padding: total - 1, and total."""
    for index, wanted in ((5, affine.minus(cx.total, 1)), (6, cx.total)):
        value = at(x, index)
        if value is None and index == 5:
            continue
        found = affine.as_dim(value.array.reshape(-1)[0]) if isinstance(value, Const) else None
        if found != wanted:
            raise Unmatched(f"input {index} of GroupQueryAttention is {found}, not {wanted}")
    positions = at(x, 9)
    if positions is not None:
        if not isinstance(positions, Grid):
            raise Unmatched("positions that are not understood")
        row_axis(cx, positions)
    cx.note("positions from sequence lengths" if positions is None else "positions")


def _normed(cx: Lift, node: OpNode, rows: Rows, weight: Value | None) -> Rows:
    if weight is None:
        return rows
    if not isinstance(weight, Const):
        raise Unmatched("a norm of q or k whose weight is computed")
    eps = float(node.attrs.get("qk_norm_epsilon", 1e-6))
    return finish(cx, Norm("normed", rows, eps), weight, None, cx.now)


def _rotated(cx: Lift, rows: Rows, x: Inputs, *, pairs: bool) -> Rows:
    cos, sin = at(x, 7), at(x, 8)
    if isinstance(cos, Choice) and isinstance(sin, Choice):
        if pairs:
            raise Unmatched("RoPE on interleaved pairs with tables that are chosen by length")
        return _rotated_by_length(cx, rows, cos, sin)
    freq, scale = tables(cos, sin, 0)
    return rotate(cx, rows, freq, scale, 0, pairs=pairs)


def _rotated_by_length(cx: Lift, rows: Rows, cos: Choice, sin: Choice) -> Rows:
    """Two sets of frequencies, for short and for long contexts (longrope)."""
    short, scale = const_tables(cos.short, sin.short)
    long, other = const_tables(cos.long, sin.long)
    if short.shape != long.shape or not math.isclose(scale, other, rel_tol=1e-4):
        raise Unmatched("tables for short and long contexts that differ in more than frequencies")
    x = settle(cx, rows, cx.now)
    sizes = x.terms[0].cols.shape
    heads, head_dim = math.prod(sizes[:-1]), sizes[-1]
    table = cx.dag.frequencies(np.stack([explained(short), explained(long)]))
    attrs: dict[str, Attr] = {"heads": heads, "head_dim": head_dim, "scale": scale}
    attrs["original_max"] = cos.limit
    inputs = [x.value, "positions", table]
    made = cx.dag.emit("rope", inputs, attrs, width=heads * head_dim, root=cx.now)
    cx.note("RoPE with a set for long contexts")
    return columns(made, sizes, x.axis, x.dim)


def _window(cx: Lift, bias: Value, window: int) -> int:
    """The window of an additive mask beside the op's own causal one."""
    mask = as_mask(bias)
    if mask is None or len(mask.shape) < 2:
        raise Unmatched("a bias of scores that is not explained")
    steps = (0,) * (len(mask.shape) - 2) + (1, -1)
    shape = (*mask.shape[:-2], affine.N, cx.total)
    own = Mask(shape, (Atom("ge0", cx.past, steps),), np.array([False, True]))
    from hornito.importers.onnx.match.masks import combine

    found = meaning(combine(np.add, [additive(own), additive(mask)]), cx.past)
    return min(filter(None, (window, found.window)), default=0)


@handles("com.microsoft:MultiHeadAttention")
def multi_head_attention(cx: Lift, node: OpNode, x: Inputs) -> list[Value | None]:
    """Attention with as many KV heads as heads, a bias of scores, and the cache as inputs."""
    facts = node.attrs
    heads = int(facts["num_heads"])
    if at(x, 4) is not None:
        raise Unmatched("a key padding mask")
    if any(at(x, i) is not None for i in (8, 9)):
        raise Unmatched("a shared cache buffer")
    parts = [as_rows(cx, need(x, i), cx.root(i)) for i in range(3)]
    bias = at(x, 3)
    if isinstance(bias, Const):
        width = parts[0].terms[0].cols.shape[-1]
        cuts = [replace(bias, array=bias.array[i * width : (i + 1) * width]) for i in range(3)]
        biased = [with_bias(cx, p, b) for p, b in zip(parts, cuts, strict=True)]
        if any(b is None for b in biased):
            raise Unmatched("a bias of what is no projection")
        parts = [b for b in biased if b is not None]
    split = [split_heads(p, heads) if len(p.shape) == 3 else p for p in parts]
    q, k, v = (p for p in split if isinstance(p, Rows))
    past_k, past_v = at(x, 6), at(x, 7)
    if not isinstance(past_k, Past | None) or not isinstance(past_v, Past | None):
        raise Unmatched("a cache that is no past input")
    from hornito.importers.onnx.match.attention import append

    keys, values = append(cx, past_k, k, 1, 2), append(cx, past_v, v, 2, 2)
    mask = as_mask(at(x, 5))
    if at(x, 5) is not None and mask is None:
        raise Unmatched("a bias of scores that is not explained")
    scale = float(facts.get("scale", 0.0)) or None
    result = scaled_attention(
        cx,
        q,
        keys,
        values,
        scale=scale,
        softcap=0.0,
        masks=[mask] if mask is not None else [],
        is_causal=bool(facts.get("unidirectional", 0)),
    )
    cx.note("MultiHeadAttention")
    return [join_heads(result), keys, values]
