"""Evaluation: how a sequence's rows get to the device and its results back."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from hornito.errors import DeviceLostError, SessionError, UsageError
from hornito.runtime.emitted import Record, not_finite
from hornito.runtime.engine import Engine
from hornito.runtime.guard import uninterrupted
from hornito.runtime.kv_cache import SequenceBlocks
from hornito.runtime.rows import chunk_bytes, words
from hornito.runtime.snapshot import EMBEDDED

if TYPE_CHECKING:
    from hornito.runtime.sampler import Sampler
    from hornito.vk.record import Recorder

FloatArray = npt.NDArray[np.float32]

# Chunks of a prompt that may be submitted and not yet done. An interrupt is noticed between chunks,
# and closing waits for all of them, so slow devices get no more than they need to stay busy.
_CHUNKS_AHEAD = {"software": 0, "integrated": 1}
_CHUNKS_AHEAD_DISCRETE = 3


LOST = -1
"""The generation of a session whose keys and values are nowhere."""

S = TypeVar("S", bound="Evaluation")
P = ParamSpec("P")
R = TypeVar("R")


def recovering(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method of a session that has the engine to itself, and survives the loss of the device.

    Where the engine recovers, the session's tokens are evaluated again, on the device opened anew,
    and then the call is made again, once; elsewhere the error says what to do.
    """

    @functools.wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.engine.lock:
            self.check_open()
            self.revive()
            ids, count, vectors = self.ids, len(self.ids), self.vectors
            kept = (self.pending, self.record, self.sampler, self.fresh)
            try:
                return method(self, *args, **kwargs)
            except DeviceLostError as error:
                if not self.engine.recover:
                    raise self.engine.lost_error(error) from error
            self.ids = ids[:count]
            self.vectors = {at: row for at, row in vectors.items() if at < count}
            self.pending, self.record, self.sampler, self.fresh = kept
            self.revive()
            return method(self, *args, **kwargs)

    return run


