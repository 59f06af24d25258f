"""`add(a, linear(x))` becomes `linear(x)` with `a` as its residual."""

from __future__ import annotations

from hornito.graph.graph import Graph
from hornito.graph.residuals import fold_sums

NAME = "residual_in_linear"


def run(graph: Graph) -> list[str]:
    return fold_sums(graph, "linear")
