"""`add(a, linear(x))` becomes `linear(x)` with `a` as its residual."""

from __future__ import annotations

from hornito.graph.graph import Graph, Node

NAME = "residual_in_linear"


def run(graph: Graph) -> list[str]:
    made = []
    for add in list(graph):
        if add.op != "add":
            continue
        found = _linear_operand(graph, add)
        if found is None:
            continue
        linear, other = found
        fused = Node(
            "linear",
            add.name,
            (*linear.inputs[:3], other),
            add.outputs,
            linear.attrs,
            linear.covers + add.covers,
        )
        graph.replace_nodes([linear, add], [fused])
        made.append(fused.name)
    return made


def _linear_operand(graph: Graph, add: Node) -> tuple[Node, str] | None:
    """The later operand that is a private linear without a residual, and the other operand."""
    a, b = add.inputs
    for mine, other in ((b, a), (a, b)):
        node = graph.producer(mine)
        if (
            node is not None
            and node.op == "linear"
            and not node.inputs[3]
            and graph.is_private(mine)
            and mine != other
        ):
            return node, other
    return None
