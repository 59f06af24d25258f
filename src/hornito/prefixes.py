"""Beginnings of prompts that are evaluated once: what `LLM.prefill` and `prefill_chat` do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hornito.errors import UsageError
from hornito.runtime.prefix import common_prefix, start_from_prefix
from hornito.runtime.session import Session
from hornito.streaming import telling

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.runtime.snapshot import Snapshot


def prefix_of_ids(llm: LLM, ids: Sequence[int]) -> Snapshot:
    """A snapshot of these token ids, which fit the context.

    Raises:
        SessionError: no slot is free.
    """
    with Session(llm.engine) as session:
        reused = start_from_prefix(session, ids)
        with telling(llm.prompt_progress, len(ids) - reused) as tell:
            session.prefill(ids[reused:], evaluated=tell)
        return session.snapshot()


def prefix_of_chat(llm: LLM, messages: Sequence[Mapping[str, Any]]) -> Snapshot:
    """A snapshot of what all conversations that begin with these messages have in common.

    Raises:
        ContextOverflowError, SessionError: as for `LLM.prefill`.
        UsageError: there is no template, they are no messages or it refuses them, or nothing is in
            common.
    """
    from hornito.text.template import checked_messages, text_messages

    given = checked_messages(messages)
    first, second = (
        llm.chat_ids([*given, {"role": "user", "content": text}]) for text in ("a", "1")
    )
    shared = common_prefix(first, second)
    if not shared:
        raise UsageError("the chat template puts the newest message first: nothing is shared")
    snapshot = llm.prefill(first[:shared])
    with suppress(UsageError):  # prompts of calls start from it, a conversation can't go on with it
        snapshot.messages = tuple(text_messages(given))
    return snapshot
