"""Prefixes through the Python interface: kept, matched, loaded from files, and the beginning of
conversations."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hornito
from hornito.api import LLM
from hornito.conversation import ChatSettings, Conversation
from hornito.errors import SessionError, UsageError
from hornito.runtime.prefix import common_prefix
from hornito.runtime.snapshot import Snapshot
from text_model import write_text_model

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("HORNITO_DEVICE")
SYSTEM = [{"role": "system", "content": "You are a lamp. " * 3}]
USER = {"role": "user", "content": "hello"}


@pytest.fixture
def prefix(llm: LLM) -> Iterator[Snapshot]:
    with llm.prefill_chat(SYSTEM) as snapshot:
        yield snapshot


def test_a_prompt_goes_on_from_a_prefix(llm: LLM) -> None:
    """As if it were one prompt, counted as one, with one part of it not evaluated."""
    ids = [5 + i % 90 for i in range(70)]
    want = llm.generate([*ids, 7, 8, 9], max_tokens=12)
    with llm.prefill(ids) as prefix:
        before = llm.engine.counters.evaluated_tokens
        for out in (
            llm.generate([7, 8, 9], prefix=prefix, max_tokens=12),
            llm.generate([*ids, 7, 8, 9], max_tokens=12),  # found by itself
        ):
            assert out.token_ids == want.token_ids
            assert (out.timings.prompt_tokens, out.timings.reused_tokens) == (73, 70)
        assert llm.engine.counters.evaluated_tokens - before == 6
        # Nothing more: the prefix's last token is evaluated again.
        out = llm.generate([], prefix=prefix, max_tokens=12)
        assert out.timings.reused_tokens == 69
        many = llm.generate([[*ids, 7, 8, 9], [1, 2, 3]], max_tokens=12)
        assert many[0].token_ids == want.token_ids
        assert [one.timings.reused_tokens for one in many] == [70, 0]
        with pytest.raises(UsageError, match="one prompt, not with a list"):
            llm.generate([[1], [2]], prefix=prefix)  # type: ignore[list-item]
    assert out.token_ids == llm.generate(ids, max_tokens=12).token_ids
    with pytest.raises(SessionError, match="this snapshot was released"):
        llm.stream([1], prefix=prefix)
    assert llm.generate([*ids, 7], max_tokens=2).timings.reused_tokens == 0
    assert [pool.used for pool in llm.engine.pools] == [0]


def test_an_empty_prompt_behind_an_embedding(llm: LLM) -> None:
    with llm.session() as session:
        session.prefill([1, 2])
        session.prefill(embeddings=[[0.5] * llm.engine.plan.width])
        with session.snapshot() as prefix:
            with pytest.raises(UsageError, match="prefix does not end in a token"):
                llm.generate([], prefix=prefix)
            assert len(llm.generate([3], prefix=prefix, max_tokens=4).token_ids) == 4
        session.rewind(0)
        with session.snapshot() as empty, pytest.raises(UsageError, match="the prompt is empty"):
            llm.generate([], prefix=empty)


def test_a_prefix_is_collected(llm: LLM) -> None:
    prefix = llm.prefill([5] * 70)
    assert [pool.used for pool in llm.engine.pools] == [2]
    del prefix
    gc.collect()
    assert [pool.used for pool in llm.engine.pools] == [0]


def test_chats_begin_with_a_prefix(llm: LLM, prefix: Snapshot) -> None:
    """What all renderings share is evaluated once, and answers are those of no prefix."""
    ids = llm.chat_ids([*SYSTEM, USER])
    other = llm.chat_ids([*SYSTEM, {"role": "user", "content": "9"}])
    shared = common_prefix(ids, other)
    assert prefix.ids == ids[:shared] and len(ids) - 20 < shared < len(ids)
    assert prefix.messages == tuple(SYSTEM)
    out = llm.chat([*SYSTEM, USER], max_tokens=12)
    assert out.timings.reused_tokens == shared
    prefix.release()
    cold = llm.chat([*SYSTEM, USER], max_tokens=12)
    assert cold.token_ids == out.token_ids and cold.timings.reused_tokens == 0


def test_a_conversation_begins_with_a_prefix(llm: LLM, tmp_path: Path) -> None:
    """Through a file; after a reset, too. The first turn evaluates its own tokens only."""
    with llm.prefill_chat(SYSTEM) as made:
        made.save(tmp_path / "file")
        count = made.position
    settings = ChatSettings(max_tokens=12)
    want = llm.chat([*SYSTEM, USER], max_tokens=12)
    prefix = llm.load_prefix(tmp_path / "file")
    with Conversation(llm, prefix=prefix, settings=settings) as chat:
        assert chat.system == SYSTEM[0]["content"] and chat.messages == []
        del prefix  # the conversation holds it
        gc.collect()
        for turn in range(2):
            reused = chat.stats.reused_tokens
            pieces = list(chat.say("hello"))
            assert chat.stats.reused_tokens - reused == count
            assert [t for piece in pieces for t in piece.token_ids] == list(want.token_ids)
            if not turn:
                chat.reset()
        with pytest.raises(UsageError, match="has a system message already"):
            Conversation(llm, prefix=chat._prefix, system="another")
    del chat
    gc.collect()
    assert llm.engine.free_slots == 2 and [pool.used for pool in llm.engine.pools] == [0]
    with llm.prefill("plain text") as plain, pytest.raises(UsageError, match="from plain text"):
        Conversation(llm, prefix=plain)
    assert llm.engine.free_slots == 2


def test_turns_in_a_prefix(llm: LLM) -> None:
    """A prefix may hold turns, and no system message."""
    turns = [USER, {"role": "assistant", "content": "good day"}]
    settings = ChatSettings(max_tokens=8)
    with (
        llm.prefill_chat(turns) as prefix,
        Conversation(llm, prefix=prefix, settings=settings) as chat,
    ):
        assert (chat.system, chat.messages) == (None, turns)
        pieces = list(chat.say("and now?"))
        assert chat.stats.reused_tokens == prefix.position > 10
        fresh = llm.chat([*turns, {"role": "user", "content": "and now?"}], max_tokens=8)
        assert [t for piece in pieces for t in piece.token_ids] == list(fresh.token_ids)


def test_a_template_that_shares_nothing(tmp_path: Path, private_cache: Path) -> None:
    template = (
        "{{ messages[-1]['content'] }}{% for m in messages[:-1] %}{{ m['content'] }}{% endfor %}"
    )
    model = write_text_model(tmp_path / "m.gguf", template=template)
    with (
        hornito.load(model, device=DEVICE, context=128) as llm,
        pytest.raises(UsageError, match="nothing is shared"),
    ):
        llm.prefill_chat(SYSTEM)


def test_without_prefill_memory(text_model: Path, private_cache: Path) -> None:
    """Answers and conversations, token by token."""
    with hornito.load(
        text_model, device=DEVICE, weights="fp32", precision="high", context=256
    ) as llm:
        want = llm.chat([*SYSTEM, USER], max_tokens=12).token_ids
        with llm.prefill_chat(SYSTEM) as prefix:
            assert llm.release_prefill() > 0
            assert llm.chat([*SYSTEM, USER], max_tokens=12).token_ids == want
            settings = ChatSettings(max_tokens=12)
            with Conversation(llm, prefix=prefix, settings=settings) as chat:
                pieces = list(chat.say("hello"))
                assert [t for piece in pieces for t in piece.token_ids] == list(want)


def test_calls_of_functions_in_a_prefix(llm: LLM) -> None:
    """Prompts that begin with a call start from it; a conversation of text can't go on with it."""
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "rain"}]
    with llm.prefill_chat(turns) as prefix:
        ids = llm.chat_ids([*turns, {"role": "user", "content": "so?"}])
        assert prefix.ids == ids[: prefix.position]
        assert '"weather"' in llm.tokenizer.decode(prefix.ids)
        with pytest.raises(UsageError, match="calls of functions"):
            Conversation(llm, prefix=prefix)


@pytest.mark.parametrize("wrong", (None, "hello", [5], [{"role": "user"}]))
def test_a_beginning_of_what_are_no_messages(llm: LLM, wrong: Any) -> None:
    with pytest.raises(UsageError, match="messages"):
        llm.prefill_chat(wrong)


def test_a_beginning_in_text_parts(llm: LLM) -> None:
    """What the snapshot says of its messages is their text, and roles as templates call them."""
    parts = [{"type": "text", "text": SYSTEM[0]["content"]}]
    with llm.prefill_chat([{"role": "developer", "content": parts}]) as prefix:
        assert list(prefix.messages) == SYSTEM
