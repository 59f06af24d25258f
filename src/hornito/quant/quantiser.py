"""The quantiser: every matrix of a graph that is to be rounded, is, before the package is written.

A matrix whose outputs lose too much stays at more bits, and what a target size leaves over goes to
the tensors that a model is most sensitive to: tables, then the first and the last layers, then
those that lose most. Rounded matrices lie in a temporary file until they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from hornito.errors import UsageError, size_text
from hornito.graph.graph import Graph, Node, Weight
from hornito.graph.storage import larger_format, table_names
from hornito.graph.weights import ArrayData, WeightData
from hornito.parallel import Workers
from hornito.progress import Progress
from hornito.quant.formats import Floats, WeightFormat, weight_format
from hornito.quant.matrix import Rounded, Statistics, quantise_matrix
from hornito.quant.rounding import RANGES
from hornito.quant.storage import PackedData, holds_exactly

if TYPE_CHECKING:
    from hornito.quant.calibrate import Activations

SHIFT_SHARE = 0.1
"""A mean error is taken back by a new bias when it is this part of a layer's squared error: a bias
takes room. One that is there anyhow always takes it back."""


_BIASED = ("linear", "gated_linear", "qkv_append")
"""Ops whose inputs are a value, a matrix and, where it is not `""`, a bias."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What rounding must keep to.

    Attributes:
        error: most relative error of a matrix' outputs (of its weights without statistics).
        target_bytes: of the file's tensors; what is left over is spent on more bits. None spends
            nothing.
    """

    error: float = 0.25
    target_bytes: int | None = None


@dataclass(slots=True)
class Report:
    """What was done, for the user and the manifest."""

    warnings: list[str]
    errors: dict[str, float]
    raised: dict[str, str]
    shifted: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        worst = max(self.errors, key=lambda name: self.errors[name], default="")
        return {
            "mean_error": round(sum(self.errors.values()) / max(1, len(self.errors)), 6),
            "worst_error": round(self.errors.get(worst, 0.0), 6),
            "worst": worst,
            "more_bits": dict(self.raised),
            "corrected_biases": self.shifted,
        }


def to_round(graph: Graph) -> list[str]:
    """The matrices whose storage type is not what their source holds, and takes rounded numbers."""
    names = []
    for name, weight in graph.weights.items():
        fmt = weight_format(weight.dtype)
        if fmt.number in RANGES and weight.data is not None and not holds_exactly(fmt, weight.data):
            names.append(name)
    return names


class Quantiser:
    """Rounds the matrices of a graph, and gives them data that is their bytes.

    Args:
        graph: after passes, with storage types assigned.
        activations: what matrices read over a text; None to go by the weights alone.
        file: an open temporary file for the bytes.
    """

    def __init__(self, graph: Graph, activations: Activations | None, file: IO[bytes]) -> None:
        self._graph = graph
        self._activations = activations
        self._file = file
        self._source: dict[str, WeightData] = {}
        self._tables = table_names(graph)
        self._looked_up = {n.inputs[1] for n in graph if n.op == "embedding"}
        self.report = Report([], {}, {})

    def run(self, limits: Limits, progress: Progress) -> Report:
        """Round everything that is to be.

        Raises:
            UsageError: the target size is too small for all; says the least size.
        """
        names = to_round(self._graph)
        weights = self._graph.weights
        progress.start("rounding", sum(_elements(weights[name]) for name in names))
        with threadpool_limits(1, user_api="blas"), Workers() as workers:
            for name in names:
                self._round(name, weight_format(weights[name].dtype), limits, progress, workers)
            if limits.target_bytes is not None:
                self._spend(limits, names, progress, workers)
        progress.finish()
        return self.report

    def _round(
        self, name: str, fmt: WeightFormat, limits: Limits, progress: Progress, workers: Workers
    ) -> None:
        weight = self._graph.weights[name]
        data = self._source.setdefault(name, _present(name, weight))
        statistics = self._statistics(name)
        node = self._biased(name)
        shift_from = np.inf if node is None else 0.0 if node.inputs[2] else SHIFT_SHARE
        wanted, advance = fmt, _by_elements(progress, data.shape[1])
        rounding = partial(_quantise, data, statistics, shift_from, workers)
        done = rounding(fmt, advance)
        while done is not None and done.error > limits.error:
            fmt = larger_format(fmt)
            done = rounding(fmt, None)
        if fmt != wanted:
            self.report.raised[name] = fmt.name
            self.report.warnings.append(
                f"{name} stays {fmt.name}: as {wanted.name} its outputs would be off by more than "
                f"{limits.error:.0%}"
            )
        if done is None:
            self._graph.weights[name] = replace(weight, dtype=fmt.name, data=data)
            return
        self.report.errors[name] = done.error
        self._keep(name, weight, fmt, done, data)
        if done.shift is not None and node is not None:
            self._take_back(name, node, done.shift)

    def _statistics(self, name: str) -> Statistics | None:
        """Of what a matrix reads. The rows of a table that tokens are looked up in are inputs too,
        all columns alike: half of what counts, for a table that is a head besides."""
        if self._activations is None:
            return None
        found = self._activations.statistics(name)
        if found is None and name not in self._looked_up:
            self.report.warnings.append(f"{name} has no calibrated twin: its weights alone decide")
        if found is None or name not in self._looked_up:
            return found
        moments = found.moments / np.maximum(np.diag(found.moments).mean(), np.float32(1e-30))
        moments[np.diag_indices(len(moments))] += 1.0
        return Statistics(moments / 2, found.mean)

    def _keep(
        self, name: str, weight: Weight, fmt: WeightFormat, done: Rounded, data: WeightData
    ) -> None:
        at = self._file.seek(0, 2)
        self._file.write(done.data.data)
        size = len(done.data)

        def read() -> memoryview:
            self._file.seek(at)
            return memoryview(self._file.read(size))

        packed = PackedData(name, weight.shape, fmt, read, sources=data.source_names)
        self._graph.weights[name] = replace(weight, dtype=fmt.name, data=packed)

    # -- more bits within a target size -----------------------------------------------------

    def _spend(
        self, limits: Limits, names: list[str], progress: Progress, workers: Workers
    ) -> None:
        """Give the most sensitive matrices 8 bits while the file stays within the target."""
        target = limits.target_bytes or 0
        total = total_bytes(self._graph, self._graph.weights)
        if total > target:
            raise UsageError(
                f"the weights take {size_text(total)} at the least, more than the target of "
                f"{size_text(target)}; allow more, or fewer bits (--table int4, --outliers 0, "
                "--group 128)"
            )
        for name in sorted(names, key=self._rank):
            weight = self._graph.weights[name]
            fmt = weight_format(weight.dtype)
            more = larger_format(fmt)
            if more.number not in RANGES or not more.fits(weight.shape):
                continue
            grown = total + _file_bytes(more, weight) - _file_bytes(fmt, weight)
            if grown <= target:
                total = grown
                self.report.raised[name] = more.name
                self._round(name, more, limits, progress, workers)

    def _rank(self, name: str) -> tuple[int, float]:
        """Tables, then the first and the last layer, then those whose outputs lose most."""
        layers = self._layers()
        place = 2
        if name in self._tables:
            place = 0
        elif layers.get(name) in (0, max(layers.values(), default=0)):
            place = 1
        return place, -self.report.errors.get(name, 0.0)

    def _layers(self) -> dict[str, int]:
        """The layer of each matrix: how many attention nodes come before it; what projects into
        attention belongs to the layer behind."""
        found: dict[str, int] = {}
        layer = 0
        seen: list[str] = []
        for node in self._graph:
            if node.op == "attention":
                layer = node.attr("layer")
                found |= {name: layer for name in seen if name not in found}
            elif node.op in _BIASED:
                seen.append(node.inputs[1])
        return found | {name: layer for name in seen if name not in found}

    # -- mean errors ------------------------------------------------------------------------

    def _biased(self, name: str) -> Node | None:
        """The one node that reads a matrix, when it may have a bias."""
        readers = self._graph.consumers(name)
        return readers[0] if len(readers) == 1 and readers[0].op in _BIASED else None

    def _take_back(self, name: str, node: Node, shift: Floats) -> None:
        """Let the bias behind a matrix take back the mean error of its outputs."""
        weights, bias = self._graph.weights, node.inputs[2]
        if bias:
            data = self._source.setdefault(bias, _present(bias, weights[bias]))
            shifted = ArrayData(data.rows(0, len(shift)) - shift, data.source_names)
            weights[bias] = replace(weights[bias], data=shifted)
        else:
            correction = Weight(shift.shape, "fp32", ArrayData(-shift))
            bias = self._graph.add_weight(f"{name}.correction", correction)
            inputs = (*node.inputs[:2], bias, *node.inputs[3:])
            self._graph.replace_nodes([node], [replace(node, inputs=inputs)])
        self.report.shifted += 1


def _quantise(
    data: WeightData,
    statistics: Statistics | None,
    shift_from: float,
    workers: Workers,
    fmt: WeightFormat,
    advance: Callable[[int], None] | None,
) -> Rounded | None:
    """None for a type whose numbers are plain."""
    if fmt.number not in RANGES:
        return None
    return quantise_matrix(
        fmt, data, statistics, shift_from=shift_from, advance=advance, workers=workers
    )


def _by_elements(progress: Progress, width: int) -> Callable[[int], None]:
    return lambda rows: progress.advance(rows * width)


def _present(name: str, weight: Weight) -> WeightData:
    if weight.data is None:
        raise UsageError(f"weight {name} has no data to round")
    return weight.data


def _elements(weight: Weight) -> int:
    return weight.shape[0] * weight.shape[1]


def _file_bytes(fmt: WeightFormat, weight: Weight) -> int:
    """Bytes of a weight in the file, which begins each at a multiple of 256."""
    return -(-fmt.nbytes(weight.shape) // 256) * 256


def total_bytes(graph: Graph, names: Iterable[str]) -> int:
    """Bytes that weights of a graph take in the file, in the storage types that they have now."""
    weights = (graph.weights[name] for name in names)
    return sum(_file_bytes(weight_format(weight.dtype), weight) for weight in weights)
