"""`add(a, rms_norm(x))` becomes `rms_norm(x)` with `a` as its residual."""

from __future__ import annotations

from hornito.graph.graph import Graph, Node

NAME = "residual_in_norm"


def run(graph: Graph) -> list[str]:
    made = []
    for add in list(graph):
        if add.op != "add":
            continue
        found = _norm_operand(graph, add)
        if found is None:
            continue
        norm, other = found
        fused = Node(
            "rms_norm",
            add.name,
            (*norm.inputs[:3], other),
            add.outputs,
            norm.attrs,
            norm.covers + add.covers,
        )
        graph.replace_nodes([norm, add], [fused])
        made.append(fused.name)
    return made


def _norm_operand(graph: Graph, add: Node) -> tuple[Node, str] | None:
    """The later operand that is a private norm without a residual, and the other operand."""
    a, b = add.inputs
    for mine, other in ((b, a), (a, b)):
        node = graph.producer(mine)
        if (
            node is not None
            and node.op == "rms_norm"
            and not node.optional(3)
            and graph.is_private(mine)
            and mine != other
        ):
            return node, other
    return None
