"""`rope_append(linear(x))` without norms of q and k becomes one `qkv_append`."""

from __future__ import annotations

from hornito.graph.graph import Graph, Node

NAME = "append_in_linear"


def run(graph: Graph) -> list[str]:
    made = []
    for append in list(graph):
        if append.op != "rope_append" or append.optional(3) or append.optional(4):
            continue
        linear = graph.producer(append.inputs[0])
        if linear is None or not _fits(linear, append) or not graph.is_private(append.inputs[0]):
            continue
        x, weight, bias = linear.inputs[:3]
        eps = {"eps": linear.attr("eps")} if linear.optional(4) else {}
        fused = Node(
            "qkv_append",
            linear.name,
            (x, weight, bias, linear.optional(4), *append.inputs[1:3]),
            append.outputs,
            {**append.attrs, **eps},
            linear.covers + append.covers,
        )
        graph.replace_nodes([linear, append], [fused])
        made.append(fused.name)
    return made


def _fits(linear: Node, append: Node) -> bool:
    """Whether it is a plain product, and heads are whole groups of four dims."""
    plain = linear.op == "linear" and not linear.inputs[3] and "activation" not in linear.attrs
    return plain and append.attr("head_dim") % 4 == 0
