"""The engine: one model on one device. It owns every buffer, recording and slot.

Work is submitted as runs of recordings that were made at load. What changes from call to call (row
records, block tables) goes to the device in a small recording of the same submission, the prelude.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hornito.errors import DeviceLostError, DeviceMemoryError, SessionError
from hornito.graph.graph import Graph
from hornito.graph.shapes import S, bind
from hornito.ops.base import Operand, ceil_div
from hornito.plan.attempts import Attempts
from hornito.plan.plan import Plan, PlanOptions, build_plan
from hornito.plan.recording import SEGMENT_DISPATCHES, Pipelines, record
from hornito.plan.records import records_path
from hornito.plan.selftest import without_waiting
from hornito.plan.stand import POISON
from hornito.progress import NullProgress, Progress
from hornito.runtime.emitted import Emitted
from hornito.runtime.guard import uninterrupted
from hornito.runtime.identity import kv_identity
from hornito.runtime.kv_cache import BlockCopy, BlockPool, BlockTables
from hornito.runtime.memory import (
    check_memory,
    kv_pool_sizes,
    memory_plan,
    readback_items,
    state_items,
)
from hornito.runtime.pacing import BOUND_MS, Pacer, usual_bound
from hornito.runtime.settle import KernelPolicy, first_plan, settle
from hornito.vk import api
from hornito.vk.device import open_device
from hornito.vk.memory import Arena

if TYPE_CHECKING:
    from hornito.package.reader import Package
    from hornito.runtime.session import Session
    from hornito.runtime.snapshot import Snapshot
    from hornito.vk.device import Device
    from hornito.vk.record import Recorder

log = logging.getLogger("hornito")

UPDATE_BYTES = 65536
DEFAULT_POLICY = KernelPolicy()


@dataclass(slots=True)
class Counters:
    """What an engine has done since it was made."""

    evaluated_tokens: int = 0
    copied_bytes: int = 0


class Engine:
    """A planned, recorded and loaded model.

    Args:
        device: an open device; the caller closes it after the engine.
        package: the weights.
        graph: the package's graph.
        options: context, KV type, slots.
        eos_ids: ids that end an answer.
        progress: told about pipelines and weights.
        precision: of activations, as the caller chose it.
        policy: how kernels are chosen and proved.
        submission_ms: most milliseconds of GPU time in one submission; by default 200, and on
            discrete GPUs no bound (None).
        recover: after a loss, open the device again and evaluate the sessions' tokens again.

    Attributes:
        generation: counts how often the device was opened again.
        trust: what the self-test says of the kernels.
        emitted: what steps said of their rows.
        context, model_context: positions of a session, and those that the model was made for.
        identity: what must be equal for a saved KV cache to be usable here.

    Raises:
        DeviceMemoryError: the plan does not fit; nothing stays allocated.
    """

    def __init__(
        self,
        device: Device,
        package: Package,
        graph: Graph,
        options: PlanOptions,
        eos_ids: Sequence[int],
        progress: Progress | None = None,
        *,
        precision: str = "normal",
        policy: KernelPolicy = DEFAULT_POLICY,
        submission_ms: float | None = None,
        recover: bool = False,
    ) -> None:
        self.device = device
        self.graph = graph
        self.eos_ids = tuple(eos_ids)
        self.options, self.plan = first_plan(
            graph, device, replace(options, eos_count=len(self.eos_ids)), policy
        )
        self.memory = memory_plan(self.plan, self.options)
        check_memory(device, self.memory, self.options)
        self.identity = kv_identity(package, graph, self.plan, options, precision)
        self.context = options.context
        self.model_context: int = package.manifest.facts["context_length"]
        self.vocabulary = self.plan.vocabulary
        self.recover = recover
        self.generation = 0
        self._submission_ms = submission_ms or usual_bound(device.info.kind)
        self._forget()
        self.lock = threading.RLock()
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self.snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self.counters = Counters()
        self._closed = False
        self._package = package
        self._policy = policy
        try:
            self._build(progress or NullProgress())
        except BaseException:
            self.close()
            raise
        self._free_slots = list(range(options.slots - 1, -1, -1))
        self.emitted = Emitted(self._host_words, self._kind_rows())

    # -- set-up -----------------------------------------------------------------------------

    def _forget(self) -> None:
        """Nothing is on the device."""
        self._built = False
        self._arenas: list[Arena] = []
        self._recordings: dict[tuple[str, int, str], list[Recorder]] = {}
        self._preludes: list[Recorder] = []
        self._copies: dict[tuple[str, int], Recorder] = {}
        self.pools: list[BlockPool] = []
        self._queued: list[BlockCopy] = []
        self._release_batch: Callable[[], None] | None = None
        self.last_ticket = 0

    def _build(self, progress: Progress) -> None:
        """Everything that lives on the device, from nothing."""
        self.pacer = Pacer(self.device, self._submission_ms)
        self._allocate()
        self.pipelines = Pipelines(self.device, Attempts(records_path(self.device.info)))
        self._upload_weights(self._package, progress)
        self._write_constants()
        self.trust = settle(self, progress, self._policy)
        self._built = True

    def revive(self, *, wanted: bool = False) -> None:
        """After a loss of the device, open it again and put all but the KV cache on it.

        Prompts are evaluated in chunks of half the rows from then on, in submissions of bounded
        time; chunks halve once per loss, however many tries it takes. On a device that is well this
        does nothing.

        Args:
            wanted: also on an engine that does not recover by itself.

        Raises:
            DeviceLostError: nobody wants it, or the device was lost again.
            NoDeviceError: the device is gone.
        """
        if self._closed or (self._built and not self.device.lost):
            return
        if not self.recover and not wanted:
            raise self.lost_error()
        log.warning("%s was lost; it is opened again", self.device.info.name)
        old = self.device
        if self._built:
            self.options = replace(self.options, chunk_rows=_halved(self.options.chunk_rows))
        self._forget()
        self.generation += 1
        old.close()
        self.device = open_device(
            old.info.uuid, validate=old.validating, disable_features=old.disabled
        )
        self._submission_ms = self._submission_ms or BOUND_MS
        options = replace(self.options, choices=without_waiting(self.options.choices))
        self.options, self.plan = first_plan(self.graph, self.device, options, self._policy)
        self.memory = memory_plan(self.plan, self.options)
        self._build(NullProgress())

    def lost_error(self, error: DeviceLostError | None = None) -> DeviceLostError:
        """What to do after a loss, for the user."""
        text = str(error) if error else f"device {self.device.info.name} was lost"
        return DeviceLostError(
            f"{text.partition(';')[0]}, and with it the KV cache of every session on it; load the "
            "model again. With recover=True (--recover) the device is opened again and the "
            "sessions' tokens are evaluated again by themselves. Where it happens often, bound the "
            "work of one submission: submission_ms=50 (--submission-ms 50)",
            code=api.VK_ERROR_DEVICE_LOST,
        )

    @property
    def pipeline_count(self) -> int:
        """How many pipelines the plan uses."""
        return len(self.plan.distinct())

    def weight_address(self, name: str) -> int:
        """The device address of a weight."""
        return self._weights.address(name)

    def _kind_rows(self) -> dict[str, int]:
        rows: dict[str, int] = {}
        for kind, count in self.plan.buckets:
            rows[kind] = max(rows.get(kind, 0), count)
        return rows

    def _allocate(self) -> None:
        device, plan = self.device, self.plan
        self._weights = self._arena("weights", list(plan.weight_bytes.items()))
        self._activations = self._arena("activations", [("arena", max(4, plan.arena.total))])
        for index, (kind, count) in enumerate(zip(plan.kinds, self._pool_sizes(), strict=True)):
            self.pools.append(BlockPool(device, kind, count, f"kv{index}"))
        self.tables = BlockTables(self.options.slots, len(plan.kinds), plan.table_blocks)
        self._state = self._arena("state", state_items(plan, self.options))
        self._readback = self._arena("readback", readback_items(plan), kind="host")

    def _pool_sizes(self) -> list[int]:
        return kv_pool_sizes(self.plan, self.options)

    def _arena(self, label: str, items: list[tuple[str, int]], kind: str = "device") -> Arena:
        arena = Arena(self.device, label, items, kind=kind)  # type: ignore[arg-type]
        self._arenas.append(arena)
        return arena

    def _upload_weights(self, package: Package, progress: Progress) -> None:
        progress.start("uploading weights", sum(self.plan.weight_bytes.values()))
        pairs = ((*self._weights[name], package.tensor(name)) for name in self.plan.weight_bytes)
        self.device.upload(pairs, progress.advance)
        progress.finish()

    def _write_constants(self) -> None:
        # Fresh memory may hold the records of an engine that is gone, with valid numbers.
        for arena in (self._state, self._readback):
            self.device.upload((*arena[name], bytes(arena.size(name))) for name in arena)
        identity = np.arange(self._kind_rows()["batch"], dtype=np.uint32)
        eos = np.asarray(self.eos_ids or (0,), np.uint32)
        self.device.upload(
            [
                (*self._state["batch.selection"], identity.tobytes()),
                (*self._state["eos"], eos.tobytes()),
            ]
        )
        if self.options.guard:
            self.poison_activations()

    # -- addresses and recordings -----------------------------------------------------------

    def address(self, kind: str, operand: Operand) -> int:
        """The device address of an operand in the buckets of a kind."""
        name = operand.name
        if name in self.plan.arena.offsets:
            base = self._activations.address("arena") + self.plan.arena.offsets[name]
        elif name in self.plan.weight_bytes:
            base = self._weights.address(name)
        elif name in ("tables", "eos", "counts", "counters"):
            base = self._state.address(name)
        elif f"{kind}.{name}" in self._state:
            base = self._state.address(f"{kind}.{name}")
        else:
            base = self._readback.address(f"{kind}.{name}")
        return base + operand.offset

    def recording(self, kind: str, rows: int, part: str) -> list[Recorder]:
        """The recorded body (`part="body"`) or tail of a bucket, recorded when first used."""
        key = (kind, rows, part)
        made = self._recordings.get(key)
        size = self.pacer.segment(kind, SEGMENT_DISPATCHES)
        if made is not None and (factor := self.pacer.too_long(made)):
            size = max(1, int(max(r.dispatch_count for r in made) / factor))
            for recorder in made:
                recorder.free()
            del self._recordings[key]
        if key not in self._recordings:
            bucket = self.plan.buckets[kind, rows]
            program = bucket.body if part == "body" else bucket.tails[part]
            self._recordings[key] = record(
                self.device,
                self.pipelines,
                program,
                lambda operand: self.address(kind, operand),
                f"{kind}{rows}.{part}",
                size,
            )
        return self._recordings[key]

    def logits_name(self, kind: str, rows: int) -> str:
        """The activation that a bucket's `logits` tail leaves."""
        return f"{kind}{rows}/{self.graph.outputs[0]}@logits"

    def logits_copy(self, kind: str, rows: int) -> Recorder:
        """The recording that brings a bucket's logits to the host's buffer."""
        if (kind, rows) not in self._copies:
            bucket = self.plan.buckets[kind, rows]
            name = self.logits_name(kind, rows)
            source, offset = self._activations["arena"]
            target, at = self._readback["logits"]
            recorder = self.device.command_buffer(f"{kind}{rows}.logits_copy")
            size = bucket.selected["logits"] * self.vocabulary * 4
            recorder.copy(source, offset + self.plan.arena.offsets[name], target, at, size)
            recorder.end()
            self._copies[kind, rows] = recorder
        return self._copies[kind, rows]

    # -- submissions ------------------------------------------------------------------------

    def queue_copies(self, copies: Iterable[BlockCopy]) -> None:
        """Copy KV blocks at the start of the next submission."""
        self._queued += copies

    def submit(
        self, updates: Sequence[tuple[str, int, bytes]], recordings: Sequence[Recorder]
    ) -> int:
        """Bring the state up to date and run the recordings; returns a ticket.

        Args:
            updates: (state item, byte offset, bytes).
        """
        self._check_open()
        with self.lock, uninterrupted():
            updates = [*updates, *(("tables", at, data) for at, data in self.tables.take_updates())]
            runs = list(recordings)
            try:
                if updates or self._queued:
                    runs.insert(0, self._prelude(updates))
                for group in self.pacer.cut(runs):
                    self.last_ticket = self.device.submit(self.pacer.timed(group))
            except BaseException:
                # Nothing has reached the device: the next submission brings all of it.
                self.tables.forget_device()
                raise
            for copy in self._queued:
                self.counters.copied_bytes += copy.pool.kind.block_bytes
            self._queued.clear()
        return self.last_ticket

    def flush(self) -> None:
        """Submit the copies that wait, before the host reads or writes blocks itself."""
        if self._queued:
            self.submit([], [])

    def _prelude(self, updates: Sequence[tuple[str, int, bytes]]) -> Recorder:
        done = self.device.completed()
        for recorder in self._preludes:
            if recorder.last_ticket <= done:
                recorder.reset()
                break
        else:
            recorder = self.device.command_buffer("prelude")
            self._preludes.append(recorder)
        for name, at, data in updates:
            buffer, base = self._state[name]
            for start in range(0, len(data), UPDATE_BYTES):
                piece = data[start : start + UPDATE_BYTES]
                recorder.update(buffer, base + at + start, piece)
        for copy in self._queued:
            # A block that one copy frees may be the target of the next.
            recorder.barrier()
            size = copy.pool.kind.block_bytes
            recorder.copy(*copy.pool.place(copy.source), *copy.pool.place(copy.target), size)
        recorder.end()
        return recorder

    def wait(self, ticket: int) -> None:
        """Block until a submission has completed."""
        self.device.wait(ticket)

    def host_floats(self, name: str, count: int) -> npt.NDArray[np.float32]:
        """A copy of the first `count` floats of a readback item."""
        return self._host_words(name).view(np.float32)[:count].copy()

    def value(self, kind: str, rows: int, name: str, live: int) -> npt.NDArray[np.float32]:
        """The first `live` rows `[live, width]` of a value, as the last call of a bucket left it.

        Values of the selected rows are those of the `logits` tail.

        Raises:
            SessionError: the plan reuses memory (it was made without `keep_values`).
        """
        if not self.options.keep_values:
            raise SessionError("values can be read when the plan keeps them (keep_values)")
        tail = "@logits" if self.graph.values[name].shape[0] == S else ""
        width = bind(self.graph.values[name].shape[-1], {})
        buffer, base = self._activations["arena"]
        place = f"{kind}{rows}/{name}{tail}"
        dtype = np.dtype(np.float16 if place in self.plan.halves else np.float32)
        size = ceil_div(live * width * dtype.itemsize, 4) * 4
        data = self.device.download(buffer, base + self.plan.arena.offsets[place], size)
        found = np.frombuffer(data, dtype)[: live * width].astype(np.float32)
        return found.reshape(live, width)

    def _host_words(self, name: str) -> npt.NDArray[np.uint32]:
        buffer, offset = self._readback[name]
        view = buffer.view
        if view is None:
            raise SessionError(f"readback item {name} is not visible to the host")
        size = self._readback.size(name)
        return np.frombuffer(view[offset : offset + size], np.uint32)

    def claim_batch(self, release: Callable[[], None] | None = None) -> None:
        """Become the one who writes the row records of `batch` plans.

        Who had them before is asked to finish what it has in flight. `release` is called when
        someone else comes; None for a call that is over at once.
        """
        before, self._release_batch = self._release_batch, release
        if before is not None:
            before()

    def leave_batch(self) -> None:
        """Give up what `claim_batch` gave."""
        self._release_batch = None

    def release_prefill(self) -> int:
        """Free the buckets and scratch of prefill, and return the bytes that this gave back.

        Later prompts are evaluated one token at a time. The KV blocks, sessions and snapshots stay.
        """
        self._check_open()
        self.wait(self.last_ticket)
        self.claim_batch()
        before = self.plan.arena.total
        self.replan(replace(self.options, chunk_rows=()))
        return before - self.plan.arena.total

    def replan(self, options: PlanOptions) -> None:
        """Make another plan of the same graph, and take it."""
        self.take_plan(options, build_plan(self.graph, self.device.caps, options))

    def take_plan(self, options: PlanOptions, plan: Plan) -> None:
        """Take another plan of the same graph; KV blocks, sessions and snapshots stay.

        Its pipelines are made when they are first needed. Nothing may be in flight.

        Raises:
            DeviceMemoryError: there is no room for its activations; the plan is the one before.
        """
        for recorder in self._made_recorders():
            recorder.free()
        self._recordings.clear()
        self._copies.clear()
        size, held = max(4, plan.arena.total), self._activations.size("arena")
        if size != held:
            self._arenas.remove(self._activations)
            self._activations.free()
            try:
                self._activations = self._arena("activations", [("arena", size)])
            except DeviceMemoryError:
                self._activations = self._arena("activations", [("arena", held)])
                raise
        self.options, self.plan = options, plan
        self.memory = replace(self.memory, activations=self.plan.arena.total)
        if options.guard:
            self.poison_activations()

    def _made_recorders(self) -> list[Recorder]:
        return [r for runs in self._recordings.values() for r in runs] + list(self._copies.values())

    # -- slots ------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        """How many sessions may still be opened."""
        return len(self._free_slots)

    def take_slot(self) -> int:
        """A free slot.

        Raises:
            SessionError: all are in use.
        """
        self._check_open()
        if not self._free_slots:
            gc.collect()  # sessions of streams that were left in reference cycles
        if not self._free_slots:
            raise SessionError(
                f"all {self.options.slots} slots are in use; close a session or load with more "
                f"(slots={self.options.slots + 1})"
            )
        return self._free_slots.pop()

    def return_slot(self, slot: int) -> None:
        """Make a slot free again."""
        self._free_slots.append(slot)

    # -- end --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("this model is closed; load it again")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Free every buffer and recording; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self.device.foreign:
            return
        for recorder in [*self._made_recorders(), *self._preludes]:
            recorder.free()
        for pool in self.pools:
            pool.free()
        for arena in self._arenas:
            arena.free()

    def poison_activations(self) -> None:
        """Fill the activations with NaN (tests): no call may depend on what an earlier one left."""
        buffer, offset = self._activations["arena"]
        poison = np.full(self.plan.arena.total // 4, POISON, np.uint32)
        self.device.upload([(buffer, offset, poison)])

    def check_guards(self) -> list[str]:
        """Activations whose guard band was written (tests; needs `guard` in the options)."""
        buffer, base = self._activations["arena"]
        layout = self.plan.arena
        data = np.frombuffer(self.device.download(buffer, base, layout.total), np.uint32)
        hurt = []
        for name, offset in layout.offsets.items():
            start = (offset + layout.sizes[name] + 3) // 4
            if np.any(data[start : start + layout.guard // 4] != POISON):
                hurt.append(name)
        return hurt


def _halved(chunk_rows: Sequence[int]) -> tuple[int, ...]:
    """The buckets of chunks with half the rows in the largest."""
    *smaller, largest = sorted(chunk_rows) or (0,)
    return tuple(sorted({*smaller, largest // 2})) if largest > 1 else tuple(chunk_rows)
