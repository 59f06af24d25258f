"""One answer from one session, piece by piece: prefill, decode runs, and the context's end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from hornito.errors import SessionError
from hornito.runtime.decode import decode_records
from hornito.runtime.overflow import Overflow
from hornito.runtime.results import Chunk, Timings

if TYPE_CHECKING:
    from hornito.answer import Answer
    from hornito.progress import Progress
    from hornito.runtime.sampler import Sampler
    from hornito.runtime.session import Session


def stream_answer(
    session: Session,
    ids: Sequence[int],
    answer: Answer,
    sampler: Sampler,
    *,
    max_tokens: int,
    ignore_eos: bool,
    steps: int,
    overflow: Overflow,
    reused: int = 0,
    progress: Progress | None = None,
) -> Iterator[Chunk]:
    """Evaluate `ids` behind what the session holds and give the pieces of the answer.

    Args:
        answer: takes the records that the device returns.
        sampler: how tokens are chosen.
        max_tokens, ignore_eos, overflow: as for `LLM.stream`.
        steps: decode steps of one submission.
        reused: tokens of the prompt that the session held already, for the timings.
        progress: told about the tokens that are evaluated.

    Raises:
        ContextOverflowError: they do not fit and the policy is `error`.
    """
    began = time.monotonic()
    prompt = reused + len(ids)
    if overflow.applies(session.position + len(ids), session.engine.context):
        reused = 0
        every = [*session.ids, *ids]
        kept = len(overflow.kept(len(every), session.engine.context))
        with telling(progress, kept) as tell:
            session.rebuild(every, overflow, sampler, tell)
        sampler = replace(sampler, prompt_tokens=session.position)
    else:
        with telling(progress, len(ids)) as tell:
            session.prefill(ids, sampler=sampler, evaluated=tell)
    prefilled = time.monotonic()
    edits = session.edits
    yield from _pieces(answer, session)
    while not answer.ended():
        session.check_open()
        if session.edits != edits:
            raise SessionError(
                "the session was used by another call while its answer was being streamed; finish "
                "or close the stream first"
            )
        runs = decode_records(
            [session],
            [max_tokens - answer.count],
            ignore_eos=ignore_eos,
            steps=steps,
            samplers=[sampler],
        )
        for (records,) in runs:
            yield answer.take(records)
            if answer.ended():
                break
        if answer.ended() or not overflow.applies(session.position + 1, session.engine.context):
            break
        assert session.pending is not None
        session.rebuild([*session.ids, session.pending], overflow, sampler)
        sampler = replace(sampler, prompt_tokens=session.position)
        edits = session.edits
        yield from _pieces(answer, session)
    ended = time.monotonic()
    yield answer.last(
        Timings(prompt, prefilled - began, answer.count - 1, ended - prefilled, reused)
    )


@contextmanager
def telling(progress: Progress | None, count: int) -> Iterator[Callable[[int], object]]:
    """What to call with the tokens of a prompt of `count` that have been evaluated."""
    if progress is None:
        yield lambda tokens: None
        return
    progress.start("prompt", count)
    try:
        yield progress.advance
    finally:
        progress.finish()


def _pieces(answer: Answer, session: Session) -> Iterator[Chunk]:
    """The token that a prefill ended with."""
    assert session.record is not None
    piece = answer.take([session.record])
    if piece.text or piece.token_ids:
        yield piece
