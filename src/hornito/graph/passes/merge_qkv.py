"""q, k and v projections, with the norms of q's and k's heads, RoPE and the cache append, become
one linear and one `rope_append`. Norms and RoPE may be absent, but alike for q and k."""

from __future__ import annotations

from dataclasses import dataclass

from hornito.graph.graph import Attr, Graph, Node
from hornito.graph.stacking import can_stack, stack_weights

NAME = "merge_qkv"


@dataclass(frozen=True, slots=True)
class _Path:
    """What lies between a projection and attention: the value that comes out of the projection,
    and the norm and RoPE behind it."""

    start: str
    norm: Node | None
    rope: Node | None

    @property
    def nodes(self) -> list[Node]:
        return [node for node in (self.norm, self.rope) if node is not None]


def run(graph: Graph) -> list[str]:
    made = []
    for attention in list(graph):
        if attention.op != "attention":
            continue
        name = _merge(graph, attention)
        if name is not None:
            made.append(name)
    return made


def _merge(graph: Graph, attention: Node) -> str | None:
    append = graph.producer(attention.inputs[1])
    if append is None or append.op != "kv_append":
        return None
    q, k = _path(graph, attention.inputs[0]), _path(graph, append.inputs[0])
    if q is None or k is None or not _alike(graph, q, k, append):
        return None
    linears = [graph.producer(name) for name in (q.start, k.start, append.inputs[1])]
    if not can_stack(graph, linears):
        return None
    parts = [node for node in linears if node is not None]
    return _rewrite(graph, attention, parts, q, k, append)


def _path(graph: Graph, name: str) -> _Path | None:
    """The path that ends in `name`, or None when something else reads a value on it."""
    found: dict[str, Node] = {}
    for op in ("rope", "rms_norm"):
        node = graph.producer(name)
        if node is not None and node.op == op:
            if not graph.is_private(name):
                return None
            found[op] = node
            name = node.inputs[0]
    norm = found.get("rms_norm")
    if norm is not None and (norm.inputs[2] or norm.optional(3)):
        return None
    return _Path(name, norm, found.get("rope"))


def _alike(graph: Graph, q: _Path, k: _Path, append: Node) -> bool:
    """Whether one kernel can do what both paths do."""
    head_dim = append.attr("head_dim")
    if (q.norm is None) != (k.norm is None) or (q.rope is None) != (k.rope is None):
        return False
    if head_dim % 2:
        return False
    if q.norm is not None and k.norm is not None:
        sizes = {graph.shape(node.inputs[1]) for node in (q.norm, k.norm)}
        if q.norm.attr("eps") != k.norm.attr("eps") or sizes != {(head_dim,)}:
            return False
    if q.rope is not None and k.rope is not None:
        half = graph.shape(q.rope.inputs[2])[-1]
        keys = ("head_dim", "scale", "original_max")
        return (
            isinstance(half, int)
            and half % 2 == 0
            and q.rope.inputs[1:] == k.rope.inputs[1:]
            and all(q.rope.attrs.get(key) == k.rope.attrs.get(key) for key in keys)
        )
    return True


def _rewrite(
    graph: Graph, attention: Node, linears: list[Node], q: _Path, k: _Path, append: Node
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
    attrs: dict[str, Attr] = {
        "layer": append.attr("layer"),
        "heads": attention.attr("heads"),
        "kv_heads": append.attr("kv_heads"),
        "head_dim": append.attr("head_dim"),
    }
    positions, inv_freq = "", ""
    if q.rope is not None:
        positions, inv_freq = q.rope.inputs[1:]
        attrs |= {
            key: q.rope.attrs[key] for key in ("scale", "original_max") if key in q.rope.attrs
        }
    norms: tuple[str, ...] = ()
    if q.norm is not None and k.norm is not None:
        norms = (q.norm.inputs[1], k.norm.inputs[1])
        attrs["eps"] = q.norm.attr("eps")
    turn = Node(
        "rope_append",
        append.name,
        (name, positions, inv_freq, *norms),
        (attention.inputs[0], append.outputs[0]),
        attrs,
        sum((node.covers for node in (*q.nodes, *k.nodes, append)), ()),
    )
    graph.replace_nodes([*linears, *q.nodes, *k.nodes, append], [linear, turn])
    return turn.name
