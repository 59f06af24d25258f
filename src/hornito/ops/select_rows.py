"""Row selection: `x [T, H], selection [S] -> x[selection]`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Push, present

PUSH = Push("x:u64 selection:u64 result:u64 call:u64 live_word:u32 width:u32")


def infer(graph: Graph, node: Node) -> list[Value]:
    x, selection = node.inputs
    return [Value(FLOAT, (graph.shape(selection)[0], graph.shape(x)[1]))]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    x, selection = present(inputs, 2)
    return [x[np.asarray(selection, np.int64)]]


def lower(node: Node, low: Lowering) -> None:
    x, result = low.operand(node.inputs[0]), low.operand(node.outputs[0])
    rows, width = low.shape(node.outputs[0])
    low.emit(
        node,
        "select_rows/select.default",
        PUSH,
        (x, low.selection, result, low.call, low.live_word(node.outputs[0]), width),
        (rows, 1, 1),
        reads=(x, low.selection, low.call),
        writes=(result,),
    )
