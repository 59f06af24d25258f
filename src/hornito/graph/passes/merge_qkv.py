"""q, k and v projections with RoPE and the cache append become one linear and one `rope_append`."""

from __future__ import annotations

from hornito.graph.graph import Graph, Node
from hornito.graph.stacking import can_stack, stack_weights

NAME = "merge_qkv"


def run(graph: Graph) -> list[str]:
    made = []
    for attention in list(graph):
        if attention.op != "attention":
            continue
        found = _match(graph, attention)
        if found is not None:
            made.append(_rewrite(graph, attention, *found))
    return made


def _match(graph: Graph, attention: Node) -> tuple[list[Node], Node, Node, Node] | None:
    """(linears of q, k, v; RoPE of q; RoPE of k; append), or None."""
    q_rope = graph.producer(attention.inputs[0])
    append = graph.producer(attention.inputs[1])
    if q_rope is None or append is None or q_rope.op != "rope" or append.op != "kv_append":
        return None
    k_rope = graph.producer(append.inputs[0])
    if k_rope is None or k_rope.op != "rope":
        return None
    same = all(q_rope.attrs[key] == k_rope.attrs[key] for key in ("head_dim", "scale"))
    half = graph.shape(q_rope.inputs[2])[0]
    even = isinstance(half, int) and half % 2 == 0 and q_rope.attr("head_dim") % 2 == 0
    if not same or not even or q_rope.inputs[1:] != k_rope.inputs[1:]:
        return None
    private = (attention.inputs[0], append.inputs[0])
    if not all(graph.is_private(name) for name in private):
        return None
    linears = [graph.producer(n) for n in (q_rope.inputs[0], k_rope.inputs[0], append.inputs[1])]
    if not can_stack(graph, linears):
        return None
    return [node for node in linears if node is not None], q_rope, k_rope, append


def _rewrite(
    graph: Graph, attention: Node, linears: list[Node], q_rope: Node, k_rope: Node, append: Node
) -> str:
    weight, bias = stack_weights(graph, linears, f"{attention.name}.qkv")
    name = f"{attention.name}.qkv"
    linear = Node(
        "linear",
        name,
        (linears[0].inputs[0], weight, bias, ""),
        (name,),
        {},
        sum((node.covers for node in linears), ()),
    )
    turn = Node(
        "rope_append",
        append.name,
        (name, *q_rope.inputs[1:]),
        (q_rope.outputs[0], append.outputs[0]),
        {
            "layer": append.attr("layer"),
            "heads": q_rope.attr("heads"),
            "kv_heads": append.attr("kv_heads"),
            "head_dim": append.attr("head_dim"),
            "scale": q_rope.attr("scale"),
        },
        q_rope.covers + k_rope.covers + append.covers,
    )
    graph.replace_nodes([*linears, q_rope, k_rope, append], [linear, turn])
    return turn.name
