"""What a model makes of a text: the inputs of its matrices, computed on the device and read back.

They lie in a temporary file until the matrix that reads them is rounded: a model's inputs over a
text take about as much room as its weights, and no more than one matrix needs them at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from hornito.errors import HornitoError, UsageError
from hornito.graph.graph import Graph
from hornito.graph.reference import ReferenceState
from hornito.graph.shapes import S
from hornito.ops import registry
from hornito.ops.base import Array
from hornito.ops.rms_norm import norm
from hornito.plan.plan import PlanOptions
from hornito.progress import Progress
from hornito.quant.formats import Floats, weight_format
from hornito.quant.matrix import Statistics
from hornito.quant.planes import unpack
from hornito.runtime.engine import Engine
from hornito.runtime.session import Session

if TYPE_CHECKING:
    from hornito.package.reader import Package
    from hornito.vk.device import Device

SEQUENCE = 256
"""Tokens of a sequence: each is evaluated by itself, from position 0."""

SHORTEST = 16
"""A text's last tokens are left out when they are fewer."""

_NORMS = {"linear": 4, "gated_linear": 3, "qkv_append": 3, "head": None}
"""The ops that read a matrix, and which input is the weight of a norm of the value, if any."""

_LARGEST = 1024.0


class Read(NamedTuple):
    """What a matrix reads: a value, normed where `norm` is the weight of a norm."""

    value: str
    norm: str
    eps: float


def own_text() -> str:
    """The text that is taken when the user gives none: prose, dialogue, code, lists."""
    return resources.files("hornito.quant").joinpath("calibration.txt").read_text("utf-8")


def own_chats() -> list[list[dict[str, str]]]:
    """Conversations that are taken beside it, for a model with a chat template."""
    text = resources.files("hornito.quant").joinpath("calibration_chats.json").read_text("utf-8")
    chats: list[list[dict[str, str]]] = json.loads(text)
    return chats


