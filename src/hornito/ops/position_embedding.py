"""Learned positions: `x [T, H], positions [T], table [P, H] -> x + table[positions]`.

A context beyond the table's P rows is refused when the plan is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.errors import FormatError, UsageError
from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Push, ceil_div, present
from hornito.quant.formats import weight_format

PUSH = Push("rows:u64 x:u64 table:u64 result:u64 width:u32")


def infer(graph: Graph, node: Node) -> list[Value]:
    x, _, table = (graph.shape(name) for name in node.inputs)
    if len(table) != 2 or table[1] != x[1]:
        raise FormatError(f"node {node.name}: positions of shape {table} do not fit x {x}")
    return [Value(FLOAT, x)]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    x, positions, table = present(inputs, 3)
    return [x + table[np.asarray(positions, np.int64)]]


def lower(node: Node, low: Lowering) -> None:
    x, table, result = node.inputs[0], node.inputs[2], node.outputs[0]
    positions, width = low.shape(table)
    if low.context > positions:
        raise UsageError(
            f"the model has learned positions for {positions} tokens; a context of {low.context} "
            f"has none for the rest. Load with a context of {positions} or less "
            f"(--context {positions}, or context={positions})"
        )
    stored = weight_format(low.weight_dtype(table))
    if stored.variant == "q":
        raise FormatError(
            f"node {node.name}: positions are stored as fp32 or fp16, not {stored.name}"
        )
    source, weights, out = low.operand(x), low.operand(table), low.operand(result)
    low.emit(
        node,
        f"position_embedding/add.{stored.variant}",
        PUSH,
        (low.row_records, source, weights, out, width),
        (ceil_div(width, 64), low.rows, 1),
        reads=(low.row_records, source, weights),
        writes=(out,),
    )
