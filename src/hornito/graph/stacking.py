"""Linears that read the same rows, joined into one by joining their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hornito.graph.graph import Graph, Node, Weight
from hornito.graph.weights import InterleavedData, WeightData, stack


def can_stack(graph: Graph, linears: Sequence[Node | None]) -> bool:
    """Whether all are plain linears of one x, private, without residual or activation, all or
    none with a bias."""
    found = [node for node in linears if node is not None and node.op == "linear"]
    return (
        len(found) == len(linears)
        and len({node.inputs[0] for node in found}) == 1
        and len({bool(node.inputs[2]) for node in found}) == 1
        and len({graph.weights[node.inputs[1]].dtype for node in found}) == 1
        and not any(node.inputs[3] or node.attrs for node in found)
        and all(graph.is_private(node.outputs[0]) for node in found)
        and all(graph.is_private(node.inputs[1]) for node in found)
    )


def stack_weights(graph: Graph, linears: Sequence[Node], name: str) -> tuple[str, str]:
    """Declare the weights one above the other, and so the biases; bias may be `""`."""
    return _join(graph, linears, name, stack)


def interleave_weights(graph: Graph, linears: Sequence[Node], name: str) -> tuple[str, str]:
    """Declare two weights row by row in turn, and so the biases; bias may be `""`."""
    return _join(graph, linears, name, lambda parts: InterleavedData(*parts))


Combine = Callable[[Sequence[WeightData]], WeightData]


def _join(graph: Graph, linears: Sequence[Node], name: str, combine: Combine) -> tuple[str, str]:
    weight = _declare(graph, [node.inputs[1] for node in linears], f"{name}.weight", combine)
    if not linears[0].inputs[2]:
        return weight, ""
    return weight, _declare(graph, [node.inputs[2] for node in linears], f"{name}.bias", combine)


def _declare(graph: Graph, parts: Sequence[str], name: str, combine: Combine) -> str:
    weights = [graph.weights[part] for part in parts]
    data = [w.data for w in weights if w.data is not None]
    if len(data) != len(weights):
        raise ValueError(f"{name}: a weight without data can't be joined")
    joined = combine(data)
    return graph.add_weight(name, Weight(joined.shape, weights[0].dtype, joined, weights[0].matrix))
