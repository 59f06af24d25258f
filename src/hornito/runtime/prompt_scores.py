"""How likely the model finds the tokens of a prompt, with the most likely ones of each place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hornito.errors import UsageError
from hornito.ops.base import ROW_BYTES, ROW_IGNORE_EOS, ROW_LIVE
from hornito.runtime.emitted import not_finite
from hornito.runtime.results import TokenLogprob
from hornito.runtime.rows import RowUpdate, row_bytes, words
from hornito.runtime.sampler import Sampler, SamplingParams, sampling_updates

if TYPE_CHECKING:
    from hornito.runtime.session import Session

Top = tuple[tuple[int, float], ...]


def score_rows(
    session: Session, ids: Sequence[int], following: Sequence[int], *, top: int = 0
) -> list[TokenLogprob]:
    """Evaluate `ids` in a session and say how likely each token of `following` is.

    The most likely token comes with the log-probabilities; more of them take a pass over the
    vocabulary each row.

    Args:
        ids: of one call: no more than are left of the largest bucket at the session's position.
        following: the token behind each of `ids`, which is not evaluated.
        top: how many most likely tokens are wanted of each place.

    Raises:
        ContextOverflowError, UsageError: as for `Session.prefill`.
    """
    engine = session.engine
    with engine.lock:
        ids = session._admit(ids)
        if len(following) != len(ids):
            raise UsageError(f"{len(following)} following tokens for {len(ids)}")
        ((_, rows, live), *more) = session._schedule(len(ids), None)
        if more:
            raise UsageError(f"{len(ids)} tokens at {session.position} are more than one call")
        kind = "batch" if rows == 1 else "chunk"
        given = np.asarray(following, np.uint32).tobytes()
        session._evaluate(ids, rows, "logprob", [(f"{kind}.next_ids", 0, given)])
        logprobs = engine.host_floats(f"{kind}.given_logprob", live).tolist()
        best: list[Top] = [((record.token, record.logprob),)[:top] for record in session.records]
        if top > 1:
            best = [_most_likely(session, kind, rows, live, row, top) for row in range(live)]
        places = zip(following, logprobs, best, strict=True)
        return [TokenLogprob(token, logprob, likely) for token, logprob, likely in places]


def _most_likely(session: Session, kind: str, rows: int, live: int, row: int, top: int) -> Top:
    """The most likely tokens behind a row of the call before, which is still in the activations."""
    engine = session.engine
    position = session.position - live + row
    record = RowUpdate(
        session.ids[position],
        position,
        session.slot,
        ROW_LIVE | ROW_IGNORE_EOS,
        engine.context + 1,
        engine.emitted.next_number(kind, 0),
    )
    changes = [
        (f"{kind}.rows", row * ROW_BYTES, row_bytes([record], 1)),
        (f"{kind}.call", 0, words(live, 1, 0, 0)),
        *sampling_updates(kind, 0, Sampler(SamplingParams(logprobs=top), 0, 0), None),
    ]
    if kind == "chunk":
        changes.append((f"{kind}.selection", 0, words(row)))
    engine.wait(engine.submit(changes, engine.recording(kind, rows, "sample")))
    ((found,),) = engine.emitted.take(kind, 1, 1, (top,))
    if (error := not_finite([found], row)) is not None:
        raise error
    return found.top
