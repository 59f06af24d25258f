"""Fused twin of `rope` on q, `rope` on k and `kv_append`, over one row `[q; k; v]`.

`qkv [T, (heads + 2 kv_heads) * D], positions [T], inv_freq [R/2] -> q [T, heads * D], cache token`.
Attributes: `layer`, `heads`, `kv_heads`, `head_dim`, `scale`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.errors import FormatError
from hornito.graph.graph import CACHE, FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Push, ceil_div, present
from hornito.ops.kv_append import append
from hornito.ops.rope import check_rotary, rotate

PUSH = Push(
    "rows:u64 table:u64 qkv:u64 inv_freq:u64 q:u64 table_stride:u32 layer:u32 heads:u32 "
    "kv_heads:u32 head_dim:u32 half_dim:u32 scale:f32"
)


def infer(graph: Graph, node: Node) -> list[Value]:
    qkv, _, inv_freq = node.inputs
    check_rotary(graph, node, inv_freq)
    rows, width = graph.shape(qkv)
    heads, kv_heads, head_dim = (node.attr(a) for a in ("heads", "kv_heads", "head_dim"))
    if width != (heads + 2 * kv_heads) * head_dim:
        raise FormatError(f"node {node.name}: qkv is {width} wide, which fits no head count")
    return [Value(FLOAT, (rows, heads * head_dim)), Value(CACHE, ())]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    qkv, positions, inv_freq = present(inputs, 3)
    heads, kv_heads, head_dim = (node.attr(a) for a in ("heads", "kv_heads", "head_dim"))
    split = qkv.reshape(len(qkv), -1, head_dim)
    turned = rotate(split[:, : heads + kv_heads], positions, inv_freq, node.attr("scale"))
    q, k = turned[:, :heads], turned[:, heads:]
    append(node, k, split[:, heads + kv_heads :], state)
    return [np.ascontiguousarray(q).reshape(len(q), -1), None]


def lower(node: Node, low: Lowering) -> None:
    qkv, inv_freq = low.operand(node.inputs[0]), low.operand(node.inputs[2])
    q = low.operand(node.outputs[0])
    kv = low.kv[node.attr("layer")]
    heads, head_dim = node.attr("heads"), node.attr("head_dim")
    half = low.shape(node.inputs[2])[0]
    pairs = half // 2 + (head_dim - 2 * half) // 2
    low.emit(
        node,
        "rope_append/rotate_append." + ("kv16" if kv.half else "kv32"),
        PUSH,
        (
            low.row_records,
            kv.table,
            qkv,
            inv_freq,
            q,
            low.table_stride,
            kv.layer,
            heads,
            kv.kv_heads,
            head_dim,
            half,
            node.attr("scale"),
        ),
        (ceil_div((heads + 2 * kv.kv_heads) * pairs, 64), low.rows, 1),
        reads=(low.row_records, kv.table, qkv, inv_freq),
        writes=(q, low.cache(node.attr("layer"))),
    )
