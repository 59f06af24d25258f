"""The test stand: runs a unit's dispatches on made-up data with the model's own weights.

Everything but the weights lies in one image: values, scratch, row records, tables and KV blocks.
A run restores what the dispatches write, launches them, and brings the results to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hornito.ops.base import (
    BLOCK_POSITIONS,
    ROW_BYTES,
    ROW_IGNORE_EOS,
    ROW_LIVE,
    Dispatch,
    Operand,
    ceil_div,
)
from hornito.plan.plan import RING, KvKind, Plan
from hornito.plan.recording import Pipelines, push_bytes
from hornito.plan.units import Unit
from hornito.vk.timing import WAIT_SECONDS, keep_busy

if TYPE_CHECKING:
    from hornito.vk.device import Device
    from hornito.vk.memory import Buffer
    from hornito.vk.record import Recorder

Words = npt.NDArray[np.uint32]

DATA = ("random", "edge rows", "integers", "outliers", "zeros")
"""Kinds of made-up data: the first fills every row, the second ends inside a tile."""

POISON = 0x7FC07EEF
"""A NaN, and two as fp16: what lies where results go."""

BATCH_NANOSECONDS, BATCH_RUNS = 1_000_000, 64
"""GPU time of one submission that keeps the device busy, and the most runs in it."""

_NOISE = 65521  # numbers of a block: a prime, so that rows do not repeat
_BLOCK_BYTES = 1 << 18
_HALVES = 3  # the first block of fp16


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything of a unit lies in its image: name to (offset, bytes)."""

    places: Mapping[str, tuple[int, int]]
    total: int


