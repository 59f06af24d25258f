"""Fused twin of what lies between the projections and attention, over one row `[q; k; v]`: RMS norm
of each head of q and k, RoPE on both, `kv_append`. Norm and RoPE are optional.

`qkv [T, (heads + 2 kv_heads) * D], positions [T]?, inv_freq [R/2] or [2, R/2]?, q_norm [D]?,
k_norm [D]? -> q [T, heads * D], cache token`.
Attributes: `layer`, `heads`, `kv_heads`, `head_dim`; with RoPE `scale` (and `original_max`, see
`rope`), with norms `eps`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.errors import FormatError, UnsupportedError
from hornito.graph.graph import CACHE, FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.graph.shapes import Shape
from hornito.ops.base import Array, Lowering, Operand, Push, ceil_div, present
from hornito.ops.kv_append import append
from hornito.ops.rms_norm import norm
from hornito.ops.rope import check_rotary, lower_set, pick_set, rotate

PUSH = Push(
    "rows:u64 table:u64 qkv:u64 inv_freq:u64 q:u64 table_stride:u32 layer:u32 heads:u32 "
    "kv_heads:u32 head_dim:u32 half_dim:u32 scale:f32"
)
NORM_PUSH = Push(
    "rows:u64 table:u64 qkv:u64 inv_freq:u64 q_norm:u64 k_norm:u64 q:u64 table_stride:u32 "
    "layer:u32 heads:u32 kv_heads:u32 head_dim:u32 half_dim:u32 scale:f32 eps:f32"
)

MAX_NORMED_DIM = 256
"""Floats of a head that the kernel with norms keeps in shared memory."""


def infer(graph: Graph, node: Node) -> list[Value]:
    found = infer_rows(graph, node, graph.shape(node.inputs[0]), node.inputs[1], node.inputs[2])
    head_dim = node.attr("head_dim")
    norms = [name for name in (node.optional(3), node.optional(4)) if name]
    if norms:
        if len(norms) != 2 or any(graph.shape(name) != (head_dim,) for name in norms):
            raise FormatError(f"node {node.name}: norms of q and k must both hold {head_dim}")
        if head_dim > MAX_NORMED_DIM:
            raise UnsupportedError(
                f"node {node.name}: head_dim {head_dim}; normed heads take up to {MAX_NORMED_DIM}"
            )
        node.attr("eps")
    return found


def infer_rows(
    graph: Graph, node: Node, shape: Shape, positions: str, inv_freq: str
) -> list[Value]:
    """The results for rows `[q; k; v]` of `shape`.

    Raises:
        FormatError: heads, width or RoPE's inputs do not fit.
    """
    if bool(inv_freq) != bool(positions):
        raise FormatError(f"node {node.name}: RoPE takes positions and frequencies")
    if inv_freq:
        check_rotary(graph, node, inv_freq)
    rows, width = shape
    heads, kv_heads, head_dim = (node.attr(a) for a in ("heads", "kv_heads", "head_dim"))
    if width != (heads + 2 * kv_heads) * head_dim:
        raise FormatError(f"node {node.name}: qkv is {width} wide, which fits no head count")
    return [Value(FLOAT, (rows, heads * head_dim)), Value(CACHE, ())]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    (qkv,) = present(inputs, 1)
    positions, inv_freq, q_norm, k_norm = (*inputs[1:], None, None)[:4]
    heads, kv_heads, head_dim = (node.attr(a) for a in ("heads", "kv_heads", "head_dim"))
    split = qkv.reshape(len(qkv), -1, head_dim)
    q, k = split[:, :heads], split[:, heads : heads + kv_heads]
    if q_norm is not None and k_norm is not None:
        q, k = norm(q, q_norm, node.attr("eps")), norm(k, k_norm, node.attr("eps"))
    if inv_freq is not None and positions is not None:
        chosen = pick_set(node, inv_freq, state.context)
        q, k = (rotate(x, positions, chosen, node.attr("scale")) for x in (q, k))
    append(node, k, split[:, heads + kv_heads :], state)
    return [np.ascontiguousarray(q).reshape(len(q), -1), None]


def lower(node: Node, low: Lowering) -> None:
    norms = [low.operand(name) for name in (node.optional(3), node.optional(4)) if name]
    emit_rows(node, low, low.operand(node.inputs[0]), node.inputs[2], norms)


def emit_rows(
    node: Node, low: Lowering, qkv: Operand, inv_freq: str, norms: Sequence[Operand]
) -> None:
    """Launch the kernel for rows `[q; k; v]`; `inv_freq` is `""` where there is no RoPE."""
    q = low.operand(node.outputs[0])
    rotary: list[Operand] = []
    half = 0
    if inv_freq:
        found, half = lower_set(node, inv_freq, low)
        rotary = [found]
    kv = low.kv[node.attr("layer")]
    heads, head_dim = node.attr("heads"), node.attr("head_dim")
    all_heads = heads + 2 * kv.kv_heads
    pairs = half // 2 + (head_dim - 2 * half) // 2
    numbers: list[int | float] = [
        low.table_stride,
        kv.layer,
        heads,
        kv.kv_heads,
        head_dim,
        half,
        float(node.attr_or("scale", 1.0)),
    ]
    low.emit(
        node,
        f"rope_append/{'norm_rotate' if norms else 'rotate'}_append."
        + ("kv16" if kv.half else "kv32"),
        NORM_PUSH if norms else PUSH,
        (
            low.row_records,
            kv.table,
            qkv,
            *(rotary or [qkv]),
            *norms,
            q,
            *numbers,
            *([node.attr("eps")] if norms else []),
        ),
        (all_heads if norms else ceil_div(all_heads * pairs, 64), low.rows, 1),
        reads=(low.row_records, kv.table, qkv, *rotary, *norms),
        writes=(q, low.cache(node.attr("layer"))),
    )
