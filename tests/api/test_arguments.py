"""Prompts and policies of the wrong kind, on a loaded model."""

from __future__ import annotations

from typing import Any

import pytest

from hornito.api import LLM, Overflow
from hornito.conversation import ChatSettings, Conversation
from hornito.errors import UsageError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("prompt", "message"),
    (
        (None, "the prompt must be text or a list of token ids, not None"),
        (5, "the prompt must be text or a list of token ids, not 5"),
        ([1.0, 2.0], "the prompt must be text or a list of token ids, not 1.0"),
        ([3, 2.0], "the prompt must be text or a list of token ids, not 3"),
        ([[3, 2.5]], "which are whole numbers; at place 1 is 2.5"),
        ([True, False], "which are whole numbers; at place 0 is True"),
    ),
)
def test_what_is_no_prompt(llm: LLM, prompt: Any, message: str) -> None:
    free = llm.engine.free_slots
    with pytest.raises(UsageError, match=message):
        llm.generate(prompt, max_tokens=2)
    assert llm.engine.free_slots == free


def test_a_policy_by_its_name(llm: LLM) -> None:
    prompt = [5 + at % 40 for at in range(600)]  # the context holds 512
    named = llm.generate(prompt, max_tokens=3, overflow="truncate")
    assert named.token_ids == llm.generate(prompt, max_tokens=3, overflow=CUT).token_ids
    assert len(named.token_ids) == 3
    with Conversation(llm, settings=ChatSettings(max_tokens=2, overflow="truncate")) as chat:
        assert sum(len(piece.token_ids) for piece in chat.say("x" * 2000)) == 2


CUT = Overflow("truncate")


def test_what_can_not_be_scored(llm: LLM) -> None:
    nothing: Any = None
    halves: Any = [2.5]
    with pytest.raises(
        UsageError, match="the prompt must be text or a list of token ids, not None"
    ):
        llm.score(nothing, nothing)
    with pytest.raises(UsageError, match=r"the continuation must be .* at place 0 is 2\.5"):
        llm.score([3], halves)