class Evaluation:
    """The part of a session that talks to the engine; see `Session` for the attributes."""

    engine: Engine
    slot: int
    ids: list[int]
    pending: int | None
    record: Record | None
    records: list[Record]
    sampler: Sampler | None
    fresh: bool
    edits: int
    vectors: dict[int, FloatArray]
    blocks: SequenceBlocks
    generation: int
    _closed: bool

    def check_open(self) -> None:
        """Raise SessionError when the session was closed."""
        if self._closed:
            raise SessionError("this session is closed")

    @property
    def position(self) -> int:
        """Tokens evaluated so far, which is the position of the next one."""
        return len(self.ids)

    def _new_blocks(self) -> None:
        """No blocks, on the device that the engine has now."""
        engine = self.engine
        self.generation = engine.generation
        self.blocks = SequenceBlocks(
            engine.pools, engine.tables, self.slot, engine.options.rewind_budget
        )

    def revive(self) -> None:
        """After a loss of the device, evaluate the session's tokens again; else nothing.

        Raises:
            DeviceLostError: the engine does not recover, or the device was lost again.
        """
        engine = self.engine
        engine.revive()
        if self.generation == engine.generation:
            return
        ids, kept = self.ids, (self.pending, self.record, self.fresh, self.edits)
        self._new_blocks()
        self.ids = []
        try:
            for start, rows, live in self._schedule(len(ids), None):
                self._evaluate(ids[start : start + live], rows, "none")
            engine.wait(engine.last_ticket)
        except BaseException:
            self.generation = LOST
            raise
        finally:
            self.ids = ids
            self.pending, self.record, self.fresh, self.edits = kept

    def _run_before_last(
        self, ids: list[int], chunk: int | None, tell: Callable[[int], object]
    ) -> tuple[int, int, int]:
        """Evaluate every chunk but the last, which is returned as `_schedule` gives it."""
        engine = self.engine
        ahead = _CHUNKS_AHEAD.get(engine.device.info.kind, _CHUNKS_AHEAD_DISCRETE)
        chunks = list(self._schedule(len(ids), chunk))
        flight: deque[tuple[int, int]] = deque()
        for start, rows, live in chunks[:-1]:
            self._evaluate(ids[start : start + live], rows, "none")
            flight.append((engine.last_ticket, live))
            while len(flight) > ahead:
                ticket, count = flight.popleft()
                engine.wait(ticket)
                tell(count)
        for _, count in flight:  # done before the last chunk is
            tell(count)
        return chunks[-1]

    def _forget_vectors(self, position: int) -> None:
        """Drop the embeddings at and behind a position."""
        self.vectors = {at: row for at, row in self.vectors.items() if at < position}

    def _schedule(self, count: int, chunk: int | None) -> Iterator[tuple[int, int, int]]:
        """(start, bucket rows, live rows) of each chunk, cut at multiples of the largest bucket."""
        buckets = sorted({1, *(r for kind, r in self.engine.plan.buckets if kind == "chunk")})
        if chunk is not None and chunk not in buckets:
            raise UsageError(f"chunk must be one of {buckets}, not {chunk}")
        most = chunk or buckets[-1]
        start = 0
        position = self.position
        while start < count:
            live = min(count - start, most - (position + start) % most)
            rows = next(r for r in buckets if r >= live)
            yield start, rows, live
            start += live

    def _evaluate(
        self,
        ids: Sequence[int],
        rows: int,
        tail: str,
        updates: Sequence[tuple[str, int, bytes]] = (),
    ) -> int:
        """Run one call over `ids` (at most `rows`) and wait for it.

        Returns:
            the selected row of the tail that belongs to the last id.
        """
        engine = self.engine
        kind = "batch" if rows == 1 else "chunk"
        live = len(ids)
        self.reserve(self.position + live)
        if kind == "batch":
            engine.claim_batch()
        every = tail == "logprob" or kind == "batch"
        picked = range(live) if every else [live - 1]
        records = chunk_bytes(
            ids,
            rows,
            position=self.position,
            slot=self.slot,
            limit=engine.context + 1,
            emitted={r: engine.emitted.next_number(kind, i) for i, r in enumerate(picked)},
        )
        changes = [
            *updates,
            (f"{kind}.rows", 0, records),
            (f"{kind}.call", 0, words(live, len(picked), 0, 0)),
        ]
        changes += self._embedded_rows(kind, ids)
        if kind == "chunk":
            changes.append((f"{kind}.selection", 0, words(*picked)))
        runs: list[Recorder] = list(engine.recording(kind, rows, "body"))
        if tail != "none":
            runs += engine.recording(kind, rows, tail)
        if tail == "logits":
            runs.append(engine.logits_copy(kind, rows))
        with uninterrupted():
            ticket = engine.submit(changes, runs)
            self.ids += ids
            self.pending = None
            self.fresh = True
            self.edits += 1
            engine.counters.evaluated_tokens += live
        if tail == "none":
            return 0
        try:
            engine.wait(ticket)
        except BaseException:
            # Their records are never read: later calls must not take them for their own.
            engine.emitted.skip(kind, len(picked), 1)
            raise
        if tail in ("argmax", "logprob"):
            self._collect(kind, len(picked))
        return len(picked) - 1

    def _embedded_rows(self, kind: str, ids: Sequence[int]) -> list[tuple[str, int, bytes]]:
        """The updates that give the embeddings among `ids` to the device."""
        row_size = self.engine.plan.width * 4
        return [
            (f"{kind}.embedded", r * row_size, self.vectors[self.position + r].tobytes())
            for r, token in enumerate(ids)
            if token == EMBEDDED
        ]

    def _tail(
        self,
        kind: str,
        rows: int,
        tail: str,
        live: int,
        picked: Sequence[int],
        *,
        copy: bool = False,
        updates: Sequence[tuple[str, int, bytes]] = (),
    ) -> None:
        """Run a tail over rows of the call before, whose body is still in the activations.

        With `copy`, logits are brought to the host's buffer.
        """
        engine = self.engine
        changes = [*updates, (f"{kind}.call", 0, words(live, len(picked), 0, 0))]
        if kind == "chunk":
            changes.append((f"{kind}.selection", 0, words(*picked)))
        runs = list(engine.recording(kind, rows, tail))
        if copy:
            runs.append(engine.logits_copy(kind, rows))
        ticket = engine.submit(changes, runs)
        try:
            engine.wait(ticket)
        except BaseException:
            # Their records are never read: later calls must not take them for their own.
            if tail in ("argmax", "sample"):
                engine.emitted.skip(kind, len(picked), 1)
            raise

    def _collect(self, kind: str, picked: int, tops: Sequence[int] = ()) -> None:
        """Read the records of a call; the last one's token is the pending one."""
        records = self.engine.emitted.take(kind, picked, 1, tops)
        for row, found in enumerate(records):
            if (error := not_finite(found, row)) is not None:
                raise error
        if not all(records):
            raise SessionError(f"the device returned no record for row {records.index([])}")
        self.records = [found for (found,) in records]
        self.record = self.records[-1]
        self.pending = self.record.token

    def reserve(self, end: int) -> None:
        """Own alone the blocks of every position from the current one up to `end`.

        Raises:
            DeviceMemoryError: the pool is exhausted.
        """
        engine = self.engine
        end = min(end, engine.context)
        with uninterrupted():
            copies = self.blocks.prepare(self.position, end, engine.last_ticket)
            engine.queue_copies(copies)
