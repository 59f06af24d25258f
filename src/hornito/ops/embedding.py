"""Embedding gather: `ids [T], table [V, H] -> [T, H]`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Push, present

PUSH = Push("rows:u64 table:u64 result:u64 width:u32")


def infer(graph: Graph, node: Node) -> list[Value]:
    ids, table = node.inputs
    return [Value(FLOAT, (*graph.shape(ids), graph.shape(table)[1]))]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    ids, table = present(inputs, 2)
    return [table[np.asarray(ids, np.int64)]]


def lower(node: Node, low: Lowering) -> None:
    table, result = node.inputs[1], node.outputs[0]
    width = low.shape(table)[1]
    suffix = "f16" if low.weight_dtype(table) == "fp16" else "f32"
    weights, out = low.operand(table), low.operand(result)
    low.emit(
        node,
        f"embedding/gather.{suffix}",
        PUSH,
        (low.row_records, weights, out, width),
        (low.rows, 1, 1),
        reads=(low.row_records, weights),
        writes=(out,),
    )
