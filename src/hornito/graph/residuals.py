"""Sums folded into the op that makes one of their operands, as its residual (its fourth input)."""

from __future__ import annotations

from dataclasses import replace

from hornito.graph.graph import Graph, Node


def fold_sums(graph: Graph, op: str) -> list[str]:
    """`add(a, op(x))` becomes `op(x)` with `a` as its residual; the names of what was made."""
    made = []
    for add in list(graph):
        found = _operand(graph, add, op) if add.op == "add" else None
        if found is None:
            continue
        node, other = found
        fused = replace(
            node,
            name=add.name,
            inputs=(*node.inputs[:3], other),
            outputs=add.outputs,
            covers=node.covers + add.covers,
        )
        graph.replace_nodes([node, add], [fused])
        made.append(fused.name)
    return made


def _operand(graph: Graph, add: Node, op: str) -> tuple[Node, str] | None:
    """The later operand that is a private `op` without a residual, and the other operand."""
    a, b = add.inputs
    for mine, other in ((b, a), (a, b)):
        node = graph.producer(mine)
        if (
            node is not None
            and node.op == op
            and not node.optional(3)
            and graph.is_private(mine)
            and mine != other
        ):
            return node, other
    return None
