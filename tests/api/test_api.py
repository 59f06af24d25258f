"""The Python interface: lists of prompts, scores, sessions, first spaces, names of the cache."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

import hornito
from hornito.api import LLM
from hornito.errors import ContextOverflowError, SessionError, UsageError
from text_model import write_sentencepiece_model
from tiny import log_softmax

pytestmark = pytest.mark.gpu

PROMPTS = ["hello world", "the", "a b c d e f g", "xyz" * 20, "q"]


def test_a_list_of_prompts_is_answered_in_order(llm: LLM) -> None:
    """Five prompts on two slots: three wait."""
    alone = [llm.generate(prompt, max_tokens=20) for prompt in PROMPTS]
    together = llm.generate(PROMPTS, max_tokens=20)
    assert len(together) == 5
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids and one.text == other.text
        assert one.finish_reason == other.finish_reason
        assert one.timings.prompt_tokens == other.timings.prompt_tokens
        assert other.timings.decode_tokens == len(other.token_ids) - 1
    assert llm.engine.free_slots == 2


def test_lists_of_ids_and_stop_strings(llm: LLM) -> None:
    ids = [[10, 11, 12], [20, 21]]
    alone = [llm.generate(one, max_tokens=16, ignore_eos=True) for one in ids]
    assert [g.token_ids for g in llm.generate(ids, max_tokens=16, ignore_eos=True)] == [
        g.token_ids for g in alone
    ]
    text = alone[0].text
    stop = next(text[i : i + 2] for i in range(2, len(text)) if "\ufffd" not in text[i : i + 2])
    options = {"max_tokens": 16, "ignore_eos": True, "stop": [stop]}
    want = [llm.generate(one, **options) for one in ids]  # type: ignore[call-overload]
    got = llm.generate(ids, **options)  # type: ignore[call-overload]
    assert got[0].finish_reason == "stop" and got[0].text == text[: text.index(stop)]
    assert [(g.text, g.token_ids) for g in got] == [(g.text, g.token_ids) for g in want]


def test_end_tokens_in_a_batch(llm: LLM) -> None:
    """One answer ends at an id that the other does not reach."""
    first = llm.generate([10, 11, 12], max_tokens=8, ignore_eos=True).token_ids
    second = llm.generate([20, 21], max_tokens=8, ignore_eos=True).token_ids
    end = next(token for token in first if token not in second)
    before, llm.engine.eos_ids = llm.engine.eos_ids, (end,)
    try:
        a, b = llm.generate([[10, 11, 12], [20, 21]], max_tokens=8)
    finally:
        llm.engine.eos_ids = before
    assert a.finish_reason == "stop" and a.token_ids[-1] == end
    assert a.token_ids == first[: first.index(end) + 1]
    assert b.finish_reason == "length" and b.token_ids == second


def test_one_wrong_prompt_of_a_list_starts_nothing(llm: LLM) -> None:
    before = llm.engine.counters.evaluated_tokens
    with pytest.raises(ContextOverflowError):
        llm.generate(["a", "b" * 600])
    with pytest.raises(UsageError, match="empty"):
        llm.generate(["a", ""])
    assert llm.engine.counters.evaluated_tokens == before
    with llm.session(), llm.session(), pytest.raises(SessionError, match="all 2 slots"):
        llm.generate(["a", "b"])


def test_the_context_ends_every_answer_of_a_list(llm: LLM) -> None:
    prompts = ["u" * 500, "v" * 490]
    for generation in llm.generate(prompts, max_tokens=100, ignore_eos=True):
        assert generation.finish_reason == "length" and len(generation.token_ids) < 40


def test_token_ids_as_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello world")
    text = llm.generate("hello world", max_tokens=8)
    assert llm.generate(ids, max_tokens=8).token_ids == text.token_ids
    assert llm.generate(np.array(ids), max_tokens=8).token_ids == text.token_ids  # type: ignore[call-overload]
    assert llm.generate(tuple(ids), max_tokens=8).token_ids == text.token_ids


def test_score_is_the_sum_of_log_softmax(llm: LLM) -> None:
    prompt, continuation = "hello", " world and more"
    result = llm.score(prompt, continuation)
    ids = llm.tokenizer.encode(prompt + continuation)
    start = len(llm.tokenizer.encode(prompt))
    assert list(result.token_ids) == ids[start:]
    with llm.session() as session:
        logits = session.prefill_logits(ids)
    want = [log_softmax(logits[i - 1])[ids[i]] for i in range(start, len(ids))]
    np.testing.assert_allclose(result.token_logprobs, want, atol=2e-4)
    assert result.logprob == pytest.approx(math.fsum(result.token_logprobs))
    assert result.perplexity == pytest.approx(math.exp(-result.logprob / len(want)))
    by_ids = llm.score(ids[:start], ids[start:])
    assert by_ids.token_ids == result.token_ids
    assert by_ids.logprob == pytest.approx(result.logprob, abs=1e-4)


def test_a_token_across_the_seam_is_scored(llm: LLM) -> None:
    """'hell' is one token and 'hello' another: the continuation 'o' begins inside a token."""
    hello = llm.tokenizer.encode("hello")
    assert len(hello) == 1 and llm.tokenizer.encode("hell") != hello
    result = llm.score("x hell", "o")
    assert llm.tokenizer.decode(result.token_ids) in ("hello", "o")
    assert list(result.token_ids) == llm.tokenizer.encode("x hello")[-len(result.token_ids) :]


def test_mistakes_of_score(llm: LLM) -> None:
    with pytest.raises(UsageError, match="nothing precedes"):
        llm.score([], [1])
    with pytest.raises(UsageError, match="continuation is empty"):
        llm.score("a", "")
    with pytest.raises(UsageError, match="both be text"):
        llm.score("a", [1])
    with pytest.raises(ContextOverflowError, match="601 tokens"):
        llm.score([5], [6] * 600)


def test_sessions(llm: LLM) -> None:
    want = llm.generate([5, 6, 7], max_tokens=4, ignore_eos=True)
    with llm.session() as session:
        session.prefill([5, 6])
        chunks = list(llm.stream_session(session, [7], max_tokens=4, ignore_eos=True))
        assert [token for chunk in chunks for token in chunk.token_ids] == list(want.token_ids)
        assert session.ids[:3] == [5, 6, 7] and session.position == 6
        assert session.pending == want.token_ids[-1]


def test_raw_completion_keeps_its_first_space(tmp_path: Path, private_cache: Path) -> None:
    """A SentencePiece vocabulary spells the start of a text with a space; what goes on from a
    prompt has that space, an answer in a chat does not."""
    model = write_sentencepiece_model(tmp_path / "sp.gguf")
    with hornito.load(model, device=os.environ.get("HORNITO_DEVICE"), context=256) as llm:
        assert llm.tokenizer.strips_first_space
        for prompt in ([1, 300 + i] for i in range(50)):
            raw = llm.generate(prompt, max_tokens=2, ignore_eos=True)
            if raw.token_ids[0] >= 259:
                break
        else:
            pytest.fail("no prompt gives a piece that begins with a space")
        piece = llm.tokenizer.id_to_piece(raw.token_ids[0])
        assert piece.startswith("\u2581") and raw.text.startswith(" " + piece[1:])
        alone = list(llm.stream(prompt, max_tokens=2, ignore_eos=True, continuation=False))
        assert "".join(c.text for c in alone) == raw.text.removeprefix(" ")


def test_names_from_the_cache(text_model: Path, llm: LLM) -> None:
    """A source that was loaded once is found by its name."""
    with hornito.load("tiny", device=os.environ.get("HORNITO_DEVICE"), context=64) as again:
        assert again.generate("hello", max_tokens=2).token_ids
    with pytest.raises(UsageError, match="holds fp32 weights"):
        hornito.load("tiny", device=os.environ.get("HORNITO_DEVICE"), weights="fp16")
    with pytest.raises(UsageError, match="did you mean 'tiny'"):
        hornito.load("tiyn")
