"""Gated linear: `x [T, K], weight [2 I, K], bias [2 I]?, norm [K]?`
`-> activation(x @ gate.T) * (x @ up.T)`.

Rows of the weight (and bias) are gate and up in turn: gate 0, up 0, gate 1, up 1, and so on. With a
norm, x is first replaced by `rms_norm(x, norm)`. Attributes: `activation`, `eps` (with a norm).
Fused twin of two `linear` and `gated_activation`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hornito.errors import FormatError
from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, present
from hornito.ops.gated_activation import activate, activation_number
from hornito.ops.linear import LinearArgs, check_matrix, check_norm, emit_linear
from hornito.ops.rms_norm import norm


def infer(graph: Graph, node: Node) -> list[Value]:
    x, weight, bias = node.inputs[:3]
    activation_number(node)
    rows, width = graph.shape(x)
    check_norm(graph, node, node.optional(3), width)
    n, _ = check_matrix(graph, node, weight, width)
    if n % 2 or (bias and graph.shape(bias) != (n,)):
        raise FormatError(f"node {node.name}: {n} weight rows, bias {bias or 'none'}")
    return [Value(FLOAT, (rows, n // 2))]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    x, weight = present(inputs, 2)
    scale = inputs[3] if len(inputs) > 3 else None
    if scale is not None:
        x = norm(x, scale, node.attr("eps"))
    both = x @ weight.T
    if inputs[2] is not None:
        both = both + inputs[2]
    return [activate(node.attr("activation"), both[:, 0::2]) * both[:, 1::2]]


def lower(node: Node, low: Lowering) -> None:
    x, weight, bias = node.inputs[:3]
    first = node.optional(3)
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
            norm=low.operand(first) if first else None,
            eps=node.attr("eps") if first else 0.0,
        ),
    )
