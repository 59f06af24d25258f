"""Linears that read the same rows, joined into one by stacking their weights."""

from __future__ import annotations

from collections.abc import Sequence

from hornito.graph.graph import Graph, Node, Weight
from hornito.graph.weights import stack


def can_stack(graph: Graph, linears: Sequence[Node | None]) -> bool:
    """Whether all are linears of one x, private, without residual, all or none with a bias."""
    found = [node for node in linears if node is not None and node.op == "linear"]
    return (
        len(found) == len(linears)
        and len({node.inputs[0] for node in found}) == 1
        and len({bool(node.inputs[2]) for node in found}) == 1
        and len({graph.weights[node.inputs[1]].dtype for node in found}) == 1
        and not any(node.inputs[3] for node in found)
        and all(graph.is_private(node.outputs[0]) for node in found)
        and all(graph.is_private(node.inputs[1]) for node in found)
    )


def stack_weights(graph: Graph, linears: Sequence[Node], name: str) -> tuple[str, str]:
    """Declare the stacked weight (and bias) and return their names; bias may be `""`."""
    weight = _stack(graph, [node.inputs[1] for node in linears], f"{name}.weight")
    if not linears[0].inputs[2]:
        return weight, ""
    return weight, _stack(graph, [node.inputs[2] for node in linears], f"{name}.bias")


def _stack(graph: Graph, parts: Sequence[str], name: str) -> str:
    weights = [graph.weights[part] for part in parts]
    data = [w.data for w in weights if w.data is not None]
    if len(data) != len(weights):
        raise ValueError(f"{name}: a weight without data can't be stacked")
    shape = (sum(w.shape[0] for w in weights), *weights[0].shape[1:])
    return graph.add_weight(name, Weight(shape, weights[0].dtype, stack(data), weights[0].matrix))
