"""E7: what happens at the context's end is what the policy says, the same in the interface, in
chats and on the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hornito
from hornito.api import LLM, Overflow
from hornito.cli.main import main
from hornito.conversation import ChatSettings, Conversation
from hornito.errors import ContextOverflowError, UsageError
from hornito.runtime.session import Session

pytestmark = pytest.mark.gpu

CONTEXT = 64
IDS = [5 + 7 * i % 400 for i in range(90)]
CUT = Overflow("truncate", keep_first=10, keep_last=30)
KEPT = IDS[:10] + IDS[-30:]
LOAD: dict[str, Any] = {"weights": "fp32", "precision": "high", "context": CONTEXT}


@pytest.fixture(scope="module")
def small(text_model: Path, private_cache: Path, kernels: None) -> Iterator[LLM]:
    with hornito.load(text_model, device=os.environ.get("HORNITO_DEVICE"), slots=2, **LOAD) as llm:
        yield llm


def fresh_run(llm: LLM, ids: list[int], count: int, overflow: Overflow) -> list[int]:
    """Greedy tokens, each from the ids so far; where they do not fit, from those that the policy
    keeps, in a session of their own."""
    ids, tokens = list(ids), list[int]()
    while len(tokens) < count:
        if len(ids) > CONTEXT:
            ids = [ids[at] for at in overflow.kept(len(ids), CONTEXT)]
        with Session(llm.engine) as session:
            session.prefill(ids)
            assert session.pending is not None
            tokens.append(session.pending)
        ids.append(tokens[-1])
    return tokens


def test_e7_error_is_the_default(small: LLM) -> None:
    """E7: with numbers, before anything is evaluated, in a list of prompts as well."""
    before = small.engine.counters.evaluated_tokens
    for call in (
        lambda: small.generate(IDS),
        lambda: small.generate([IDS[:5], IDS]),
        lambda: small.prefill(IDS),
    ):
        with pytest.raises(ContextOverflowError, match="90 tokens; the context holds 64") as caught:
            call()
        assert (caught.value.tokens, caught.value.context) == (90, 64)
    assert small.engine.counters.evaluated_tokens == before
    assert small.engine.free_slots == 2
    out = small.generate(IDS[:60], max_tokens=30, ignore_eos=True)
    assert (len(out.token_ids), out.finish_reason) == (5, "length")
    with small.prefill(IDS[:50]) as prefix:
        with pytest.raises(ContextOverflowError, match="70 tokens; the context holds 64"):
            small.generate(IDS[50:70], prefix=prefix)
        out = small.generate(IDS[50:70], prefix=prefix, overflow=CUT, max_tokens=4)
        want = small.generate(IDS[:10] + IDS[40:70], max_tokens=4)
        assert out.token_ids == want.token_ids


def test_the_advised_context_holds_an_answer(small: LLM) -> None:
    most = small.model_context
    for call, room in (
        (lambda: small.generate(IDS, max_tokens=20), 20),
        (lambda: small.generate([IDS], max_tokens=21), 21),
        (lambda: small.generate(IDS, max_tokens=1 << 20), most - 90),
        (lambda: small.prefill(IDS), 256),
        (lambda: Session(small.engine).prefill(IDS), 256),
    ):
        blocks = -(-(90 + room) // 64)  # of the KV cache, which a context has whole
        with pytest.raises(ContextOverflowError, match=rf"--context {min(64 * blocks, most)},"):
            call()


def test_e7_truncate_equals_a_fresh_run(small: LLM) -> None:
    """E7: a prompt too long, an answer that outgrows the context once and again, alone and in a
    list beside others."""
    options: dict[str, Any] = {"ignore_eos": True, "overflow": CUT}
    out = small.generate(IDS, max_tokens=20, **options)
    assert out.token_ids == small.generate(KEPT, max_tokens=20, ignore_eos=True).token_ids
    assert out.timings.prompt_tokens == 90
    for prompt, count in ((IDS, 60), (IDS[:64], 70), (IDS[:3], 150)):
        long = small.generate(prompt, max_tokens=count, **options)
        assert list(long.token_ids) == fresh_run(small, prompt, count, CUT)
        assert long.finish_reason == "length"
    prompts = [IDS, IDS[:3], IDS[:64]]
    together = small.generate(prompts, max_tokens=70, **options)
    for one, prompt in zip(together, prompts, strict=True):
        assert list(one.token_ids) == fresh_run(small, prompt, 70, CUT)
    half = small.generate(IDS, max_tokens=5, ignore_eos=True, overflow=Overflow("truncate"))
    assert half.token_ids == small.generate(IDS[-32:], max_tokens=5, ignore_eos=True).token_ids


@pytest.mark.parametrize("count", [60, 20])
def test_e7_draws_and_penalties_start_again(small: LLM, count: int) -> None:
    """E7: what is kept is the prompt of the fresh run, for the penalties and for the draws."""
    sampling: dict[str, Any] = {
        "temperature": 0.8,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
    }
    before = 65 - count
    for seed in range(6):
        sampling["seed"] = seed
        out = small.generate(IDS[:count], max_tokens=before + 20, overflow=CUT, **sampling)
        first = small.generate(IDS[:count], max_tokens=before, **sampling)
        assert out.token_ids[:before] == first.token_ids
        held = [*IDS[:count], *first.token_ids]
        rest = small.generate(held[:10] + held[-30:], max_tokens=20, **sampling)
        assert out.token_ids[before:] == rest.token_ids


def test_policies_that_leave_no_room(small: LLM) -> None:
    """Before anything is evaluated, however short the prompt."""
    for first, last in ((40, 24), (64, None), (0, 64)):
        with pytest.raises(UsageError, match=r"leave no room in a context of 64"):
            small.generate([1], overflow=Overflow("truncate", first, last))
    with pytest.raises(UsageError, match="error, truncate, not 'shift'"):
        Overflow("shift")
    for first, last, name in ((-1, None, "keep_first"), (0, 0, "keep_last")):
        with pytest.raises(UsageError, match=f"{name} must be at least"):
            Overflow("truncate", first, last)


def test_e7_a_chat_stays_intact(small: LLM) -> None:
    """E7: with `error`, what was said and what is in the cache are as before."""
    with Conversation(small, settings=ChatSettings(max_tokens=2)) as chat:
        list(chat.say("a"))
        state = (list(chat.messages), list(chat._session.ids), chat._session.pending)
        with pytest.raises(ContextOverflowError, match=r"--overflow truncate") as caught:
            list(chat.say("x" * 90))
        assert caught.value.context == 64
        assert (chat.messages, chat._session.ids, chat._session.pending) == state
        reused = chat.stats.reused_tokens
        list(chat.say("y"))
        assert chat.stats.reused_tokens > reused


def test_e7_a_chat_goes_on(small: LLM) -> None:
    """E7: with `truncate`, each turn is a fresh run on the first and last ids of its rendering."""
    settings = ChatSettings(max_tokens=20, ignore_eos=True, overflow=CUT)
    with Conversation(small, settings=settings) as chat:
        for turn in range(4):
            asked = [*chat.messages, {"role": "user", "content": f"number {turn}"}]
            answer = [t for piece in chat.say(f"number {turn}") for t in piece.token_ids]
            ids = small.chat_ids(asked)
            assert answer == fresh_run(small, ids, 20, CUT), turn
        assert len(ids) > 2 * CONTEXT and chat.position <= CONTEXT
        assert len(chat.messages) == 8
        chat.settings.overflow = Overflow("truncate", 60, 10)
        with pytest.raises(UsageError, match="leave no room"):
            chat.say("more")


def test_e7_on_the_command_line(
    small: LLM, text_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """E7: the same words, numbers and tokens."""
    ids = ",".join(map(str, IDS))
    model = ["--context", "64", "--weights", "fp32", "--precision", "high", "--json"]
    command = ["run", str(text_model), "--ids", ids, "--max-tokens", "40", "--ignore-eos", *model]
    assert main(command) == 1
    assert "90 tokens; the context holds 64" in capsys.readouterr().err
    flags = ["--overflow", "truncate", "--keep-first", "10", "--keep-last", "30"]
    assert main([*command, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["token_ids"] == fresh_run(small, IDS, 40, CUT)
    assert main([*command, "--keep-first", "3"]) == 2
    assert "--keep-first goes with --overflow truncate" in capsys.readouterr().err
    assert main([*command, "--overflow", "shift"]) == 2
    assert "'shift' is none of error, truncate" in capsys.readouterr().err
    assert main([*command, "--overflow", "truncate", "--keep-last", "64"]) == 2
    assert "leave no room" in capsys.readouterr().err
