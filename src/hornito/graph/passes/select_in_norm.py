"""A norm of selected rows reads the selection itself: `rms_norm(select_rows(x, selection))` becomes
`rms_norm(x, selection)`, and so for `layer_norm`."""

from __future__ import annotations

from dataclasses import replace

from hornito.graph.graph import Graph, Node

NAME = "select_in_norm"


def run(graph: Graph) -> list[str]:
    made = []
    for norm in list(graph):
        if not _takes_selection(norm):
            continue
        select = graph.producer(norm.inputs[0])
        if select is None or select.op != "select_rows" or not graph.is_private(norm.inputs[0]):
            continue
        x, selection = select.inputs
        fused = replace(
            norm,
            inputs=(x, norm.inputs[1], selection, *norm.inputs[3:]),
            covers=select.covers + norm.covers,
        )
        graph.replace_nodes([select, norm], [fused])
        made.append(fused.name)
    return made


def _takes_selection(norm: Node) -> bool:
    """Whether it is a norm that has no selection yet; both kinds have it as input 2."""
    return norm.op in ("rms_norm", "layer_norm") and not norm.inputs[2]
