"""`gated_activation(linear(x, gate), linear(x, up))` becomes one `gated_linear`."""

from __future__ import annotations

from hornito.graph.graph import Graph, Node
from hornito.graph.stacking import can_stack, interleave_weights

NAME = "merge_gate_up"


def run(graph: Graph) -> list[str]:
    made = []
    for gated in list(graph):
        if gated.op != "gated_activation":
            continue
        linears = [graph.producer(name) for name in gated.inputs]
        if not can_stack(graph, linears) or len(set(gated.inputs)) == 1:
            continue
        parts = [node for node in linears if node is not None]
        weight, bias = interleave_weights(graph, parts, f"{gated.name}.gate_up")
        fused = Node(
            "gated_linear",
            gated.name,
            (parts[0].inputs[0], weight, bias),
            gated.outputs,
            gated.attrs,
            sum((node.covers for node in parts), ()) + gated.covers,
        )
        graph.replace_nodes([*parts, gated], [fused])
        made.append(fused.name)
    return made
