"""Decoding: several steps a submission, for one session or a batch of them.

The device feeds itself: a step's tail writes the next token into the row record that the next step
reads. The host submits one run of steps ahead, reads the records of the run before, and stops.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from hornito.errors import SessionError, UsageError
from hornito.ops.base import ROW_IGNORE_EOS, ROW_LIVE
from hornito.plan.plan import RING
from hornito.runtime.engine import Engine, Record
from hornito.runtime.guard import uninterrupted
from hornito.runtime.rows import RowUpdate, row_bytes, words
from hornito.runtime.sampler import Sampler, SamplingParams, sampling_updates
from hornito.runtime.session import Session

Steps = list[list[int]]
Records = list[list[Record]]


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
    run = _Run(sessions, counts, ignore_eos, steps, samplers)
    try:
        yield from run.steps()
    finally:
        run.stop()


class _Run:
    def __init__(
        self,
        sessions: Sequence[Session],
        counts: Sequence[int],
        ignore_eos: bool,
        steps: int,
        samplers: Sequence[Sampler | None],
    ) -> None:
        self.engine = _one_engine(sessions)
        if len(counts) != len(sessions):
            raise UsageError(f"{len(counts)} counts for {len(sessions)} sessions")
        if not 1 <= steps <= RING // 2:
            raise UsageError(f"steps must be 1 to {RING // 2}, not {steps}")
        self.sessions = list(sessions)
        self.rows = next(
            (r for k, r in self.engine.plan.buckets if k == "batch" and r >= len(sessions)), 0
        )
        if not self.rows:
            raise UsageError(f"{len(sessions)} sessions exceed the largest batch bucket")
        self.samplers = _samplers(samplers, len(sessions), self.engine.vocabulary)
        self.sampled = any(not sampler.params.plain for sampler in self.samplers)
        self.per_run = steps
        self.flags = ROW_LIVE | (ROW_IGNORE_EOS if ignore_eos else 0)
        self.ends = frozenset(() if ignore_eos else self.engine.eos_ids)
        context = self.engine.context
        # Positions that may be evaluated: one for each new token, within the context.
        self.limits = [min(context, s.position + n) for s, n in zip(sessions, counts, strict=True)]
        self.submitted = [s.position for s in sessions]
        self.position = list(self.submitted)  # of each session, as this run left it
        self.edits = [s.edits for s in sessions]
        self.over = [limit <= s.position for s, limit in zip(sessions, self.limits, strict=True)]
        self.owns_rows = False
        self.in_flight: list[tuple[int, int]] = []  # (ticket, steps)
        self.arrived: list[Records] = []  # read from the device, not yielded yet

    def steps(self) -> Iterator[Records]:
        while (records := self._next()) is not None:
            if any(records):
                yield records

    def _next(self) -> Records | None:
        """The records of the oldest run, with newer ones on their way; None at the end."""
        with self.engine.lock:
            while len(self.in_flight) < 2 and not self.arrived and self._left() > 0:
                self._submit()
            if not self.in_flight and not self.arrived:
                return None
            if not self.arrived:
                self._receive()
            with uninterrupted():
                records = self.arrived.pop(0)
                self._accept(records)
            return records

    def _left(self) -> int:
        """Steps that have not been submitted yet for the session that wants most."""
        rows = zip(self.submitted, self.limits, self.over, strict=True)
        return max(0 if over else limit - done for done, limit, over in rows)

    def _submit(self) -> None:
        engine = self.engine
        self._check_sessions()
        count = min(self.per_run, self._left())
        updates: list[tuple[str, int, bytes]] = []
        if not self.owns_rows:
            engine.claim_batch(self._release)
            records = [self._row(i) for i in range(len(self.sessions))]
            n = len(records)
            updates = [
                ("batch.rows", 0, row_bytes(records, self.rows)),
                ("batch.call", 0, words(n, n, 0, 0)),
            ]
            if self.sampled:
                updates += self._sampling()
        step = engine.recording("batch", self.rows, "body")
        tail = "sample" if self.sampled else "argmax"
        step = step + engine.recording("batch", self.rows, tail)
        with uninterrupted():
            for i, session in enumerate(self.sessions):
                if not self.over[i]:
                    self.submitted[i] = min(self.submitted[i] + count, self.limits[i])
                    session.holder = self
                    session.reserve(self.submitted[i])
            self.in_flight.append((engine.submit(updates, step * count), count))
            self.owns_rows = True

    def _row(self, index: int) -> RowUpdate:
        session = self.sessions[index]
        if session.pending is None:
            raise SessionError("decoding needs a pending token; call prefill() first")
        return RowUpdate(
            session.pending,
            session.position,
            session.slot,
            0 if self.over[index] else self.flags,
            self.limits[index],
            self.engine.emitted("batch", index),
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

    def _receive(self) -> None:
        """Wait for the oldest run in flight and read its tokens."""
        ticket, count = self.in_flight[0]
        self.engine.wait(ticket)
        tops = [sampler.params.logprobs or 0 for sampler in self.samplers]
        with uninterrupted():
            # An interrupted wait leaves the run in flight; what it emitted is read or skipped once.
            self.in_flight.pop(0)
            records = self.engine.take_records("batch", len(self.sessions), count, tops)
            for i, row in enumerate(records):
                self.over[i] = self.over[i] or len(row) < count or row[-1].token in self.ends
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
            session.accept(
                [record.token for record in row], None if sampler.params.plain else sampler
            )
            self.position[i] = session.position

    def _check_sessions(self) -> None:
        for session, position, edits in zip(self.sessions, self.position, self.edits, strict=True):
            session.check_open()
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
                    self.engine.skip_records("batch", len(self.sessions), count)
                self.in_flight.clear()
            if last:
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
