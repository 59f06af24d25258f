"""Gated linear: `x [T, K], weight [2 I, K], bias [2 I]? -> activation(x @ gate.T) * (x @ up.T)`.

Rows of the weight (and bias) are gate and up in turn: gate 0, up 0, gate 1, up 1, and so on.
Attributes: `activation`. Fused twin of two `linear` and `gated_activation`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hornito.errors import FormatError
from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, present
from hornito.ops.gated_activation import activate, activation_number
from hornito.ops.linear import LinearArgs, check_matrix, emit_linear


def infer(graph: Graph, node: Node) -> list[Value]:
    x, weight, bias = node.inputs
    activation_number(node)
    rows, width = graph.shape(x)
    n, _ = check_matrix(graph, node, weight, width)
    if n % 2 or (bias and graph.shape(bias) != (n,)):
        raise FormatError(f"node {node.name}: {n} weight rows, bias {bias or 'none'}")
    return [Value(FLOAT, (rows, n // 2))]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    x, weight = present(inputs, 2)
    both = x @ weight.T
    if inputs[2] is not None:
        both = both + inputs[2]
    return [activate(node.attr("activation"), both[:, 0::2]) * both[:, 1::2]]


def lower(node: Node, low: Lowering) -> None:
    x, weight, bias = node.inputs
    rows, n = low.shape(node.outputs[0])
    emit_linear(
        node,
        low,
        LinearArgs(
            x=low.operand(x),
            weight=low.operand(weight),
            result=low.operand(node.outputs[0]),
            rows=rows,
            n=n,
            k=low.shape(x)[1],
            dtype=low.weight_dtype(weight),
            weight_rows=2 * n,
            live_word=low.live_word(node.outputs[0]),
            bias=low.operand(bias) if bias else None,
            gated=True,
            activation=activation_number(node),
        ),
    )
