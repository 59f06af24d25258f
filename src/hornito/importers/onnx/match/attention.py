"""The KV cache and attention: concat to append, repeated heads, scores, masks, softmax."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hornito.graph.graph import Attr
from hornito.importers.families import decimal
from hornito.importers.onnx import affine
from hornito.importers.onnx.match.columns import as_rows, settle
from hornito.importers.onnx.match.masks import HIDDEN, as_mask, combine, meaning
from hornito.importers.onnx.match.numbers import number
from hornito.importers.onnx.match.shapes import need
from hornito.importers.onnx.registry import Inputs, binary, handles, unary
from hornito.importers.onnx.values import (
    Keys,
    Mask,
    NanFlag,
    Past,
    Rows,
    Scores,
    Unmatched,
    Value,
    columns,
)

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift
    from hornito.importers.onnx.reader import OpNode

Ints = npt.NDArray[np.int64]


def append(cx: Lift, past: Past | None, new: Value, index: int, axis: int) -> Keys:
    """New keys or values joined to the cached ones."""
    rows = settle(cx, as_rows(cx, new, cx.root(index)), cx.root(index), pairs=True)
    if affine.axis_of(axis, len(rows.shape)) != rows.axis:
        raise Unmatched("new keys are joined to cached ones along another axis than positions")
    cols = rows.terms[0].cols
    if past is None:
        # A model without a past: which of keys and values these are shows at their use.
        return Keys(-1, "", rows.value, cx.now, rows.axis, cx.total, cols)
    if past.axis != rows.axis or not np.array_equal(past.cols, cols):
        raise Unmatched(
            f"cached keys {affine.shape_text(past.shape)} and new ones "
            f"{affine.shape_text(rows.shape)} are laid out differently"
        )
    cx.note("KV append")
    return Keys(past.layer, past.part, rows.value, cx.now, rows.axis, cx.total, cols)


@binary("Mul", "Div")
def scaled(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """The scale on keys, or on scores."""
    for value, other in ((a, b), (b, a)):
        by = number(other)
        if by is None or (op == "Div" and value is b) or not isinstance(value, Keys | Scores):
            continue
        by = 1.0 / by if op == "Div" else by
        if isinstance(value, Keys):
            return replace(value, factor=value.factor * by)
        if value.soft or value.mask is not None:
            raise Unmatched("scores are scaled after their mask")
        if value.tanh:
            # cap * tanh(factor * scores): what was divided by the cap before is the scale.
            return replace(value, tanh=False, cap=decimal(by), factor=value.factor * by)
        if value.cap:
            raise Unmatched("scores are scaled after their cap")
        return replace(value, factor=value.factor * by)
    return None


@unary("Tanh")
def capped(cx: Lift, op: str, value: Value) -> Value | None:
    """The tanh of a cap on scores: `cap * tanh(scores / cap)`."""
    if not isinstance(value, Scores) or value.mask is not None or value.soft or value.cap:
        return None
    cx.note("cap on scores")
    return replace(value, tanh=True)


def multiply(cx: Lift, q: Rows, keys: Keys, q_root: int) -> Scores:
    """Queries `[.., heads, N, D]` times keys `[.., heads, D, P + N]`."""
    if keys.dim != cx.total or keys.axis != len(keys.shape) - 1:
        raise Unmatched("keys that are not transposed")
    factor = q.factor * keys.factor
    rows = settle(cx, replace(q, factor=1.0), q_root, pairs=True)
    check_pairs(cx, rows.value, keys.value)
    if rows.axis != len(rows.shape) - 2:
        raise Unmatched("queries whose rows are not the axis before the last")
    own = np.moveaxis(rows.terms[0].cols, rows.axis, 0)[0]  # [.., D]
    theirs = np.moveaxis(keys.cols, keys.axis, 0)[0]
    shape = affine.broadcast(own.shape, theirs.shape)
    if shape != own.shape:
        raise Unmatched("more heads of keys than of queries")
    head_dim = own.shape[-1]
    heads = own.size // head_dim
    kv_heads = _kv_heads(np.broadcast_to(theirs, own.shape).reshape(heads, head_dim))
    if not np.array_equal(own.reshape(-1), np.arange(own.size)):
        raise Unmatched("queries whose heads are in another order")
    sizes = (*rows.shape[:-1], cx.total)
    return Scores(sizes, rows.value, keys, heads, kv_heads, head_dim, factor)


def check_pairs(cx: Lift, q: str, k: str) -> None:
    """Queries and keys must have the lanes of their heads in one order (`turn_pairs`)."""
    if cx.paired.get(q) != cx.paired.get(k):
        raise Unmatched("RoPE on interleaved pairs of only one of queries and keys")


def _kv_heads(cols: Ints) -> int:
    """The number of KV heads of repeated columns `[heads, D]`; head h must use h // group."""
    heads, head_dim = int(cols.shape[0]), int(cols.shape[1])
    count = int(cols.max()) + 1
    if count % head_dim:
        raise Unmatched("keys of heads of another size than the queries")
    kv_heads = count // head_dim
    if kv_heads == 0 or heads % kv_heads:
        raise Unmatched(f"{heads} heads over {kv_heads} KV heads")
    group = np.arange(heads) // (heads // kv_heads)
    if not np.array_equal(cols, group[:, None] * head_dim + np.arange(head_dim)):
        raise Unmatched("KV heads are repeated in another order than head // group")
    return kv_heads


