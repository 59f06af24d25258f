"""The numpy evaluator: what a graph means, without a GPU.

It runs every op's `reference` in float64 (or any float type), with a plain growing KV cache per
layer. Tests hold passes and kernels to it; nothing at run time uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError
from hornito.graph.graph import CACHE, Graph
from hornito.ops import registry
from hornito.ops.base import Array


@dataclass(slots=True)
class LayerCache:
    """Keys and values of one layer by position: `[positions, kv_heads, head_dim]`."""

    keys: dict[int, Array] = field(default_factory=dict)
    values: dict[int, Array] = field(default_factory=dict)


@dataclass(slots=True)
class ReferenceState:
    """What lasts between calls of one sequence, the float type of the evaluation, and the context
    that a plan would have (some models choose their RoPE by it)."""

    dtype: npt.DTypeLike = np.float64
    context: int = 0
    layers: dict[int, LayerCache] = field(default_factory=dict)
    positions: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def layer(self, index: int) -> LayerCache:
        """The cache of a layer, made when first asked for."""
        return self.layers.setdefault(index, LayerCache())


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Array],
    weights: Mapping[str, Array],
    state: ReferenceState,
    *,
    keep: bool = False,
) -> dict[str, Array]:
    """Run the graph once and return its outputs (every value with `keep`).

    Args:
        inputs: an array for every graph input, of any T and S.
        weights: an array for every weight, each taken when a node reads it.
        state: the sequence's caches, updated in place.

    Raises:
        FormatError: an input is missing.
    """
    missing = set(graph.inputs) - set(inputs)
    if missing:
        raise FormatError(f"no value for the graph input(s) {', '.join(sorted(missing))}")
    values: dict[str, Array | None] = {"": None}
    values.update(inputs)
    state.positions = np.asarray(inputs["positions"], np.int64)

    def operand(name: str) -> Array | None:
        if name not in weights:
            return values[name]
        array = weights[name]
        return array.astype(state.dtype) if array.dtype.kind == "f" else array

    for node in graph:
        results = registry.op(node.op).reference(node, [operand(n) for n in node.inputs], state)
        values.update(zip(node.outputs, results, strict=True))
    wanted = [n for n, v in graph.values.items() if v.dtype != CACHE] if keep else graph.outputs
    return {name: result for name in wanted if (result := values[name]) is not None}
