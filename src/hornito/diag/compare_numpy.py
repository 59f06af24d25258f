"""The numpy evaluator as a side of a comparison, and as what `hornito run --backend cpu` is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hornito.diag.compare_decoder import Run
from hornito.diag.compare_values import Trace
from hornito.graph.graph import CACHE, Graph
from hornito.graph.reference import ReferenceState, evaluate
from hornito.ops.base import Array
from hornito.quant.formats import weight_format
from hornito.quant.storage import unpack

if TYPE_CHECKING:
    from hornito.package.reader import Package

Floats = npt.NDArray[np.float32]

CACHED_WEIGHT_BYTES = 4 << 30
"""Unpacked weights that the evaluator keeps from call to call."""


class StoredWeights(Mapping[str, Array]):
    """The weights of a package as fp32 numbers, unpacked when they are asked for."""

    def __init__(self, graph: Graph, package: Package) -> None:
        self.graph = graph
        self._package = package
        self._kept: dict[str, Floats] = {}
        self._kept_bytes = 0

    def __contains__(self, name: object) -> bool:
        return name in self.graph.weights

    def __iter__(self) -> Iterator[str]:
        return iter(self.graph.weights)

    def __len__(self) -> int:
        return len(self.graph.weights)

    def __getitem__(self, name: str) -> Floats:
        if name in self._kept:
            return self._kept[name]
        numbers = self.read(name)
        if self._kept_bytes + numbers.nbytes <= CACHED_WEIGHT_BYTES:
            self._kept[name] = numbers
            self._kept_bytes += numbers.nbytes
        return numbers

    def read(self, name: str) -> Floats:
        """A weight's numbers, not kept."""
        weight = self.graph.weights[name]
        data = np.frombuffer(self._package.tensor(name), np.uint8)
        return unpack(weight_format(weight.dtype), data, weight.shape)


class NumpySide:
    """The reference evaluator in float64, on a package's own weights; it has no schedule.

    Args:
        context: positions that a plan would have (some models choose their RoPE by it).
        keep: whether values are kept for `trace`.
    """

    def __init__(
        self, graph: Graph, weights: Mapping[str, Array], context: int, *, keep: bool = True
    ) -> None:
        self.graph = graph
        self._weights = weights
        self._context = context
        self._keep = keep
        self._begin()

    def _begin(self) -> None:
        self._state = ReferenceState(context=self._context)
        self._ids: list[int] = []
        self._pieces: list[dict[str, Array]] = []

    def extend(self, ids: Sequence[int]) -> Array:
        """Evaluate `ids` behind what was evaluated; the logits `[n, V]` after each."""
        start = len(self._ids)
        positions = np.arange(start, start + len(ids))
        inputs: dict[str, Array] = {
            "ids": np.asarray(ids, np.int64),
            "positions": positions,
            "selection": np.arange(len(ids)),
        }
        values = evaluate(self.graph, inputs, self._weights, self._state, keep=self._keep)
        self._ids += ids
        if self._keep:
            self._pieces.append(values)
        return values[self.graph.outputs[0]]

    def greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        """The most likely tokens behind a prompt."""
        return list(islice(self.tokens(prompt), steps))

    def tokens(self, prompt: Sequence[int]) -> Iterator[int]:
        """The most likely tokens behind a prompt, without end."""
        self._begin()
        logits = self.extend(prompt)
        while True:
            token = int(np.argmax(logits[-1]))
            yield token
            logits = self.extend([token])

    def trace(self, run: Run, ids: Sequence[int], prompt: int) -> Trace:
        """Every value along `ids`, whatever the run."""
        if self._ids != list(ids[: len(self._ids)]):
            self._begin()
        if len(self._ids) < len(ids):
            self.extend(ids[len(self._ids) :])
        values: dict[str, Array] = {}
        for node in self.graph:
            for name in node.outputs:
                if self.graph.values[name].dtype == CACHE:
                    cache = self._state.layer(node.attr("layer"))
                    for label, held in (("keys", cache.keys), ("values", cache.values)):
                        rows = [held[i].reshape(-1) for i in range(len(ids))]
                        values[f"{name}.{label}"] = np.stack(rows)
                else:
                    values[name] = np.concatenate([piece[name] for piece in self._pieces])
        return Trace("", values)