class Stand:
    """Memory and pipelines for running units; `free` gives them back.

    Args:
        plan: which buffers are values, and the KV kinds.
        weight_address: the device address of a weight by name.
        slots: sequences that have block tables.
        turn: called before each submission: returns when the device is free for it.
    """

    def __init__(
        self,
        device: Device,
        plan: Plan,
        pipelines: Pipelines,
        weight_address: Callable[[str], int],
        slots: int,
        turn: Callable[[], None] | None = None,
    ) -> None:
        self.device = device
        self._turn = turn
        self.slots = slots
        self.plan = plan
        self.pipelines = pipelines
        self._weight_address = weight_address
        self._buffers: dict[str, Buffer] = {}

    def free(self) -> None:
        """Give the memory back."""
        for buffer in self._buffers.values():
            buffer.free()
        self._buffers.clear()

    def _hold(self, name: str, size: int) -> Buffer:
        """A buffer of at least `size` bytes."""
        held = self._buffers.get(name)
        if held is None or held.size < size:
            if held is not None:
                held.free()
                del self._buffers[name]
            kind: Any = "host" if name == "results" else "device"
            self._buffers[name] = self.device.allocate(max(size, 1 << 20), kind, "self-test")
        return self._buffers[name]

    # -- layout and data ----------------------------------------------------------------------

    def layout(self, unit: Unit, *programs: Sequence[Dispatch]) -> Layout:
        """Places for everything but weights that these dispatches name."""
        sizes: dict[str, int] = {}
        for dispatch in (d for program in programs for d in program):
            for operand in _operands(dispatch):
                if operand.name in self.plan.weight_bytes:
                    continue
                if operand.name.startswith("kv:"):
                    sizes[operand.name] = self._kv_bytes(unit, int(operand.name[3:]))
                    continue
                end = operand.offset + operand.size
                sizes[operand.name] = max(sizes.get(operand.name, 0), end)
        places, at = {}, 0
        for name, size in sizes.items():
            places[name] = (at, size)
            at = ceil_div(at + size, 256) * 256
        return Layout(places, max(at, 256))

    def _kind_of(self, layer: int) -> tuple[int, KvKind]:
        return next((k, kind) for k, kind in enumerate(self.plan.kinds) if layer in kind.layers)

    def _block_bytes(self, layer: int) -> int:
        """Bytes of a block up to the layer that is read."""
        _, kind = self._kind_of(layer)
        per_layer = kind.block_bytes // len(kind.layers)
        return per_layer * (kind.layers.index(layer) + 1)

    def _kv_bytes(self, unit: Unit, layer: int) -> int:
        last = max(position for _, position in self._rows(unit, self._live(unit, DATA[0])))
        blocks = last // BLOCK_POSITIONS + 1
        slots = 1 if unit.kind == "chunk" else self._live(unit, DATA[0])
        return slots * blocks * self._block_bytes(layer)

    def _live(self, unit: Unit, data: str) -> int:
        """Rows that are live: all that the context has room for, or up to inside a tile."""
        most = self.slots
        if unit.kind == "chunk":
            most = self.plan.table_blocks * BLOCK_POSITIONS
        rows = min(unit.rows, most)
        return rows if data != "edge rows" else max(1, rows - rows // 4 - 1)

    def _rows(self, unit: Unit, live: int) -> list[tuple[int, int]]:
        """(slot, position) of each live row: a chunk behind some context, or steps of sequences."""
        most = self.plan.table_blocks * BLOCK_POSITIONS
        if unit.kind == "chunk":
            start = max(0, min(most - unit.rows, 2 * BLOCK_POSITIONS + 37))
            return [(0, start + r) for r in range(live)]
        deepest = 1100 if unit.rows == 1 else 150
        return [(r, max(0, min(most - 1, deepest - 3 * r))) for r in range(live)]

    def prepare(
        self, unit: Unit, layout: Layout, programs: Sequence[Sequence[Dispatch]], data: str
    ) -> None:
        """Fill the start image with one kind of data; NaNs lie where the programs put results.

        Large places are filled on the device, from a block of numbers that is repeated.
        """
        start, work = (self._hold(name, layout.total) for name in ("start", "work"))
        given = self._small(unit, layout, data, work.address)
        recorder = self.device.command_buffer("self-test data")
        growing: list[tuple[int, int, int]] = []  # offset, filled, size
        for name, (offset, size) in layout.places.items():
            if name in given:
                continue
            written = [p for p in programs if any(o.name == name for d in p for o in d.writes)]
            if written and not any(_reads(program, name) for program in programs):
                recorder.fill(start, offset, size, POISON)
                continue
            block = self._block(name, data)
            if block is None:
                recorder.fill(start, offset, size)
                continue
            first = min(size, 4 * _NOISE)
            recorder.copy(self._noise_buffer(), block * _BLOCK_BYTES, start, offset, first)
            growing.append((offset, first, size))
        while growing := [entry for entry in growing if entry[1] < entry[2]]:
            recorder.barrier()
            for offset, filled, size in growing:
                recorder.copy(start, offset, start, offset + filled, min(filled, size - filled))
            growing = [(o, min(2 * filled, size), size) for o, filled, size in growing]
        recorder.end()
        try:
            self._run(recorder)
        finally:
            recorder.free()
        self.device.upload(
            [(start, layout.places[name][0], found) for name, found in given.items()]
        )
        whole = self.device.command_buffer("self-test start")
        whole.copy(start, 0, work, 0, layout.total)
        whole.end()
        try:
            self._run(whole)
        finally:
            whole.free()

    def take_turn(self) -> None:
        """Make way for others who want the device, if there are any."""
        if self._turn is not None:
            self._turn()

    def _run(self, recorder: Recorder) -> None:
        self.take_turn()
        self.device.wait(self.device.submit([recorder]), timeout_s=WAIT_SECONDS)

    def _block(self, name: str, data: str) -> int | None:
        """Which block of numbers a place is filled with; None for zeros."""
        if name.startswith("kv:"):
            return _HALVES if self._kind_of(int(name[3:]))[1].half else 0
        if "/" not in name or data == "zeros":  # what is no value is state of the plan
            return None
        block = {"integers": 1, "outliers": 2}.get(data, 0)
        return block + (_HALVES if name in self.plan.halves else 0)

    def _noise_buffer(self) -> Buffer:
        """Blocks of normal numbers, whole ones and some large ones, then the same as fp16."""
        if "noise" not in self._buffers:
            noise = np.random.default_rng(20250117).standard_normal(_NOISE).astype(np.float32)
            outliers = noise.copy()
            outliers[7::509] *= np.float32(5e3)
            floats = [noise, np.rint(2 * noise), outliers]
            blocks: list[npt.NDArray[Any]] = [
                *floats,
                *(np.resize(block.astype(np.float16), 2 * _NOISE) for block in floats),
            ]
            buffer = self._hold("noise", len(blocks) * _BLOCK_BYTES)
            self.device.upload(
                (buffer, i * _BLOCK_BYTES, block.view(np.uint32)) for i, block in enumerate(blocks)
            )
        return self._buffers["noise"]

    def _small(self, unit: Unit, layout: Layout, data: str, address: int) -> dict[str, Words]:
        """What the host makes of the image: row records, tables, selections."""
        live = self._live(unit, data)
        picked = min(live, unit.selected)
        last = range(live - picked, live) if unit.kind == "chunk" else range(unit.selected)
        fills: dict[str, Callable[[], Any]] = {
            "rows": lambda: self._row_records(unit, live),
            "call": lambda: [live, picked, 0, 0],
            "selection": lambda: list(last),
            "next_ids": lambda: np.arange(unit.selected) % self.plan.vocabulary,
            "eos": lambda: [self.plan.vocabulary],
            "tables": lambda: self._tables(unit, layout, address),
        }
        found = {}
        for name, make in fills.items():
            if name in layout.places:
                words = np.zeros(layout.places[name][1] // 4, np.uint32)
                made = np.asarray(make(), np.uint32).reshape(-1)[: len(words)]
                words[: len(made)] = made
                found[name] = words
        return found

    def _row_records(self, unit: Unit, live: int) -> Words:
        rows = np.zeros((unit.rows, ROW_BYTES // 4), np.uint32)
        limit = self.plan.table_blocks * BLOCK_POSITIONS + 1
        for r, (slot, position) in enumerate(self._rows(unit, live)):
            token = (1 + 7 * r) % self.plan.vocabulary
            rows[r] = (token, position, slot, ROW_LIVE | ROW_IGNORE_EOS, limit, 0, RING, 0)
        return rows

    def _tables(self, unit: Unit, layout: Layout, address: int) -> Words:
        """Block tables `[slots, kinds, blocks]` that name the blocks in the image."""
        kinds, blocks = len(self.plan.kinds), self.plan.table_blocks
        _, size = layout.places["tables"]
        slots = max(1, ceil_div(size, 8 * kinds * blocks))
        table = np.zeros((slots, kinds, blocks), np.uint64)
        for name, (offset, size) in layout.places.items():
            if not name.startswith("kv:"):
                continue
            layer = int(name[3:])
            kind, _ = self._kind_of(layer)
            per_slot = size // (1 if unit.kind == "chunk" else self._live(unit, DATA[0]))
            used = per_slot // self._block_bytes(layer)
            for slot in range(min(slots, size // per_slot)):
                first = address + offset + slot * per_slot
                steps = np.arange(used, dtype=np.uint64) * np.uint64(self._block_bytes(layer))
                table[slot, kind, :used] = np.uint64(first) + steps
        return table.view(np.uint32).reshape(-1)

    # -- runs -----------------------------------------------------------------------------------

    def results(
        self, layout: Layout, dispatches: Sequence[Dispatch], compared: Collection[str], runs: int
    ) -> list[bytes]:
        """What `runs` runs wrote into the compared places, each from the start that `prepare` made.

        Raises:
            DeviceLostError: the device was lost, or did not answer in time.
            VulkanError: a pipeline could not be made.
        """
        start, work = (self._hold(name, layout.total) for name in ("start", "work"))
        size = sum(layout.places[name][1] for name in compared)
        back = self._hold("results", size)
        recorder = self._record(layout, dispatches, start, work, back, compared)
        found = []
        try:
            for _ in range(runs):
                self._run(recorder)
                found.append(_copy(back, size))
        finally:
            recorder.free()
        return found

    def _record(
        self,
        layout: Layout,
        dispatches: Sequence[Dispatch],
        start: Buffer,
        work: Buffer,
        back: Buffer,
        compared: Collection[str],
    ) -> Recorder:
        recorder = self.device.command_buffer("self-test")
        written = {o.name for d in dispatches for o in d.writes if o.name in layout.places}
        for name in sorted(written):
            offset, size = layout.places[name]
            recorder.copy(start, offset, work, offset, size)
        for dispatch in dispatches:
            recorder.barrier()
            self._launch(recorder, layout, dispatch, work.address)
        recorder.barrier()
        at = 0
        for name in compared:
            offset, size = layout.places[name]
            recorder.copy(work, offset, back, at, size)
            at += size
        recorder.end()
        return recorder

    def _launch(self, recorder: Recorder, layout: Layout, dispatch: Dispatch, address: int) -> None:
        def place(operand: Operand) -> int:
            if operand.name in self.plan.weight_bytes:
                return self._weight_address(operand.name) + operand.offset
            return address + layout.places[operand.name][0] + operand.offset

        recorder.dispatch(self.pipelines.of(dispatch), push_bytes(dispatch, place), dispatch.groups)

    def nanoseconds(
        self, unit: Unit, layout: Layout, dispatches: Sequence[Dispatch], repeats: int
    ) -> list[int]:
        """GPU time of each of `repeats` runs, with a barrier between any two dispatches.

        Every run is a submission of its own, so that none lasts longer than it must. A first run
        does not count, nor do those that keep a GPU busy until its clock is up.
        """
        self.prepare(unit, layout, [dispatches], DATA[0])
        work = self._hold("work", layout.total)
        recorder = self.device.command_buffer("timing")
        try:
            recorder.timestamp(0)
            for dispatch in dispatches:
                self._launch(recorder, layout, dispatch, work.address)
                recorder.barrier()
            recorder.timestamp(1)
            recorder.end()
            batch = [recorder] * _runs_of(BATCH_NANOSECONDS, self._timed(recorder))

            def submit() -> int:
                self.take_turn()
                return self.device.submit(batch)

            keep_busy(self.device, submit)
            found = [self._timed(recorder) for _ in range(repeats)]
        finally:
            recorder.free()
        return found

    def _timed(self, recorder: Recorder) -> int:
        """Nanoseconds between the two timestamps of a run."""
        self._run(recorder)
        begin, end = self.device.read_timestamps(recorder)
        return end - begin


def _runs_of(nanoseconds: int, run: int) -> int:
    """How many runs last so long, from 1 to `BATCH_RUNS`."""
    return min(BATCH_RUNS, max(1, nanoseconds // max(1, run)))


def _copy(buffer: Buffer, size: int) -> bytes:
    """What the host sees of a buffer; the view itself must not outlive this call."""
    if buffer.view is None:
        raise ValueError("the results buffer is not visible to the host")
    return bytes(buffer.view[:size])


def _operands(dispatch: Dispatch) -> list[Operand]:
    given = [arg for arg in dispatch.args if isinstance(arg, Operand)]
    return [*given, *dispatch.reads, *dispatch.writes]


def _reads(dispatches: Sequence[Dispatch], name: str) -> bool:
    """Whether some dispatch reads a place before any has written it."""
    for dispatch in dispatches:
        if any(operand.name == name for operand in dispatch.reads):
            return True
        if any(operand.name == name for operand in dispatch.writes):
            return False
    return False
