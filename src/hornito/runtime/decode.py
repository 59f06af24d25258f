"""Decoding: several steps a submission, for one session or a batch of them.

The device feeds itself: a step's tail writes the next token into the row record that the next step
reads. The host submits one run of steps ahead, reads the records of the run before, and stops.

A session whose sampler has a constraint needs the host once a token: its run makes one step at a
time. The step's mask is found while the device evaluates the row, and uploaded before the tail;
tokens that can only come next are evaluated in one call, together with the pending one.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence

from hornito.errors import DeviceLostError, HornitoError, SessionError, UsageError
from hornito.ops.base import ROW_IGNORE_EOS, ROW_LIVE
from hornito.plan.plan import RING
from hornito.runtime.emitted import Record, not_finite
from hornito.runtime.engine import Engine
from hornito.runtime.guard import uninterrupted
from hornito.runtime.rows import RowUpdate, row_bytes, words
from hornito.runtime.sampler import Sampler, SamplingParams, mask_update, sampling_updates
from hornito.runtime.session import Session

Steps = list[list[int]]
Records = list[list[Record]]

MOST_STEPS = RING // 2
"""Of one submission: another of as many is on its way meanwhile."""


def decode(
    sessions: Sequence[Session],
    counts: Sequence[int],
    *,
    ignore_eos: bool = False,
    steps: int = 8,
    samplers: Sequence[Sampler | None] = (),
) -> Iterator[Steps]:
    """Continuation of sessions that share an engine, as tokens; see `decode_records`."""
    runs = decode_records(sessions, counts, ignore_eos=ignore_eos, steps=steps, samplers=samplers)
    try:
        for records in runs:
            yield [[record.token for record in row] for row in records]
    finally:
        runs.close()


def decode_records(
    sessions: Sequence[Session],
    counts: Sequence[int],
    *,
    ignore_eos: bool = False,
    steps: int = 8,
    samplers: Sequence[Sampler | None] = (),
) -> Generator[Records, None, None]:
    """Continuation of sessions that share an engine.

    Args:
        sessions: each with a pending token, which is evaluated first.
        counts: new tokens wanted of each; fewer come at an end token or the context's end.
        ignore_eos: go on past end tokens.
        steps: steps of one submission.
        samplers: how each session's tokens are chosen; None for the most likely ones. Sessions of
            one run may differ in this.

    Yields:
        per submission, the new tokens of each session, with their log-probabilities. Tokens that
        have been yielded are in the session: all but the newest evaluated, the newest pending.

    Raises:
        SessionError: a session has no pending token, or they are of different engines.
        UsageError: a count, the steps or a sampler does not fit.
    """
    run = DecodeRun(
        sessions, counts, ignore_eos=[ignore_eos] * len(sessions), steps=steps, samplers=samplers
    )
    try:
        yield from _steps(run)
    finally:
        run.stop()


def _steps(run: DecodeRun) -> Iterator[Records]:
    """All of a run, with one submission ahead of the one that is read."""
    while True:
        with run.engine.lock:
            try:
                while run.ahead < 2 and not run.arrived and run.left > 0:
                    run.submit()
                records = run.receive()
            except DeviceLostError as lost:
                run.recover(lost)
                continue
            if (error := next(filter(None, run.errors), None)) is not None:
                raise error
        if records is None:
            return
        if any(records):
            yield records


class DecodeRun:
    """Steps of a fixed set of sessions, for callers that decide when each submission is made.

    Attributes:
        errors: of each session, why it can't go on; None while all is well. The others do.
        submitted: of each session, the positions that it will have when all has arrived.
        arrived: what was read from the device before it was asked for.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        counts: Sequence[int],
        *,
        ignore_eos: Sequence[bool],
        steps: int,
        samplers: Sequence[Sampler | None] = (),
    ) -> None:
        """Begin a run; nothing is submitted.

        Args:
            sessions, counts, samplers: as for `decode_records`.
            ignore_eos: of each session, whether it goes on past end tokens.
            steps: most steps of one submission.
        """
        self.engine = _one_engine(sessions)
        if not len(counts) == len(ignore_eos) == len(sessions):
            raise UsageError(f"{len(counts)} counts for {len(sessions)} sessions")
        if not 1 <= steps <= MOST_STEPS:
            raise UsageError(f"steps must be 1 to {MOST_STEPS}, not {steps}")
        self.sessions = list(sessions)
        self.rows = next(
            (r for k, r in self.engine.plan.buckets if k == "batch" and r >= len(sessions)), 0
        )
        if not self.rows:
            raise UsageError(f"{len(sessions)} sessions exceed the largest batch bucket")
        self.samplers = _samplers(samplers, len(sessions), self.engine.vocabulary)
        self.sampled = any(not sampler.plain for sampler in self.samplers)
        self.constrained = any(sampler.constraint is not None for sampler in self.samplers)
        self.per_run = 1 if self.constrained else steps
        self.flags = [ROW_LIVE | (ROW_IGNORE_EOS if past else 0) for past in ignore_eos]
        ends = frozenset(self.engine.eos_ids)
        self.ends = [frozenset() if past else ends for past in ignore_eos]
        self.errors: list[HornitoError | None] = [None] * len(sessions)
        context = self.engine.context
        # Positions that may be evaluated: one for each new token, within the context.
        self.limits = [min(context, s.position + n) for s, n in zip(sessions, counts, strict=True)]
        self.submitted = [s.position for s in sessions]
        self.position = list(self.submitted)  # of each session, as this run left it
        self.edits = [s.edits for s in sessions]
        self.over = [limit <= s.position for s, limit in zip(sessions, self.limits, strict=True)]
        self.owns_rows = False
        self._recovered: list[int] | None = None  # the positions at the last loss
        self.in_flight: list[tuple[int, int]] = []  # (ticket, steps)
        self.arrived: list[Records] = []  # read from the device, not yielded yet

    @property
    def ahead(self) -> int:
        """Submissions whose records have not been read from the device."""
        return len(self.in_flight)

    @property
    def left(self) -> int:
        """Steps that can be submitted now, for the session that wants most.

        With a constraint that is one, once everything before has been received.
        """
        rows = zip(self.submitted, self.limits, self.over, strict=True)
        most = max(0 if over else limit - done for done, limit, over in rows)
        if self.constrained:
            return 0 if self.in_flight or self.arrived else min(most, 1)
        return most

    def next_end(self, index: int, steps: int | None = None) -> int:
        """The position up to which the next submission writes keys of a session."""
        if self.over[index]:
            return self.sessions[index].position
        steps = 1 if self.constrained else steps or self.per_run
        return min(self.submitted[index] + steps, self.limits[index])

    def submit(self, steps: int | None = None) -> None:
        """Make a submission of up to `steps` steps (by default the run's).

        Raises:
            DeviceMemoryError: a session's KV blocks can't be had; nothing was submitted.
            SessionError: a session was closed, or used by someone else.
        """
        with self.engine.lock:
            self._submit(min(steps or self.per_run, self.left))

    def receive(self) -> Records | None:
        """The records of the oldest submission, which are in the sessions then; None without one.

        A session that can't go on has its reason in `errors`, and its records end before it.
        """
        with self.engine.lock:
            if not self.arrived:
                if not self.in_flight:
                    return None
                self._receive()
            with uninterrupted():
                records = self.arrived.pop(0)
                self._accept(records)
            if self.constrained:
                for i in range(len(self.sessions)):
                    self._feed_forced(i, records[i])
            return records

    def recover(self, error: DeviceLostError) -> None:
        """After a loss, evaluate the sessions again where the engine recovers; the run goes on.

        Raises:
            DeviceLostError: the engine does not recover, or nothing was gained since the last loss.
        """
        if not self.engine.recover:
            raise self.engine.lost_error(error) from error
        self.in_flight.clear()
        self.owns_rows = False
        if self.arrived:
            return  # the sessions take them over first
        if self._recovered == self.position:
            raise error
        self._recovered = list(self.position)
        for session in self.sessions:
            session.revive()
        self.submitted = [session.position for session in self.sessions]

    def _submit(self, count: int) -> None:
        engine = self.engine
        self._check_sessions()
        updates: list[tuple[str, int, bytes]] = []
        if not self.owns_rows:
            if self.arrived:
                raise SessionError("receive what has arrived before the next submission")
            engine.claim_batch(self._release)
            records = [self._row(i) for i in range(len(self.sessions))]
            n = len(records)
            updates = [
                ("batch.rows", 0, row_bytes(records, self.rows)),
                ("batch.call", 0, words(n, n, 0, 0)),
            ]
            if self.sampled:
                updates += self._sampling()
        body = engine.recording("batch", self.rows, "body")
        tail = engine.recording("batch", self.rows, "sample" if self.sampled else "argmax")
        with uninterrupted():
            ends = [self.next_end(i, count) for i in range(len(self.sessions))]
            for i, session in enumerate(self.sessions):
                if not self.over[i]:
                    session.holder = self
                    session.reserve(ends[i])
            self.submitted = [
                done if over else end
                for done, end, over in zip(self.submitted, ends, self.over, strict=True)
            ]
            if not self.constrained:
                self.in_flight.append((engine.submit(updates, (body + tail) * count), count))
            else:
                engine.submit(updates, body)
            self.owns_rows = True
        if self.constrained:
            masks = self._masks()  # while the device evaluates the rows
            with uninterrupted():
                self.in_flight.append((engine.submit(masks, tail), 1))

    def _row(self, index: int) -> RowUpdate:
        session = self.sessions[index]
        if session.pending is None:
            raise SessionError("decoding needs a pending token; call prefill() first")
        return RowUpdate(
            session.pending,
            session.position,
            session.slot,
            0 if self.over[index] else self.flags[index],
            self.limits[index],
            self.engine.emitted.next_number("batch", index),
        )

    def _sampling(self) -> list[tuple[str, int, bytes]]:
        """Parameters and token counts of every row."""
        updates = []
        for i, (session, sampler) in enumerate(zip(self.sessions, self.samplers, strict=True)):
            counted = None
            if sampler.params.penalised:
                ids, pending = session.ids, session.pending
                counted = (session.slot, sampler.counts(ids, pending, self.engine.vocabulary))
            updates += sampling_updates("batch", i, sampler, counted)
        return updates

    def _masks(self) -> list[tuple[str, int, bytes]]:
        """The masks of the rows that go on; a row whose constraint fails ends with its error."""
        updates = []
        for i, sampler in enumerate(self.samplers):
            if sampler.constraint is None or self.over[i]:
                continue
            try:
                mask = mask_update("batch", i, sampler.constraint, self.engine.vocabulary)
                updates.append(mask)
            except HornitoError as error:
                self._end(i, error)
        return updates

    def _end(self, index: int, error: HornitoError | None = None) -> None:
        """End a session's part for a reason unknown to the device, whose row is taken back."""
        self.over[index] = True
        self.errors[index] = self.errors[index] or error
        self.owns_rows = False

    def _feed_forced(self, index: int, records: list[Record]) -> None:
        """Evaluate what a session's constraint says must come next, and add it to its records."""
        session, sampler = self.sessions[index], self.samplers[index]
        constraint = sampler.constraint
        if constraint is None or not records or self.errors[index] is not None:
            return
        # The pending token takes one of the positions that are left.
        most = self.limits[index] - session.position - 1
        forced: list[int] = []
        if not self.over[index] and sampler.params.logprobs is None:
            forced = constraint.take_forced(most)
        records += [Record(token, math.nan) for token in forced]
        if constraint.complete:
            self._end(index)  # nothing follows, so the last tokens need no evaluation
        elif forced:
            assert session.pending is not None
            edits = session.edits
            try:
                session.prefill([session.pending, *forced], sampler=sampler)
            except DeviceLostError:
                raise
            except HornitoError as error:
                self._end(index, error)
                return
            session.edits = edits
            assert session.record is not None
            records.append(session.record)
            self.owns_rows = False  # the device's record of this row is of an earlier token
            self.position[index] = self.submitted[index] = session.position
            ended = session.record.token in self.ends[index] or constraint.complete
            self.over[index] = ended or session.position >= self.limits[index]

    def _receive(self) -> None:
        """Wait for the oldest run in flight and read its tokens."""
        ticket, count = self.in_flight[0]
        self.engine.wait(ticket)
        tops = [sampler.params.logprobs or 0 for sampler in self.samplers]
        with uninterrupted():
            # An interrupted wait leaves the run in flight; what it emitted is read or skipped once.
            self.in_flight.pop(0)
            records = self.engine.emitted.take("batch", len(self.sessions), count, tops)
            for i, row in enumerate(records):
                if (error := not_finite(row, i)) is not None:
                    self.errors[i] = self.errors[i] or error
                    row.pop()
                elif self.errors[i] is not None:
                    row.clear()  # drawn without a mask
                self.over[i] = self.over[i] or len(row) < count or row[-1].token in self.ends[i]
            self.arrived.append(records)

    def _release(self) -> None:
        """Another call wants the row records: finish what is in flight, keep it for later."""
        self.owns_rows = False
        while self.in_flight:
            self._receive()

    def _accept(self, records: Records) -> None:
        self._check_sessions()
        for i, (session, row) in enumerate(zip(self.sessions, records, strict=True)):
            sampler = self.samplers[i]
            session.accept([record.token for record in row], sampler.free)
            self.position[i] = session.position
            if sampler.constraint is not None and row:
                try:
                    sampler.constraint.accept(row[0].token)  # of the run's one step
                except HornitoError as error:
                    self._end(i, error)

    def _check_sessions(self) -> None:
        for session, position, edits in zip(self.sessions, self.position, self.edits, strict=True):
            session.check_open()
            if session.generation != self.engine.generation:
                raise self.engine.lost_error()
            if session.position != position or session.edits != edits:
                raise SessionError(
                    f"a session moved from position {position} to {session.position} while a "
                    "decode run had it; close the run first"
                )

    def stop(self) -> None:
        """Wait for what is still running; its tokens are dropped."""
        with self.engine.lock:
            if self.engine.closed:
                return
            if self.owns_rows:
                self.engine.leave_batch()
            # Whatever happens to the waits, these records are never read.
            with uninterrupted():
                last = self.in_flight[-1][0] if self.in_flight else 0
                for _, count in self.in_flight:
                    self.engine.emitted.skip("batch", len(self.sessions), count)
                self.in_flight.clear()
            if (
                last and not self.engine.device.lost
            ):  # of a lost device there is nothing to wait for
                self.engine.wait(last)
            for session in self.sessions:
                session.leave(self)


def _one_engine(sessions: Sequence[Session]) -> Engine:
    engines = {id(s.engine): s.engine for s in sessions}
    if len(engines) != 1:
        raise SessionError(f"decoding takes sessions of one engine, not of {len(engines)}")
    if len({s.slot for s in sessions}) != len(sessions):
        raise SessionError("a session can't be in a batch twice")
    return next(iter(engines.values()))


def _samplers(given: Sequence[Sampler | None], count: int, vocabulary: int) -> list[Sampler]:
    """One for every session; greedy where none was given."""
    if given and len(given) != count:
        raise UsageError(f"{len(given)} samplers for {count} sessions")
    greedy = Sampler(SamplingParams(), 0, 0)
    found = [sampler or greedy for sampler in given or [None] * count]
    for sampler in found:
        sampler.params.check_vocabulary(vocabulary)
    return found
