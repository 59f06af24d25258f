"""A session: one sequence of positions with its KV blocks, in a slot of an engine."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hornito.errors import ContextOverflowError, SessionError, UsageError
from hornito.runtime.engine import Engine
from hornito.runtime.evaluation import LOST, Evaluation, FloatArray, recovering
from hornito.runtime.guard import locked, uninterrupted
from hornito.runtime.kv_cache import share_blocks
from hornito.runtime.logit_rows import logit_rows
from hornito.runtime.overflow import DEFAULT_MAX_TOKENS, Overflow, room_advice
from hornito.runtime.sampler import Sampler, mask_update, sampling_updates
from hornito.runtime.snapshot import EMBEDDED, Snapshot

if TYPE_CHECKING:
    import os


class Session(Evaluation):
    """A sequence on an engine; made by `Session(engine)`, ended by `close()` or `with`.

    Attributes:
        ids: every token that has been evaluated; `position` is their count.
        pending: the next token after the last evaluated one, not evaluated itself: the most likely
            one, or the one that a sampler drew.
        record: what the device said of the pending token, when a prefill found it.
        records: the same of every selected row of that call.
        vectors: the embeddings among `ids`, by position.
        sampler: what drew the pending token; None for the most likely one. The random state is its
            seed and the position.
        fresh: whether the last evaluated token was evaluated here, not taken over from a snapshot.
        edits: counts what changed the session, but for the tokens that a decode run brings.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        with engine.lock, uninterrupted():
            self._begin(engine.take_slot())

    def _begin(self, slot: int) -> None:
        engine = self.engine
        self.slot = slot
        self.ids = []
        self.pending = None
        self.record = None
        self.records = []
        self.sampler = None
        self.fresh = False
        self.edits = 0
        self.holder: object = None  # the decode run whose steps have blocks reserved here
        self.vectors = {}
        self._new_blocks()
        self._closed = False
        engine.sessions.add(self)

    def __repr__(self) -> str:
        if self._closed:
            return "<Session, closed>"
        return f"<Session of {self.position} of {self.engine.context} tokens, slot {self.slot}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # -- evaluation -------------------------------------------------------------------------

    @recovering
    def prefill(
        self,
        ids: Sequence[int] = (),
        *,
        embeddings: npt.ArrayLike | None = None,
        chunk: int | None = None,
        sampler: Sampler | None = None,
        evaluated: Callable[[int], object] | None = None,
    ) -> None:
        """Evaluate `ids`, or rows of embeddings, and find the next token (`pending`).

        Args:
            ids: at least one token id.
            embeddings: instead of ids, `[T, hidden]` fp32 rows that take the place of the
                embedding gather's result, unscaled. In `ids` of the session they are `EMBEDDED`.
            chunk: evaluate at most this many rows at once; by default the largest bucket, cut at
                its multiples of absolute positions.
            sampler: how the next token is chosen; the most likely one by default.
            evaluated: called with the number of rows of each chunk that is done.

        An interrupt (Ctrl-C) ends the call within about a chunk; the session then holds the chunks
        that were evaluated.

        Raises:
            ContextOverflowError: they do not fit; nothing is evaluated then.
            UsageError: no ids, or an id outside the vocabulary.
        """
        if sampler is not None:
            sampler.params.check_vocabulary(self.engine.vocabulary)
        if embeddings is None:
            self._run(self._admit(ids), chunk, sampler, evaluated)
            return
        if len(ids):
            raise UsageError("prefill takes ids or embeddings; call it once for each")
        rows = self._admit_rows(embeddings)
        first = self.position
        self.vectors.update((first + i, row) for i, row in enumerate(rows))
        try:
            self._run([EMBEDDED] * len(rows), chunk, sampler, evaluated)
        except BaseException:
            self._forget_vectors(self.position)
            raise

    def _run(
        self,
        ids: list[int],
        chunk: int | None = None,
        sampler: Sampler | None = None,
        evaluated: Callable[[int], object] | None = None,
    ) -> None:
        """Evaluate what was admitted; `EMBEDDED` ids have their row in `vectors` already."""
        tell = evaluated or (lambda count: None)
        start, rows, live = self._run_before_last(ids, chunk, tell)
        if sampler is None or sampler.plain:
            self.sampler = None
            self._evaluate(ids[start:], rows, "argmax")
            tell(live)
            return
        self.sampler = sampler.free
        counted = None
        if sampler.params.penalised:
            sequence = self.ids + ids[start:]
            counted = (self.slot, sampler.counts(sequence, None, self.engine.vocabulary))
        kind = "batch" if rows == 1 else "chunk"
        updates = sampling_updates(kind, 0, sampler, counted)
        constraint = sampler.constraint
        if constraint is None:
            self._evaluate(ids[start:], rows, "sample", updates)
        else:
            # The device works while the mask is being found.
            self._evaluate(ids[start:], rows, "none", updates)
            mask = mask_update(kind, 0, constraint, self.engine.vocabulary)
            self._tail(kind, rows, "sample", live, [live - 1], updates=[mask])
        self._collect(kind, 1, (sampler.params.logprobs or 0,))
        if constraint is not None and self.pending is not None:
            constraint.accept(self.pending)
        tell(live)

    def _admit_rows(self, embeddings: npt.ArrayLike) -> FloatArray:
        """The embeddings as fp32 rows, when they can be evaluated."""
        self.check_open()
        rows = np.ascontiguousarray(embeddings, np.float32)
        width = self.engine.plan.width
        if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
            raise UsageError(f"embeddings must be [T, {width}] with T >= 1, not {rows.shape}")
        if not np.isfinite(rows).all():
            raise UsageError("embeddings must be finite")
        self._check_room(len(rows))
        return rows

    def step(self, token: int) -> None:
        """Evaluate one token and find the next."""
        self.prefill([token])

    @recovering
    def logprobs(self, ids: Sequence[int], *, chunk: int | None = None) -> FloatArray:
        """Evaluate `ids` and return the log-probability of each, given all before it.

        Returns:
            `[n]` fp32: entry i belongs to ids[i]. The first entry is NaN when the session was
            empty, because nothing precedes it.
        """
        ids = self._admit(ids)
        out = np.full(len(ids), np.nan, np.float32)
        if self.ids:
            with self._again() as last:
                self._score([last], [ids[0]], out[:1], chunk)
        if len(ids) > 1:
            self._score(ids[:-1], ids[1:], out[1:], chunk)
        self._evaluate(ids[-1:], 1, "argmax")
        return out

    @recovering
    def prefill_logits(self, ids: Sequence[int], *, chunk: int | None = None) -> FloatArray:
        """Evaluate `ids` as `prefill` does and return the logits after each, `[n, V]` fp32."""
        vocabulary = self.engine.vocabulary
        out = np.empty((len(ids), vocabulary), np.float32)
        for rows in logit_rows(self, ids, chunk=chunk, copy=True):
            found = self.engine.host_floats("logits", rows.count * vocabulary)
            out[rows.first :][: rows.count] = found.reshape(-1, vocabulary)
        return out

    @recovering
    def logits(self) -> FloatArray:
        """The logits `[V]` after the last evaluated token.

        The token is evaluated once more, at its own position, which changes nothing in the cache
        beyond rounding.

        Raises:
            SessionError: nothing was evaluated since the session began, was restored, forked or
                rewound.
        """
        self.check_open()
        if not self.fresh or self.pending is None:
            raise SessionError(
                "logits() needs an evaluated token: none was since this session began, was "
                "restored, forked or rewound; call prefill() or step() first"
            )
        pending, edits = self.pending, self.edits
        with self._again() as last:
            row = self._evaluate([last], 1, "logits")
        self.pending, self.edits = pending, edits
        vocabulary = self.engine.vocabulary
        return self.engine.host_floats("logits", (row + 1) * vocabulary)[row * vocabulary :]

    @contextmanager
    def _again(self) -> Iterator[int]:
        """The last token, to be evaluated once more; blocks and embeddings behind it stay."""
        position, last, pending = self.position, self.ids.pop(), self.pending
        try:
            yield last
        finally:
            if self.position < position:
                self.ids.append(last)
                self.pending = pending

    def _score(
        self, ids: Sequence[int], following: Sequence[int], out: FloatArray, chunk: int | None
    ) -> None:
        for start, rows, live in self._schedule(len(ids), chunk):
            kind = "batch" if rows == 1 else "chunk"
            given = np.asarray(following[start : start + live], np.uint32).tobytes()
            self._evaluate(
                ids[start : start + live], rows, "logprob", [(f"{kind}.next_ids", 0, given)]
            )
            out[start : start + live] = self.engine.host_floats(f"{kind}.given_logprob", live)

    def _admit(self, given: Sequence[int], *, room: bool = True) -> list[int]:
        """The ids as plain integers, when they can be evaluated behind what is there."""
        self.check_open()
        try:
            ids = [operator.index(token) for token in given]
        except TypeError as error:
            raise UsageError(f"token ids must be whole numbers: {error}") from error
        if not ids:
            raise UsageError("no token ids to evaluate")
        vocabulary = self.engine.vocabulary
        for token in ids:
            if not 0 <= token < vocabulary:
                raise UsageError(f"token id {token} is outside the vocabulary of {vocabulary}")
        if room:
            self._check_room(len(ids))
        return ids

    def _check_room(self, count: int) -> None:
        total = self.position + count
        if total > self.engine.context:
            raise ContextOverflowError(
                f"{count} tokens at position {self.position} need {total} positions; the "
                f"context has {self.engine.context}. "
                f"{room_advice(self.engine, total, DEFAULT_MAX_TOKENS)}; or shorten the prompt",
                tokens=total,
                context=self.engine.context,
            )

    # -- blocks -----------------------------------------------------------------------------

    @recovering
    def rewind(self, position: int, *, refill: bool = False) -> None:
        """Forget everything from `position` on.

        Args:
            position: how many tokens to keep.
            refill: where sliding layers no longer hold what the position needs, evaluate the kept
                tokens again instead of raising.

        Raises:
            UsageError: the position lies outside what was evaluated.
            SessionError: a sliding layer has freed keys that the position needs.
        """
        self.check_open()
        if not 0 <= position <= self.position:
            raise UsageError(f"can't rewind to {position}: {self.position} tokens are evaluated")
        if position == self.position:
            return
        first = self.blocks.first_kept
        if 0 < position < first and not refill:
            raise SessionError(
                f"can't rewind to {position}: sliding layers hold only what positions from {first} "
                f"on need (rewind budget {self.engine.options.rewind_budget}); rewind(..., "
                "refill=True) evaluates the tokens again"
            )
        kept = self.ids[:position]
        again = 0 < position < first
        with uninterrupted():
            self.blocks.truncate(0 if again else position, self.engine.last_ticket)
            self.ids = [] if again else kept
            self._forget_vectors(position)
            self.pending = None
            self.fresh = False
            self.edits += 1
        if again:
            self._run(kept)
            self.pending = None
        self.fresh = False

    @recovering
    def rebuild(
        self,
        ids: Sequence[int],
        overflow: Overflow,
        sampler: Sampler | None = None,
        evaluated: Callable[[int], object] | None = None,
    ) -> None:
        """Start again, at position 0, from the tokens of `ids` that the policy keeps.

        Args:
            ids: the whole sequence, of which the session's own ids are the beginning.
            evaluated: as for `prefill`.

        Raises:
            UsageError: the policy leaves no room for a new token.
        """
        kept = overflow.kept(len(ids), self.engine.context)
        tokens = [ids[at] for at in kept]
        vectors = {new: self.vectors[at] for new, at in enumerate(kept) if at in self.vectors}
        given = [token for at, token in zip(kept, tokens, strict=True) if at not in self.vectors]
        if given:
            self._admit(given, room=False)
        self.rewind(0)
        self.vectors = vectors
        # What was kept is the prompt of all that follows.
        sampler = sampler and replace(sampler, prompt_tokens=len(tokens))
        self._run(tokens, None, sampler, evaluated)

    # -- snapshots --------------------------------------------------------------------------

    @recovering
    def snapshot(self) -> Snapshot:
        """What the session is now, sharing its blocks; nothing is copied."""
        self.check_open()
        with uninterrupted():
            return Snapshot(
                self.engine,
                self.blocks.share(self.position),
                list(self.ids),
                self.pending,
                dict(self.vectors),
                self.sampler,
            )

    @locked
    def restore(self, snapshot: Snapshot) -> None:
        """Become what the snapshot is: block tables are edited, nothing is evaluated or copied.

        A snapshot of a device that was lost is evaluated again, where the engine recovers.

        Raises:
            SessionError: the snapshot was released or is another engine's.
        """
        self.check_open()
        snapshot.check()
        if snapshot.engine is not self.engine:
            raise SessionError("a snapshot can be restored only on the engine that it was made on")
        self.engine.revive()
        lost = snapshot.lost
        with uninterrupted():
            if self.generation != self.engine.generation:
                self._new_blocks()  # those of the lost device are of no use
            if not lost:
                shared = [list(blocks) for blocks in snapshot.blocks]
                share_blocks(self.engine.pools, shared)
                self.blocks.replace(shared, self.engine.last_ticket)
            self.ids = list(snapshot.ids)
            self.vectors = dict(snapshot.vectors)
            self.pending = snapshot.pending
            self.sampler = snapshot.sampler
            self.fresh = False
            self.edits += 1
        if lost:
            self.blocks.truncate(0, self.engine.last_ticket)
            self.generation = LOST
            self.revive()
            snapshot.adopt(self.blocks.share(self.position))

    @locked
    def fork(self) -> Session:
        """A second session at this point, in a slot of its own; nothing is copied.

        Raises:
            SessionError: no slot is free.
        """
        self.check_open()
        twin = Session(self.engine)
        with self.snapshot() as here:
            twin.restore(here)
        return twin

    @locked
    def load(self, path: str | os.PathLike[str]) -> None:
        """Become what a snapshot file holds; the session is unchanged when that fails.

        Raises:
            SessionError: the file was made with another model or other settings; names which.
            FormatError: the file is damaged.
        """
        from hornito.runtime.snapshot_file import load_snapshot

        self.check_open()
        with load_snapshot(self.engine, path) as snapshot:
            self.restore(snapshot)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV blocks held, shared ones included."""
        return self.blocks.nbytes

    @locked
    def accept(self, tokens: Sequence[int], sampler: Sampler | None = None) -> None:
        """Take over tokens that a decode run emitted: each was pending when the next came."""
        if not tokens:
            return
        for token in tokens:
            if self.pending is None:
                raise SessionError("a token can follow only a pending one")
            self.ids.append(self.pending)
            self.pending = token
        self.sampler = sampler
        self.fresh = True

    def leave(self, run: object) -> None:
        """A decode run is over: give up the blocks reserved for tokens that did not come."""
        if self.holder is run and not self._closed:
            self.holder = None
            self.blocks.truncate(self.position, self.engine.last_ticket)

    @locked
    def close(self) -> None:
        """Return the slot and the blocks; a second call does nothing."""
        if self._closed:
            return
        with uninterrupted():
            self._closed = True
            self.engine.sessions.discard(self)
            if self.engine.closed:
                return
            try:
                self.blocks.truncate(0, self.engine.last_ticket)
            finally:
                self.engine.return_slot(self.slot)

    release = close

    def __del__(self) -> None:
        # A session that failed to begin has no slot to return.
        if not getattr(self, "_closed", True):
            self.close()
