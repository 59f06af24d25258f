"""`activation(linear(x))` becomes a `linear` that applies the activation to its sums."""

from __future__ import annotations

from hornito.graph.graph import Graph, Node

NAME = "activation_in_linear"


def run(graph: Graph) -> list[str]:
    made = []
    for act in list(graph):
        if act.op != "activation":
            continue
        linear = graph.producer(act.inputs[0])
        if (
            linear is None
            or linear.op != "linear"
            or linear.inputs[3]
            or linear.attrs
            or not graph.is_private(act.inputs[0])
        ):
            continue
        fused = Node(
            "linear",
            act.name,
            linear.inputs,
            act.outputs,
            act.attrs,
            linear.covers + act.covers,
        )
        graph.replace_nodes([linear, act], [fused])
        made.append(fused.name)
    return made
