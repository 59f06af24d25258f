"""Tensor graphs on a device: numpy arrays in, numpy arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from hornito.errors import HornitoError, SessionError, UsageError
from hornito.ops.base import Operand
from hornito.plan.recording import SEGMENT_DISPATCHES, Pipelines, record
from hornito.runtime.pacing import Pacer, usual_bound
from hornito.tensor.buckets import Bucket, pick
from hornito.tensor.graph import (
    FLOATS,
    Array,
    TensorGraph,
    TensorValue,
    Words,
    from_words,
    to_words,
)
from hornito.tensor.kernels import STATUS, TABLES
from hornito.tensor.plan import build_tensor_plan
from hornito.vk.memory import Arena, Buffer

if TYPE_CHECKING:
    from hornito.vk.device import Device
    from hornito.vk.record import Recorder

_STATUS = {
    1: "a 64-bit integer left the range that the device holds exactly (32 bits)",
    2: "an index lies outside its axis",
}


class TensorModel:
    """A planned, loaded and recorded graph.

    Args:
        device: an open device; the caller closes it after the model.
        graph: what to run.
        constants: by name, places on the device of constants that are there already.
        guard, barrier_everywhere, keep_values: see `build_tensor_plan`.

    Raises:
        DeviceMemoryError: it does not fit; nothing stays allocated.
    """

    def __init__(
        self,
        device: Device,
        graph: TensorGraph,
        *,
        constants: Mapping[str, tuple[Buffer, int]] | None = None,
        guard: int = 0,
        barrier_everywhere: bool = False,
        keep_values: bool = False,
    ) -> None:
        self.device = device
        self.graph = graph
        self.plan = build_tensor_plan(
            graph,
            device.caps,
            guard=guard,
            barrier_everywhere=barrier_everywhere,
            keep_values=keep_values,
        )
        self._keeps_values = keep_values
        self._arenas: list[Arena] = []
        self._recordings: list[Recorder] = []
        self._closed = False
        plan = self.plan
        try:
            self._shared = constants or {}
            own = [(n, size) for n, size in plan.constants.items() if n not in self._shared]
            self._constants = self._arena("constants", [*own, (TABLES, plan.tables.nbytes)])
            self._inputs = self._arena("inputs", list(plan.inputs.items()))
            self._values = self._arena("activations", [("arena", max(4, plan.arena.total))])
            self._status = self._arena("status", [(STATUS, plan.nodes * 4)])
            self._load()
            self.pipelines = Pipelines(device)
            self._pacer = Pacer(device, usual_bound(device.info.kind))
            segment = self._pacer.segment("chunk", SEGMENT_DISPATCHES)
            self._recordings = record(
                device, self.pipelines, plan.program, self._address, "tensor", segment
            )
        except BaseException:
            self.close()
            raise

    def _arena(self, label: str, items: list[tuple[str, int]]) -> Arena:
        arena = Arena(self.device, label, items)
        self._arenas.append(arena)
        return arena

    def _load(self) -> None:
        pairs = [
            (*self._constants[name], words)
            for name, words in self.graph.constants.items()
            if words.size and name not in self._shared
        ]
        self.device.upload([*pairs, (*self._constants[TABLES], self.plan.tables)])
        # Memory that nothing has written yet is NaN, so that a read of it shows.
        size = self._values.size("arena")
        self.device.upload([(*self._values["arena"], np.full(size // 4, 0x7FC0_0001, np.uint32))])

    def _address(self, operand: Operand) -> int:
        name = operand.name
        if name in self.plan.arena.offsets:
            base = self._values.address("arena") + self.plan.arena.offsets[name]
        elif name == STATUS:
            base = self._status.address(STATUS)
        elif name in self._shared:
            buffer, offset = self._shared[name]
            base = buffer.address + offset
        elif name in self._constants:
            base = self._constants.address(name)
        else:
            base = self._inputs.address(name)
        return base + operand.offset

    @property
    def inputs(self) -> dict[str, TensorValue]:
        """Type and shape of every input."""
        return {name: self.graph.values[name] for name in self.graph.inputs}

    @property
    def outputs(self) -> dict[str, TensorValue]:
        """Type and shape of every output."""
        return {name: self.graph.values[value] for name, value in self.graph.outputs.items()}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs for these inputs.

        Raises:
            UsageError: an input is missing, unknown, or of another shape or kind of numbers.
            UnsupportedError: an input's 64-bit integer does not fit 32 bits.
            HornitoError: an index is out of range, or an integer left 32 bits; names the node.
        """
        if self._closed:
            raise SessionError("the model is closed")
        pairs = [
            (*self._inputs[name], words)
            for name, words in self._checked(inputs).items()
            if words.size
        ]
        clear = np.zeros(self.plan.nodes, np.uint32)
        self.device.upload([*pairs, (*self._status[STATUS], clear)])
        if self._recordings:
            for group in self._pacer.cut(self._recordings):
                ticket = self.device.submit(self._pacer.timed(group))
            self.device.wait(ticket)
        status = np.frombuffer(self._download(self._status, STATUS, clear.nbytes), np.uint32)
        if status.any():
            at = int(np.flatnonzero(status)[0])
            node = self.graph.nodes[at]
            raise HornitoError(
                f"node {node.source or node.name} ({node.op}): {_STATUS[int(status[at])]}"
            )
        return {name: self._read(name) for name in self.graph.outputs}

    def _checked(self, inputs: Mapping[str, Array]) -> dict[str, Words]:
        expected = self.inputs
        if missing := sorted(set(expected) - set(inputs)):
            raise UsageError(f"inputs are missing: {', '.join(missing)}")
        if unknown := sorted(set(inputs) - set(expected)):
            raise UsageError(f"no such inputs: {', '.join(unknown)}; there are {sorted(expected)}")
        words = {}
        for name, value in expected.items():
            array = np.asarray(inputs[name])
            if array.shape != value.shape:
                raise UsageError(
                    f"input {name!r} has shape {array.shape}; the model was compiled for "
                    f"{value.shape}"
                )
            # Extension types such as bfloat16 are of kind V.
            if (array.dtype.kind in "fV") != (value.dtype in FLOATS):
                raise UsageError(f"input {name!r} is {array.dtype}; the model takes {value.dtype}")
            words[name] = to_words(array, value.dtype, f"input {name}")
        return words

    def _download(
        self, arena: Mapping[str, tuple[Buffer, int]], name: str, size: int, offset: int = 0
    ) -> bytes:
        buffer, base = arena[name]
        return self.device.download(buffer, base + offset, size)

    def values(self) -> dict[str, Array]:
        """The results of every node, as the last run left them.

        Raises:
            SessionError: the plan reuses memory (it was made without `keep_values`).
        """
        if not self._keeps_values:
            raise SessionError("values can be read when the plan keeps them (keep_values)")
        aliases = self.graph.aliases()
        names = [name for node in self.graph.nodes for name in node.outputs]
        return {name: self._at(name, self.graph.base(name, aliases)) for name in names}

    def _read(self, name: str) -> Array:
        return self._at(self.graph.outputs[name], self.plan.outputs[name])

    def _at(self, name: str, source: str) -> Array:
        """A value whose memory is that of `source`."""
        value = self.graph.values[name]
        size = value.size * 4
        if not size:
            return from_words(np.zeros(0, np.uint32), value)
        if source in self.plan.arena.offsets:
            raw = self._download(self._values, "arena", size, self.plan.arena.offsets[source])
        elif source in self._shared:
            raw = self._download(self._shared, source, size)
        elif source in self.graph.constants:
            raw = self._download(self._constants, source, size)
        else:
            raw = self._download(self._inputs, source, size)
        return from_words(np.frombuffer(raw, np.uint32), value)

    def close(self) -> None:
        """Release every buffer and recording; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for recorder in self._recordings:
            recorder.free()
        for arena in reversed(self._arenas):
            arena.free()

    def __enter__(self) -> TensorModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class TensorModels:
    """The buckets of a package on a device; a bucket is planned when it is first needed.

    Constants are on the device once, whichever buckets read them.

    Args:
        device: an open device; the caller closes it after the models.
        buckets: of one package (`load_buckets`).

    Raises:
        DeviceMemoryError: the constants do not fit; nothing stays allocated.
    """

    def __init__(self, device: Device, buckets: Sequence[Bucket]) -> None:
        self.device = device
        self.buckets = list(buckets)
        self._models: dict[str, TensorModel] = {}
        pool = {
            place: bucket.graph.constants[name]
            for bucket in self.buckets
            for name, place in bucket.pooled.items()
            if name in bucket.graph.constants
        }
        items = [(place, max(4, words.nbytes)) for place, words in pool.items()]
        self._pool = Arena(device, "constants", items)
        try:
            device.upload([(*self._pool[place], words) for place, words in pool.items()])
        except BaseException:
            self._pool.free()
            raise

    def run(
        self,
        inputs: Mapping[str, Array],
        *,
        bucket: str | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> dict[str, Array]:
        """The outputs of the bucket that takes these inputs.

        Args:
            bucket: its name, where several would do.
            dims: numbers that its named dims must have.

        Raises:
            UsageError: no bucket takes them, or several do; names those that there are.
            UnsupportedError, HornitoError: as `TensorModel.run`.
        """
        shapes = {name: np.shape(array) for name, array in inputs.items()}
        chosen = pick(self.buckets, shapes, name=bucket, dims=dims)
        return self.model(chosen).run(inputs)

    def model(self, bucket: Bucket) -> TensorModel:
        """A bucket's model, loaded and recorded."""
        if bucket.name not in self._models:
            places = {
                name: self._pool[place]
                for name, place in bucket.pooled.items()
                if name in bucket.graph.constants
            }
            self._models[bucket.name] = TensorModel(self.device, bucket.graph, constants=places)
        return self._models[bucket.name]

    def close(self) -> None:
        """Release every model and the constants; a second call does nothing."""
        for model in self._models.values():
            model.close()
        self._models.clear()
        self._pool.free()

    def __enter__(self) -> TensorModels:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
