"""Sampling through the Python interface: parameters, seeds, log-probabilities, lists, chats."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from hornito.api import LLM
from hornito.cli.settings import describe_settings, set_setting
from hornito.conversation import ChatSettings, Conversation
from hornito.errors import UsageError
from hornito.runtime.results import TokenLogprob
from hornito.runtime.sampler import SamplingKeywords, SamplingParams

pytestmark = pytest.mark.gpu

IDS = [10, 11, 12, 13, 14]
OPTIONS: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
WARM: dict[str, Any] = {**OPTIONS, "temperature": 1.0, "seed": 7}


def test_the_default_is_greedy(llm: LLM) -> None:
    plain = llm.generate(IDS, **OPTIONS)
    assert plain.seed is None and plain.logprobs is None
    for values in ({"temperature": 0}, {"temperature": 1e-8}, {"temperature": 0.0, "top_p": 0.5}):
        assert llm.generate(IDS, **OPTIONS, **values).token_ids == plain.token_ids


def test_seeds(llm: LLM) -> None:
    """The same seed gives the same answer; without one, the result says which it was."""
    first = llm.generate(IDS, **WARM)
    assert first.seed == 7
    assert llm.generate(IDS, **WARM).token_ids == first.token_ids
    free = [llm.generate(IDS, **OPTIONS, temperature=1.0) for _ in range(3)]
    assert len({out.token_ids for out in free}) == 3
    again = llm.generate(IDS, **OPTIONS, temperature=1.0, seed=free[0].seed)
    assert again.token_ids == free[0].token_ids


@pytest.mark.parametrize(
    "values",
    (
        {"temperature": 0.3},
        {"top_k": 2},
        {"top_p": 0.1},
        {"min_p": 0.5},
        {"repetition_penalty": 3.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": -2.0},
        {"logit_bias": {20: 12.0}},
        {"seed": 8},
    ),
)
def test_f5_every_parameter_changes_the_answer(llm: LLM, values: dict[str, Any]) -> None:
    base = llm.generate(IDS, **{**WARM, "max_tokens": 40})
    assert llm.generate(IDS, **{**WARM, "max_tokens": 40, **values}).token_ids != base.token_ids


def test_log_probabilities(llm: LLM) -> None:
    """They belong to the tokens, in whole answers and in pieces, and agree with `score`."""
    for values in ({}, {"temperature": 1.5, "seed": 1, "logit_bias": {9: 5.0}}):
        out = llm.generate(IDS, **OPTIONS, logprobs=3, **values)
        assert out.logprobs is not None
        assert [one.token_id for one in out.logprobs] == list(out.token_ids)
        exact = llm.score(IDS, list(out.token_ids)).token_logprobs
        np.testing.assert_allclose([one.logprob for one in out.logprobs], exact, atol=1e-3)
        assert all(isinstance(one, TokenLogprob) and len(one.top) == 3 for one in out.logprobs)
        assert all(one.top[0][1] >= one.top[1][1] >= one.top[2][1] for one in out.logprobs)
        pieces = list(llm.stream(IDS, **OPTIONS, logprobs=3, **values))
        streamed = [one for piece in pieces for one in piece.logprobs or ()]
        assert streamed == list(out.logprobs)
    chosen = llm.generate(IDS, **OPTIONS, logprobs=0).logprobs
    assert chosen is not None and {one.top for one in chosen} == {()}


def test_a_list_of_prompts_is_each_alone(llm: LLM) -> None:
    prompts = [[20, 21], IDS, [30, 31, 32], [40], [50, 51]]
    values = {**WARM, "top_k": 40, "presence_penalty": 0.5, "logprobs": 2}
    alone = [llm.generate(one, **values) for one in prompts]
    together = llm.generate(prompts, **values)
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    assert {out.seed for out in together} == {7}
    for one, other in zip(alone, together, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        assert len(one.logprobs) == len(other.logprobs) == 16


@pytest.mark.parametrize(
    ("values", "message"),
    (
        ({"temperature": float("nan")}, "temperature must be from 0 to 100, not nan"),
        ({"temperature": -1}, "temperature must be from 0 to 100, not -1"),
        ({"temperature": 1.0, "top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
        ({"temperature": 1.0, "top_k": -5}, "top_k must be from 0 to 2147483647, not -5"),
        ({"top_k": 40}, "top_k needs a temperature"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias names token 1000000; the vocabulary has ids"),
        ({"sampling": "mode"}, "sampling must be 'default' or 'model'"),
        ({"top": 40}, "there is no argument 'top'"),
    ),
)
def test_f6_wrong_parameters_are_errors_before_any_work(
    llm: LLM, values: dict[str, Any], message: str
) -> None:
    before = llm.engine.counters.evaluated_tokens
    for call in (llm.generate, llm.stream):
        with pytest.raises(UsageError, match=message):
            call(IDS, **values)  # type: ignore[operator]
    with pytest.raises(UsageError, match=message):
        llm.generate([IDS, IDS], **values)
    assert llm.engine.counters.evaluated_tokens == before


def test_every_method_takes_the_same_keywords() -> None:
    for method in (LLM.generate, LLM.stream, LLM.chat, LLM.stream_chat, LLM.stream_session):
        last = list(inspect.signature(method).parameters.values())[-1]
        assert last.kind is last.VAR_KEYWORD and "Keywords" in str(last.annotation)
    names = set(SamplingParams.__dataclass_fields__)
    assert set(SamplingKeywords.__annotations__) == names | {"sampling"}


def test_a_conversation_samples(llm: LLM) -> None:
    settings = ChatSettings(max_tokens=12, ignore_eos=True)
    set_setting(settings, "temp", "1.5")
    set_setting(settings, "--top-k", "50")
    set_setting(settings, "seed", "3")
    assert settings.sampling == {"temperature": 1.5, "top_k": 50, "seed": 3}
    assert "temp 1.5" in describe_settings(settings)
    with pytest.raises(UsageError, match="top_p must be above 0"):
        set_setting(settings, "top-p", "0")
    assert "top_p" not in settings.sampling
    answers = []
    for _ in range(2):
        with Conversation(llm, settings=settings) as chat:
            answers.append([t for piece in chat.say("hello") for t in piece.token_ids])
    assert answers[0] == answers[1]
    messages = [{"role": "user", "content": "hello"}]
    out = llm.chat(messages, max_tokens=12, ignore_eos=True, **settings.sampling)
    assert list(out.token_ids) == answers[0]
    assert list(llm.chat(messages, max_tokens=12, ignore_eos=True).token_ids) != answers[0]