def sequences(
    ids: Sequence[int], count: int, bos: int | None, chats: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """At most `count` sequences: the beginnings of chats, then pieces of a text's tokens, each
    behind `bos` where there is one.

    Raises:
        UsageError: the text is too short for one.
    """
    start = [] if bos is None else [bos]
    room = SEQUENCE - len(start)
    body = list(ids[1:] if start and ids and ids[0] == bos else ids)
    runs = [start + body[at : at + room] for at in range(0, len(body), room)]
    runs = [run for run in runs[:count] if len(run) >= SHORTEST]
    if not runs:
        raise UsageError(
            f"the calibration text has {len(ids)} tokens; it needs at least {SHORTEST}"
        )
    return [*(list(chat[:SEQUENCE]) for chat in chats), *runs][:count]


@dataclass(slots=True)
class Activations:
    """The rows that matrices read, in a temporary file.

    A piece is rows of fp16 numbers and the power of two that they were divided by.
    """

    file: IO[bytes]
    of_weight: dict[str, Read] = field(default_factory=dict)
    pieces: dict[Read, list[tuple[int, int, int, float]]] = field(default_factory=dict)

    def add(self, read: Read, rows: Floats) -> None:
        """Keep rows `[n, K]`.

        Raises:
            HornitoError: they hold a NaN or an infinity.
        """
        largest = float(np.abs(rows).max(initial=0.0))
        if not np.isfinite(largest):
            raise HornitoError(
                f"the value {read.value} is not finite over the calibration text: the weights are "
                "damaged, or the text leads the model astray; --quant-samples 0 (samples=0) rounds "
                "by the weights alone"
            )
        scale = 2.0 ** max(0.0, np.ceil(np.log2(max(largest, 1e-30) / _LARGEST)))
        at = self.file.seek(0, 2)
        self.file.write((rows / np.float32(scale)).astype(np.float16).tobytes())
        self.pieces.setdefault(read, []).append((at, *rows.shape, scale))

    def statistics(self, weight: str) -> Statistics | None:
        """Of the inputs of a matrix; None when nothing was kept of them."""
        read = self.of_weight.get(weight)
        if read is None or read not in self.pieces:
            return None
        rows = np.concatenate([self._read(piece) for piece in self.pieces[read]])
        moments = rows.T @ rows
        moments /= np.float32(len(rows))
        return Statistics(moments, rows.mean(axis=0))

    def _read(self, piece: tuple[int, int, int, float]) -> Floats:
        at, count, width, scale = piece
        self.file.seek(at)
        halves = np.frombuffer(self.file.read(2 * count * width), np.float16)
        return halves.reshape(count, width).astype(np.float32) * np.float32(scale)


def calibrate(
    device: Device,
    package: Package,
    graph: Graph,
    runs: Sequence[Sequence[int]],
    file: IO[bytes],
    progress: Progress,
) -> Activations:
    """Evaluate sequences on a device, and keep what every matrix of the graph reads.

    Args:
        package: with the weights of `graph`.
        file: an open temporary file, to keep it in.

    Raises:
        DeviceMemoryError: the model does not fit.
    """
    options = PlanOptions(context=SEQUENCE, kv_half=False, keep_values=True, chunk_rows=(SEQUENCE,))
    engine = Engine(device, package, graph, options, (), progress, precision="high")
    try:
        kept = Activations(file)
        kept.of_weight = matrix_reads(graph)
        wanted = list(dict.fromkeys(kept.of_weight.values()))
        reader = _Reader(engine, package)
        progress.start("calibrating", sum(len(run) for run in runs))
        for run in runs:
            with Session(engine) as session:
                session.prefill(run)
            for read in wanted:
                kept.add(read, reader.read(read, len(run)))
            progress.advance(len(run))
        progress.finish()
    finally:
        engine.close()
    return kept


def matrix_reads(graph: Graph) -> dict[str, Read]:
    """What each matrix of a graph reads."""
    found = {}
    for node in graph:
        if node.op in _NORMS:
            slot = _NORMS[node.op]
            scale = "" if slot is None else node.optional(slot)
            eps = float(node.attr("eps")) if scale else 0.0
            found[node.inputs[1]] = Read(node.inputs[0], scale, eps)
    return found


class _Reader:
    """Values of the last chunk that an engine evaluated.

    A value behind the selection of rows is what its node makes when all rows are selected: the
    device has it for the last row only, and the rest would take a pass of the head for each.
    """

    def __init__(self, engine: Engine, package: Package) -> None:
        self._engine = engine
        self._graph = engine.graph
        self._package = package
        self._state = ReferenceState(dtype=np.float32, context=SEQUENCE)

    def read(self, read: Read, count: int) -> Floats:
        """The first `count` rows of what a matrix reads."""
        rows = self.rows(read.value, count)
        if not read.norm:
            return rows
        return np.asarray(norm(rows, self._weight(read.norm), read.eps), np.float32)

    def rows(self, name: str, count: int) -> Floats:
        """The first `count` rows of a value."""
        if self._graph.values[name].shape[0] != S:
            return self._engine.value("chunk", SEQUENCE, name, count)
        node = self._graph.producer(name)
        if node is None:
            raise UsageError(f"nothing makes the value {name}")
        inputs = [self._operand(operand, count) for operand in node.inputs]
        (result, *_) = registry.op(node.op).reference(node, inputs, self._state)
        return np.asarray(result, np.float32)

    def _operand(self, name: str, count: int) -> Array | None:
        if not name:
            return None
        if name in self._graph.weights:
            return self._weight(name)
        return np.arange(count) if name == "selection" else self.rows(name, count)

    def _weight(self, name: str) -> Floats:
        weight = self._graph.weights[name]
        data = np.frombuffer(self._package.tensor(name), np.uint8)
        return unpack(weight_format(weight.dtype), data, weight.shape)
