"""`add(a, rms_norm(x))` becomes `rms_norm(x)` with `a` as its residual."""

from __future__ import annotations

from hornito.graph.graph import Graph
from hornito.graph.residuals import fold_sums

NAME = "residual_in_norm"


def run(graph: Graph) -> list[str]:
    return fold_sums(graph, "rms_norm")
