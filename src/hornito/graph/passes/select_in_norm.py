"""`rms_norm(select_rows(x, selection))` becomes `rms_norm(x, selection)`."""

from __future__ import annotations

from dataclasses import replace

from hornito.graph.graph import Graph

NAME = "select_in_norm"


def run(graph: Graph) -> list[str]:
    made = []
    for norm in list(graph):
        if norm.op != "rms_norm" or norm.inputs[2]:
            continue
        select = graph.producer(norm.inputs[0])
        if select is None or select.op != "select_rows" or not graph.is_private(norm.inputs[0]):
            continue
        x, selection = select.inputs
        fused = replace(
            norm, inputs=(x, norm.inputs[1], selection), covers=select.covers + norm.covers
        )
        graph.replace_nodes([select, norm], [fused])
        made.append(fused.name)
    return made
