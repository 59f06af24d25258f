"""Embedding gather: `ids [T], table [V, H] -> [T, H]`, times `scale`.

A row whose record says so is the embedding that the host gave, unscaled.

Attributes: `scale` (optional, 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Push, present
from hornito.ops.linear import format_constants
from hornito.quant.formats import weight_format

PUSH = Push("rows:u64 table:u64 embedded:u64 result:u64 width:u32 scale:f32 vocabulary:u32")


def infer(graph: Graph, node: Node) -> list[Value]:
    ids, table = node.inputs
    return [Value(FLOAT, (*graph.shape(ids), graph.shape(table)[1]))]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    ids, table = present(inputs, 2)
    scale = np.float32(node.attr_or("scale", 1.0))
    rows: Array = table[np.asarray(ids, np.int64)] * table.dtype.type(scale)
    return [rows]


def lower(node: Node, low: Lowering) -> None:
    table, result = node.inputs[1], node.outputs[0]
    vocabulary, width = low.shape(table)
    stored = weight_format(low.weight_dtype(table))
    weights, out = low.operand(table), low.operand(result)
    given = low.embedded(width)
    low.emit(
        node,
        f"embedding/gather.{stored.variant}",
        PUSH,
        (low.row_records, weights, given, out, width, node.attr_or("scale", 1.0), vocabulary),
        (low.rows, 1, 1),
        reads=(low.row_records, weights, given),
        writes=(out,),
        spec=format_constants(stored),
    )