@binary("Add")
def biased(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """A mask added to scores."""
    for scores, other in ((a, b), (b, a)):
        mask = as_mask(other)
        if isinstance(scores, Scores) and not scores.soft and mask is not None:
            return with_mask(scores, mask)
    return None


def with_mask(scores: Scores, mask: Mask) -> Scores:
    """Scores with one more additive mask."""
    if scores.tanh:
        raise Unmatched("a tanh of scores that no cap multiplies")
    if affine.broadcast(mask.shape, scores.shape) != scores.shape:
        raise Unmatched("a mask of another shape than the scores")
    whole = mask if scores.mask is None else combine(np.add, [scores.mask, mask])
    return replace(scores, mask=whole)


def mask_scores(cx: Lift, scores: Scores, mask: Mask, fill: float, *, keep: bool) -> Scores:
    """Scores replaced by a fill where the mask says so."""
    if fill > HIDDEN or scores.soft:
        raise Unmatched(f"scores are replaced by {fill}")
    zero, low = Mask((), (), np.array(0.0)), Mask((), (), np.array(-np.inf))
    pick = [mask, zero, low] if keep else [mask, low, zero]
    return with_mask(scores, combine(np.where, pick))


@handles("Softmax")
def softmax(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """The softmax over keys; nothing else has one here."""
    value = need(x, 0)
    if not isinstance(value, Scores) or value.soft:
        raise Unmatched(f"a softmax of {type(value).__name__}")
    rank = len(value.shape)
    if affine.axis_of(node.attrs.get("axis", -1), rank) != rank - 1:
        raise Unmatched("a softmax that is not over keys")
    return replace(value, soft=True)


@unary("IsNaN")
def is_nan(cx: Lift, op: str, value: Value) -> Value | None:
    """The guard for rows that see nothing; a causal row sees itself."""
    if isinstance(value, Scores) and value.soft:
        return NanFlag(value)
    return None


def weigh(cx: Lift, scores: Scores, values: Keys) -> Rows:
    """Attention weights times values: the raised attention."""
    if not scores.soft:
        raise Unmatched("scores are multiplied by values without a softmax")
    found = meaning(scores.mask, cx.past)
    if values.axis != len(values.shape) - 2:
        raise Unmatched("values whose positions are not the axis before the last")
    theirs = np.moveaxis(values.cols, values.axis, 0)[0]
    shape = (*_leading(scores), theirs.shape[-1])
    kv_heads = _kv_heads(np.broadcast_to(theirs, shape).reshape(scores.heads, -1))
    if kv_heads != scores.kv_heads or theirs.shape[-1] != scores.head_dim:
        raise Unmatched("keys and values of different heads")
    if values.factor != 1.0:
        raise Unmatched("values are scaled")
    if values.value in cx.paired:
        raise Unmatched("RoPE on interleaved pairs of values")
    made = attend(
        cx,
        scores.q,
        scores.keys,
        values,
        heads=scores.heads,
        kv_heads=scores.kv_heads,
        head_dim=scores.head_dim,
        scale=scores.factor,
        softcap=scores.cap,
        window=found.window,
    )
    lead = _leading(scores)
    return columns(made, (*lead, 1, scores.head_dim), len(lead), affine.N)


def _leading(scores: Scores) -> tuple[int, ...]:
    return tuple(d for d in scores.shape[:-2] if isinstance(d, int))


def attend(
    cx: Lift,
    q: str,
    keys: Keys,
    values: Keys,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    softcap: float,
    window: int,
) -> str:
    """The raised append and attention of a layer."""
    layer = keys.layer
    if layer < 0:
        order: dict[tuple[str, str], int] = cx.facts.setdefault("layers", {})
        layer = order.setdefault((keys.value, values.value), len(order))
    elif (keys.part, values.part, values.layer) != ("key", "value", keys.layer):
        raise Unmatched(
            f"attention reads {keys.part} of layer {keys.layer} and {values.part} of layer "
            f"{values.layer}"
        )
    shape: dict[str, Attr] = {"layer": layer, "kv_heads": kv_heads, "head_dim": head_dim}
    inputs = [keys.value, values.value]
    cache = cx.dag.emit("kv_append", inputs, shape, width=0, root=keys.root)
    cx.dag.nodes[cache].roots.add(values.root)
    attrs: dict[str, Attr] = {
        **shape,
        "heads": heads,
        "scale": nice_scale(scale, head_dim),
        "window": window,
        "softcap": softcap,
    }
    cx.note("attention with a window" if window else "attention")
    if heads != kv_heads:
        cx.note("repeated KV heads")
    return cx.dag.emit("attention", [q, cache], attrs, width=heads * head_dim, root=cx.now)


def nice_scale(scale: float, head_dim: int) -> float:
    """`n^-0.5` for a whole n when the scale is that, within the noise of fp32; of fp16 only for the
    head's own size, where a rounding of it, or of its root as on both q and k, gives the scale."""
    near = float(head_dim**-0.5)
    half, root = float(np.float16(near)), float(np.float16(near**0.5))
    if any(math.isclose(scale, noisy, rel_tol=1e-6) for noisy in (half, root * root)):
        return near
    for n in (head_dim, round(scale**-2) if scale > 1e-4 else 0):
        if n > 0 and math.isclose(scale, n**-0.5, rel_tol=2e-6):
            return float(n**-0.5)
    return scale
