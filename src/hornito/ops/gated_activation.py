"""Gated MLP activation: `activation(gate) * up`, both `[T, I]`.

Attributes: `activation`, `silu` or `gelu_tanh`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.errors import FormatError, UnsupportedError
from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Push, ceil_div, present

PUSH = Push("gate:u64 up:u64 result:u64 call:u64 width:u32")

ACTIVATIONS = ("silu", "gelu_tanh")
"""In the order of the kernels' numbers (kernels/include/activation.glsl)."""


def activation_number(node: Node) -> int:
    """The kernels' number of the node's activation.

    Raises:
        UnsupportedError: there is no kernel for it.
    """
    name = node.attr("activation")
    if name not in ACTIVATIONS:
        raise UnsupportedError(
            f"node {node.name}: no kernel for the activation {name!r}; there are: "
            + ", ".join(ACTIVATIONS)
        )
    return ACTIVATIONS.index(name)


def activate(name: str, x: Array) -> Array:
    """The activation in numpy."""
    if name == "silu":
        return x / (1.0 + np.exp(-x))
    inner: Array = np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)
    result: Array = 0.5 * x * (1.0 + np.tanh(inner))
    return result


def infer(graph: Graph, node: Node) -> list[Value]:
    activation_number(node)
    gate, up = (graph.shape(name) for name in node.inputs)
    if gate != up:
        raise FormatError(f"node {node.name}: gate has shape {gate}, up has {up}")
    return [Value(FLOAT, gate)]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    gate, up = present(inputs, 2)
    return [activate(node.attr("activation"), gate) * up]


def lower(node: Node, low: Lowering) -> None:
    gate, up = (low.operand(name) for name in node.inputs)
    result = low.operand(node.outputs[0])
    rows, width = low.shape(node.outputs[0])
    low.emit(
        node,
        "gated_activation/gated.default",
        PUSH,
        (gate, up, result, low.call, width),
        (ceil_div(width, 64), rows, 1),
        reads=(gate, up, low.call),
        writes=(result,),
        spec={0: activation_number(node)},
    )
