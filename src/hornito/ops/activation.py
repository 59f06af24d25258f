"""Activation of every element: `x [T, I] -> activation(x)`.

Attributes: `activation`, `silu` or `gelu_tanh`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Push, ceil_div, present
from hornito.ops.gated_activation import activate, activation_number

PUSH = Push("x:u64 result:u64 call:u64 width:u32")


def infer(graph: Graph, node: Node) -> list[Value]:
    activation_number(node)
    return [Value(FLOAT, graph.shape(node.inputs[0]))]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    (x,) = present(inputs, 1)
    return [activate(node.attr("activation"), x)]


def lower(node: Node, low: Lowering) -> None:
    x, result = low.operand(node.inputs[0]), low.operand(node.outputs[0])
    rows, width = low.shape(node.outputs[0])
    low.emit(
        node,
        "activation/apply.default",
        PUSH,
        (x, result, low.call, width),
        (ceil_div(width, 64), rows, 1),
        reads=(x, low.call),
        writes=(result,),
        spec={0: activation_number(node)},
    )
