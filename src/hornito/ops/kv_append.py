"""Writes keys and values `[T, kv_heads * D]` into the layer's KV cache at the rows' positions.

The result is a cache token, which orders later reads. Attributes: `layer`, `kv_heads`, `head_dim`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hornito.errors import FormatError
from hornito.graph.graph import CACHE, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Push, ceil_div, present

PUSH = Push("rows:u64 table:u64 k:u64 v:u64 table_stride:u32 layer:u32 kv_heads:u32 head_dim:u32")


def infer(graph: Graph, node: Node) -> list[Value]:
    k, v = (graph.shape(name) for name in node.inputs)
    if k != v or k[1] != node.attr("kv_heads") * node.attr("head_dim"):
        raise FormatError(f"node {node.name}: keys {k}, values {v} do not fit the attributes")
    return [Value(CACHE, ())]


def append(node: Node, k: Array, v: Array, state: ReferenceState) -> None:
    """Keep `k` and `v` `[T, kv_heads * D]` in the state, by position."""
    cache = state.layer(node.attr("layer"))
    shape = (node.attr("kv_heads"), node.attr("head_dim"))
    for row, position in enumerate(state.positions):
        cache.keys[int(position)] = k[row].reshape(shape)
        cache.values[int(position)] = v[row].reshape(shape)


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    k, v = present(inputs, 2)
    append(node, k, v, state)
    return [None]


def lower(node: Node, low: Lowering) -> None:
    k, v = (low.operand(name) for name in node.inputs)
    kv = low.kv[node.attr("layer")]
    low.emit(
        node,
        "kv_append/append." + ("kv16" if kv.half else "kv32"),
        PUSH,
        (
            low.row_records,
            kv.table,
            k,
            v,
            low.table_stride,
            kv.layer,
            kv.kv_heads,
            kv.head_dim,
        ),
        (ceil_div(kv.kv_heads * kv.head_dim, 128), low.rows, 1),
        reads=(low.row_records, kv.table, k, v),
        writes=(low.cache(node.attr("layer")),),
    )
