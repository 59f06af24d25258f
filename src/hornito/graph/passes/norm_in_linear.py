"""`linear(rms_norm(x))` becomes a `linear` of x with the norm's weight; so does `gated_linear`."""

from __future__ import annotations

from dataclasses import replace

from hornito.graph.graph import Graph, Node

NAME = "norm_in_linear"

_SLOT = {"linear": 4, "gated_linear": 3}
"""Which input of an op takes the norm's weight."""


def run(graph: Graph) -> list[str]:
    made = []
    for node in list(graph):
        if node.op not in _SLOT or node.optional(_SLOT[node.op]):
            continue
        norm = graph.producer(node.inputs[0])
        if norm is None or not _plain(norm) or not graph.is_private(node.inputs[0]):
            continue
        slot = _SLOT[node.op]
        padded = (*node.inputs, *[""] * slot)[:slot]
        fused = replace(
            node,
            inputs=(norm.inputs[0], *padded[1:], norm.inputs[1]),
            attrs={**node.attrs, "eps": norm.attr("eps")},
            covers=norm.covers + node.covers,
        )
        graph.replace_nodes([norm, node], [fused])
        made.append(fused.name)
    return made


def _plain(norm: Node) -> bool:
    """Whether it is a norm of whole rows of T, without a residual."""
    return (
        norm.op == "rms_norm"
        and not norm.inputs[2]
        and not norm.optional(3)
        and norm.attr_or("heads", 1) == 1
    )
