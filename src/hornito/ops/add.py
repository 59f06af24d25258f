"""Elementwise sum of two values of one shape."""

from __future__ import annotations

from collections.abc import Sequence

from hornito.errors import FormatError
from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Push, ceil_div, present

PUSH = Push("a:u64 b:u64 result:u64 call:u64 width:u32")


def infer(graph: Graph, node: Node) -> list[Value]:
    a, b = (graph.shape(name) for name in node.inputs)
    if a != b:
        raise FormatError(f"node {node.name}: add of shapes {a} and {b}")
    return [Value(FLOAT, a)]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    a, b = present(inputs, 2)
    return [a + b]


def lower(node: Node, low: Lowering) -> None:
    a, b = (low.operand(name) for name in node.inputs)
    result = low.operand(node.outputs[0])
    rows, width = low.shape(node.outputs[0])
    low.emit(
        node,
        "add/add.default",
        PUSH,
        (a, b, result, low.call, width),
        (ceil_div(width, 64), rows, 1),
        reads=(a, b, low.call),
        writes=(result,),
    )
