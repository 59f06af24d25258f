"""Many prompts at once: the slots of a model are filled, and refilled as answers end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hornito.answer import join
from hornito.errors import SessionError
from hornito.runtime.decode import decode_records
from hornito.runtime.overflow import Overflow
from hornito.runtime.prefix import start_from_prefix
from hornito.runtime.results import Chunk, Generation, Timings
from hornito.runtime.sampler import Sampler

if TYPE_CHECKING:
    from hornito.answer import Answer
    from hornito.api import LLM
    from hornito.runtime.emitted import Record
    from hornito.runtime.session import Session


def many(prompt: object) -> list[str | Sequence[int]] | None:
    """The prompts of a list of them; None for one prompt, which is text or token ids."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return None
    if not prompt or all(hasattr(item, "__index__") for item in prompt):
        return None  # token ids; no prompts at all are an empty prompt
    return list(prompt)


@dataclass(slots=True)
class _Running:
    """A prompt whose answer is being made."""

    index: int
    session: Session
    sampler: Sampler
    answer: Answer
    prompt_tokens: int
    reused_tokens: int
    began: float
    prefilled: float
    pieces: list[Chunk]

    def take(self, records: Sequence[Record]) -> None:
        if records and not self.answer.ended():
            self.pieces.append(self.answer.take(records))

    def rebuild(self, overflow: Overflow) -> None:
        """The context is full: go on from what the policy keeps."""
        session = self.session
        assert session.pending is not None
        session.rebuild([*session.ids, session.pending], overflow, self.sampler)
        self.sampler = replace(self.sampler, prompt_tokens=session.position)
        assert session.record is not None
        self.take([session.record])

    def finished(self) -> Generation:
        now = time.monotonic()
        timings = Timings(
            self.prompt_tokens,
            self.prefilled - self.began,
            self.answer.count - 1,
            now - self.prefilled,
            self.reused_tokens,
        )
        return join([*self.pieces, self.answer.last(timings)])


def generate_batch(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    new_answer: Callable[[Sampler], Answer],
    new_sampler: Callable[[int], Sampler],
    *,
    max_tokens: int,
    ignore_eos: bool,
    overflow: Overflow,
) -> list[Generation]:
    """Answer prompts of token ids, as many at a time as there are free slots.

    Every answer is what the prompt alone would give, as far as the contract "tokens" of
    docs/architecture.md goes.

    Args:
        llm: the model.
        prompts: each at least one id and within the context, unless the policy shortens it.
        new_answer: makes the answer of one prompt.
        new_sampler: how the tokens of one answer are chosen, behind a prompt of so many tokens.
        max_tokens, ignore_eos, overflow: as for `LLM.stream`.

    Raises:
        SessionError: no slot is free.
    """
    rows = max(rows for kind, rows in llm.engine.plan.buckets if kind == "batch")
    most = min(rows, llm.engine.free_slots)
    if prompts and most < 1:
        raise SessionError(
            f"all {llm.engine.options.slots} slots are in use; close a session or load with more "
            "slots"
        )
    waiting = list(enumerate(prompts))
    waiting.reverse()
    running: list[_Running] = []
    results: dict[int, Generation] = {}
    try:
        while waiting or running:
            while waiting and len(running) < most:
                running.append(_start(llm, *waiting.pop(), new_answer, new_sampler, overflow))
            if not any(one.answer.ended() for one in running):
                _advance(llm, running, max_tokens, ignore_eos, overflow, refill=bool(waiting))
            for one in [one for one in running if one.answer.ended()]:
                results[one.index] = one.finished()
                one.session.close()
                running.remove(one)
    finally:
        for one in running:
            one.session.close()
    return [results[index] for index in range(len(prompts))]


def _start(
    llm: LLM,
    index: int,
    ids: Sequence[int],
    new_answer: Callable[[Sampler], Answer],
    new_sampler: Callable[[int], Sampler],
    overflow: Overflow,
) -> _Running:
    began = time.monotonic()
    prompt_tokens = len(ids)
    if overflow.applies(prompt_tokens, llm.context):
        ids = [ids[at] for at in overflow.kept(prompt_tokens, llm.context)]
    sampler = new_sampler(len(ids))
    session = llm.session()
    try:
        reused = start_from_prefix(session, ids)
        session.prefill(ids[reused:], sampler=sampler)
        assert session.record is not None
        answer = new_answer(sampler)
        now = time.monotonic()
        one = _Running(index, session, sampler, answer, prompt_tokens, reused, began, now, [])
        one.take([session.record])
    except BaseException:
        session.close()
        raise
    return one


def _advance(
    llm: LLM,
    running: Sequence[_Running],
    max_tokens: int,
    ignore_eos: bool,
    overflow: Overflow,
    *,
    refill: bool,
) -> None:
    """Decode until an answer ends whose slot is wanted, or until all have ended.

    An answer that the device does not know to be over (a stop string) ends the run too, so that
    its row is not computed any further.
    """
    runs = decode_records(
        [one.session for one in running],
        [max_tokens - one.answer.count for one in running],
        ignore_eos=ignore_eos,
        steps=llm.steps_per_submission,
        samplers=[one.sampler for one in running],
    )
    for records in runs:
        for one, new in zip(running, records, strict=True):
            one.take(new)
        ended = [one for one in running if one.answer.ended()]
        if len(ended) == len(running) or (ended and refill):
            break
        if any(one.answer.stopped_by_text for one in ended):
            break
    else:
        # The device has nothing more: end tokens, limits, or the end of the context.
        for one in running:
            full = overflow.applies(one.session.position + 1, llm.context)
            if full and not one.answer.ended():
                one.rebuild(overflow)
            else:
                one.answer.end("length")
