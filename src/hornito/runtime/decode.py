"""Decoding: several steps a submission, for one session or a batch of them.

The device feeds itself: a step's tail writes the next token into the row record that the next step
reads. The host submits one run of steps ahead, reads the records of the run before, and stops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hornito.errors import SessionError, UsageError
from hornito.ops.base import ROW_IGNORE_EOS, ROW_LIVE
from hornito.plan.plan import RING
from hornito.runtime.engine import Engine, RowUpdate
from hornito.runtime.session import Session, row_bytes, words

Steps = list[list[int]]


def decode(
    sessions: Sequence[Session],
    counts: Sequence[int],
    *,
    ignore_eos: bool = False,
    steps: int = 8,
) -> Iterator[Steps]:
    """Greedy continuation of sessions that share an engine.

    Args:
        sessions: each with a pending token, which is evaluated first.
        counts: new tokens wanted of each; fewer come at an end token or the context's end.
        ignore_eos: go on past end tokens.
        steps: steps of one submission.

    Yields:
        per submission, the new tokens of each session. Tokens that have been yielded are in the
        session: all but the newest evaluated, the newest pending.

    Raises:
        SessionError: a session has no pending token, or they are of different engines.
    """
    run = _Run(sessions, counts, ignore_eos, steps)
    try:
        yield from run.steps()
    finally:
        run.stop()


class _Run:
    def __init__(
        self, sessions: Sequence[Session], counts: Sequence[int], ignore_eos: bool, steps: int
    ) -> None:
        self.engine = _one_engine(sessions)
        if not 1 <= steps <= RING // 2:
            raise UsageError(f"steps must be 1 to {RING // 2}, not {steps}")
        self.sessions = list(sessions)
        self.rows = next(
            (r for k, r in self.engine.plan.buckets if k == "batch" and r >= len(sessions)), 0
        )
        if not self.rows:
            raise UsageError(f"{len(sessions)} sessions exceed the largest batch bucket")
        self.per_run = steps
        self.flags = ROW_LIVE | (ROW_IGNORE_EOS if ignore_eos else 0)
        context = self.engine.context
        # Positions that may be evaluated: one for each new token, within the context.
        self.limits = [min(context, s.position + n) for s, n in zip(sessions, counts, strict=True)]
        self.submitted = [s.position for s in sessions]
        self.pending_runs: list[tuple[int, int]] = []  # (ticket, steps)

    def steps(self) -> Iterator[Steps]:
        first = True
        live = [limit > s.position for s, limit in zip(self.sessions, self.limits, strict=True)]
        while any(live):
            while len(self.pending_runs) < 2 and self._left() > 0:
                self._submit(first)
                first = False
            if not self.pending_runs:
                return
            tokens = self._take()
            for i, new in enumerate(tokens):
                live[i] = live[i] and len(new) == self.taken
            if any(tokens):
                yield tokens

    def _left(self) -> int:
        """Steps that have not been submitted yet for the session that wants most."""
        return max(b - a for a, b in zip(self.submitted, self.limits, strict=True))

    def _submit(self, first: bool) -> None:
        engine = self.engine
        count = min(self.per_run, self._left())
        updates: list[tuple[str, int, bytes]] = []
        if first:
            records = [self._row(i) for i in range(len(self.sessions))]
            n = len(records)
            updates = [
                ("batch.rows", 0, row_bytes(records, self.rows)),
                ("batch.call", 0, words(n, n, 0, 0)),
            ]
        for i, session in enumerate(self.sessions):
            self.submitted[i] = min(self.submitted[i] + count, self.limits[i])
            session.reserve(self.submitted[i])
        step = engine.recording("batch", self.rows, "body")
        step = step + engine.recording("batch", self.rows, "argmax")
        self.pending_runs.append((engine.submit(updates, step * count), count))

    def _row(self, index: int) -> RowUpdate:
        session = self.sessions[index]
        if session.pending is None:
            raise SessionError("decoding needs a pending token; call prefill() first")
        wanted = self.limits[index] > session.position
        return RowUpdate(
            session.pending,
            session.position,
            session.slot,
            self.flags if wanted else 0,
            self.limits[index],
            self.engine.emitted("batch", index),
        )

    def _take(self) -> Steps:
        """Wait for the oldest run and move its tokens into the sessions."""
        ticket, count = self.pending_runs.pop(0)
        self.engine.wait(ticket)
        self.taken = count
        result: Steps = []
        for i, session in enumerate(self.sessions):
            first = self.engine.emitted("batch", i)
            tokens = [t for t, _ in self.engine.records("batch", i, first, count)]
            self.engine.advance("batch", i, len(tokens))
            session.accept(tokens)
            result.append(tokens)
        return result

    def stop(self) -> None:
        """Wait for what is still running; its tokens are dropped."""
        while self.pending_runs:
            ticket, count = self.pending_runs.pop(0)
            self.engine.wait(ticket)
            for i in range(len(self.sessions)):
                first = self.engine.emitted("batch", i)
                self.engine.advance("batch", i, len(self.engine.records("batch", i, first, count)))


def _one_engine(sessions: Sequence[Session]) -> Engine:
    engines = {id(s.engine): s.engine for s in sessions}
    if len(engines) != 1:
        raise SessionError(f"decoding takes sessions of one engine, not of {len(engines)}")
    if len({s.slot for s in sessions}) != len(sessions):
        raise SessionError("a session can't be in a batch twice")
    return next(iter(engines.values()))
