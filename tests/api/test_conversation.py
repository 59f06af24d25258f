"""A conversation in the KV cache: what is reused, what is evaluated, and that nothing differs from
a fresh start."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hornito.api import LLM
from hornito.conversation import ChatSettings, Conversation
from hornito.dialogue import read_conversation
from hornito.errors import ContextOverflowError, FormatError, SessionError, UsageError
from hornito.runtime.prefix import common_prefix
from hornito.runtime.results import Chunk
from text_model import STRICT_TEMPLATE, write_text_directory, write_text_model

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("HORNITO_DEVICE")


@pytest.fixture
def chat(llm: LLM) -> Iterator[Conversation]:
    with Conversation(llm, settings=ChatSettings(max_tokens=12)) as conversation:
        yield conversation


def say(chat: Conversation, text: str) -> tuple[str, list[int], str]:
    """Text, ids and finish reason of an answer."""
    chunks = list(chat.say(text))
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert chunks[-1].finish_reason is not None
    return (
        "".join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.token_ids],
        chunks[-1].finish_reason,
    )


def test_each_turn_equals_a_fresh_start(llm: LLM, chat: Conversation) -> None:
    messages = []
    for text in ("hello world", "and now?", "x" * 100, "bye"):
        messages.append({"role": "user", "content": text})
        fresh = llm.chat(messages, max_tokens=12)
        answer, ids, reason = say(chat, text)
        assert ids == list(fresh.token_ids) and answer == fresh.text
        assert reason == fresh.finish_reason
        messages.append({"role": "assistant", "content": answer})
        assert chat.messages == messages


def test_only_new_ids_are_evaluated(llm: LLM, chat: Conversation) -> None:
    say(chat, "hello world")
    first = len(llm.chat_ids([{"role": "user", "content": "hello world"}]))
    assert (chat.stats.reused_tokens, chat.stats.evaluated_tokens) == (0, first)
    before = llm.engine.counters.evaluated_tokens
    held = list(chat._session.ids)
    say(chat, "again")
    ids = llm.chat_ids([*chat.messages[:2], {"role": "user", "content": "again"}])
    shared = common_prefix(held, ids)
    # The prompt of the first turn at least; more where the answer's text encodes to its tokens.
    assert shared >= first
    assert chat.stats.reused_tokens == shared
    assert chat.stats.evaluated_tokens == first + len(ids) - shared
    assert llm.engine.counters.evaluated_tokens - before == len(ids) - shared
    assert chat.stats.turns == 2 and chat.stats.generated_tokens == 24
    timings = list(chat.say("third"))[-1].timings
    assert timings is not None and timings.reused_tokens > shared
    assert timings.prompt_tokens == len(llm.chat_ids([*chat.messages[:-1]]))


def test_an_answer_is_reused_where_its_text_gives_its_tokens(
    chat: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of an answer as the template would give them: all of the cache is reused."""
    say(chat, "hello world")
    held = list(chat._session.ids)
    monkeypatch.setattr(chat, "_chat_ids", lambda text: [*held, 5, 6, 7])
    say(chat, "next")
    assert chat.stats.reused_tokens == len(held)


def test_reset_and_system(llm: LLM, chat: Conversation) -> None:
    first = say(chat, "hello")
    chat.set_system("be kind")
    other = say(chat, "hello")
    system = {"role": "system", "content": "be kind"}
    chat.reset()
    assert chat.position == 0 and chat.messages == [] and chat.system == "be kind"
    third = say(chat, "hello")
    fresh = llm.chat([system, {"role": "user", "content": "hello"}], max_tokens=12)
    assert third[1] == list(fresh.token_ids)
    chat.set_system(None)
    chat.reset()
    assert say(chat, "hello") == first
    assert other[1] != first[1]


def test_interrupt_keeps_the_partial_answer(llm: LLM, chat: Conversation) -> None:
    chunks: list[Chunk] = []
    # More than a fast device has under way at the third piece.
    chat.settings = replace(chat.settings, max_tokens=200)
    for chunk in chat.say("hello"):
        chunks.append(chunk)
        if len(chunks) == 3:
            chat.interrupt()
    assert chunks[-1].finish_reason == "interrupted" and chunks[-1].timings is not None
    text = "".join(chunk.text for chunk in chunks)
    assert chat.messages[-1] == {"role": "assistant", "content": text}
    assert 1 <= chat.stats.generated_tokens < 200
    messages = [*chat.messages, {"role": "user", "content": "go on"}]
    chat.settings = replace(chat.settings, max_tokens=12)
    assert say(chat, "go on")[1] == list(llm.chat(messages, max_tokens=12).token_ids)


def test_an_interrupted_prompt_leaves_no_turn(chat: Conversation) -> None:
    chunks = chat.say("hello")
    chat.interrupt()
    assert [chunk.finish_reason for chunk in chunks] == ["interrupted"]
    assert chat.messages == [] and chat.stats.turns == 0
    assert say(chat, "hello")[2] in ("length", "stop")


def test_closing_the_iterator_keeps_the_partial_answer(chat: Conversation) -> None:
    chunks = chat.say("hello")
    text = next(chunks).text + next(chunks).text
    chunks.close()  # type: ignore[attr-defined]
    assert chat.messages[-1] == {"role": "assistant", "content": text}


def test_stop_strings_do_not_disturb_the_next_turn(llm: LLM, chat: Conversation) -> None:
    whole = say(chat, "hello")[0]
    stop = next(whole[i : i + 2] for i in range(2, len(whole)) if "\ufffd" not in whole[i : i + 2])
    chat.reset()
    chat.settings.stop = (stop,)
    text, _, reason = say(chat, "hello")
    assert reason == "stop" and text == whole[: whole.index(stop)]
    chat.settings.stop = ()
    messages = [*chat.messages, {"role": "user", "content": "more"}]
    assert say(chat, "more")[1] == list(llm.chat(messages, max_tokens=12).token_ids)


def test_overflow_leaves_the_conversation_intact(llm: LLM, chat: Conversation) -> None:
    say(chat, "hello")
    position, messages = chat.position, list(chat.messages)
    with pytest.raises(ContextOverflowError) as caught:
        chat.say("x" * 600)
    assert caught.value.context == 512 and caught.value.tokens > 600
    for part in (str(caught.value.tokens), "512", "/reset", "made for 512", "--overflow"):
        assert part in str(caught.value)
    assert (chat.position, chat.messages) == (position, messages)
    say(chat, "still here")
    assert chat.stats.turns == 2 and chat.stats.reused_tokens > 0


def test_the_end_of_the_context_ends_an_answer(llm: LLM, chat: Conversation) -> None:
    chat.settings.max_tokens, chat.settings.ignore_eos = 1000, True
    _, ids, reason = say(chat, "y" * 440)
    assert reason == "length" and 0 < len(ids) < 100
    assert chat.position >= llm.context - 1


def test_a_long_prompt_is_cut_where_one_call_would_cut_it(llm: LLM, chat: Conversation) -> None:
    largest = max(rows for kind, rows in llm.engine.plan.buckets if kind == "chunk")
    text = "z" * (largest + 50)
    if largest + 150 > llm.context:
        pytest.skip(f"the largest bucket is {largest}")
    fresh = llm.chat([{"role": "user", "content": text}], max_tokens=12)
    assert say(chat, text)[1] == list(fresh.token_ids)


def test_save_and_load(llm: LLM, chat: Conversation, tmp_path: Path) -> None:
    chat.set_system("be brief")
    say(chat, "héllo")
    chat.save(tmp_path / "c.json")
    data = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert [m["role"] for m in data["messages"]] == ["system", "user", "assistant"]
    want = say(chat, "go on")
    with Conversation(llm, settings=ChatSettings(max_tokens=12)) as other:
        other.load(tmp_path / "c.json")
        assert other.system == "be brief" and len(other.messages) == 2
        assert say(other, "go on") == want


def test_the_kv_cache_is_saved_with_the_conversation(
    llm: LLM, chat: Conversation, tmp_path: Path
) -> None:
    """After a load only the new message is evaluated, and the answer is that of the original."""
    say(chat, "hello there")
    size = chat.save(tmp_path / "c.json")
    assert size == (tmp_path / "c.json.kv").stat().st_size > 1000
    held = chat.position
    want = say(chat, "go on")
    shared = chat.stats.reused_tokens
    chat.close()
    with Conversation(llm, settings=ChatSettings(max_tokens=12)) as other:
        assert other.load(tmp_path / "c.json") == "" and other.position == held
        assert say(other, "go on") == want
        assert other.stats.reused_tokens == shared > 10


def test_a_kv_cache_that_does_not_fit_is_evaluated_again(
    llm: LLM, chat: Conversation, tmp_path: Path
) -> None:
    """Damaged, missing or of nothing: the reason is given, and the conversation goes on."""
    assert chat.save(tmp_path / "empty.json") == 0 and not (tmp_path / "empty.json.kv").exists()
    say(chat, "hello there")
    chat.save(tmp_path / "c.json")
    want = say(chat, "go on")
    kv = tmp_path / "c.json.kv"
    whole = kv.read_bytes()
    for data, reason in ((whole[:-9], "no readable snapshot file"), (None, "there is no file")):
        if data is None:
            kv.unlink()
        else:
            kv.write_bytes(data)
        with Conversation(llm, settings=ChatSettings(max_tokens=12)) as other:
            assert re.search(reason, other.load(tmp_path / "c.json"))
            assert other.position == 0 and len(other.messages) == 2
            assert say(other, "go on") == want


def test_a_plain_list_of_messages_loads(chat: Conversation, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "m.json"
    path.write_text(json.dumps(messages))
    chat.load(path)
    assert chat.messages == messages and chat.system is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "no saved conversation"),
        ('{"format": "x", "version": 1, "messages": []}', "format 'x'"),
        ('{"format": "hornito-chat", "version": 2, "messages": []}', "version 2"),
        ('{"format": "hornito-chat", "version": 1}', "no list of messages"),
        ('[{"role": "user"}]', "messages\\[0\\]"),
        ('[{"role": "owner", "content": "x"}]', "messages\\[0\\].role must be one of"),
        ('[{"role": "user", "content": 3}]', "messages\\[0\\]"),
        ('[{"role": "tool", "content": "rain"}]', "messages\\[0\\] is of a call of functions"),
        ("[" * 100000, "no saved conversation"),
    ],
)
def test_damaged_files(chat: Conversation, tmp_path: Path, text: str, what: str) -> None:
    say(chat, "hello")
    before = list(chat.messages)
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=what):
        chat.load(path)
    assert chat.messages == before
    with pytest.raises(UsageError, match="there is no file"):
        read_conversation(tmp_path / "none.json")


def test_strict_templates(tmp_path: Path, private_cache: Path) -> None:
    """A template that takes no system message says so, and the conversation stays usable."""
    import hornito

    model = write_text_model(tmp_path / "strict.gguf", template=STRICT_TEMPLATE)
    with hornito.load(model, device=DEVICE, context=256) as llm:
        with pytest.raises(UsageError, match="System role not supported"):
            Conversation(llm, system="x")
        assert llm.engine.free_slots == 1
        with Conversation(llm, settings=ChatSettings(max_tokens=4)) as chat:
            with pytest.raises(UsageError, match="System role not supported"):
                chat.set_system("x")
            say(chat, "a")
            say(chat, "b")
            assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
            path = tmp_path / "m.json"
            path.write_text('[{"role": "user", "content": "a"}]')
            with pytest.raises(UsageError, match="must alternate"):
                chat.load(path)


def test_sliding_windows(tmp_path: Path, private_cache: Path) -> None:
    """Mistral's window of 16: where a turn differs far back, what the end of the last prompt still
    holds is reused, the rest is evaluated again, and both are counted as such."""
    import hornito

    folder = write_text_directory(tmp_path / "mistral", "mistral-tiny")
    settings = ChatSettings(max_tokens=100, ignore_eos=True)
    with (
        hornito.load(folder, slots=2, weights="fp32", precision="high", device=DEVICE) as llm,
        Conversation(llm, settings=settings) as chat,
    ):
        say(chat, "hello world, this is the first message")
        prompt = llm.chat_ids(chat.messages[:1])
        position, evaluated = chat.position, llm.engine.counters.evaluated_tokens
        # All turns but the beginning of the first one are others now.
        chat.messages[0]["content"] = "hello world, this is another message"
        chat.messages[1]["content"] = "an answer"
        reused, counted = chat.stats.reused_tokens, chat.stats.evaluated_tokens
        chat.settings.max_tokens = 12
        answer = say(chat, "go on")
        ids = llm.chat_ids(chat.messages[:-1])
        kept = common_prefix(ids, prompt)
        assert 10 < kept < position - 64 - 16
        assert chat.stats.reused_tokens - reused == kept
        assert chat.stats.evaluated_tokens - counted == len(ids) - kept
        assert llm.engine.counters.evaluated_tokens - evaluated == len(ids) - kept
        fresh = llm.chat(chat.messages[:-1], max_tokens=12, ignore_eos=True)
        assert answer[1] == list(fresh.token_ids)


def test_slots(llm: LLM, tmp_path: Path, private_cache: Path) -> None:
    with Conversation(llm), Conversation(llm), pytest.raises(SessionError, match="all 2 slots"):
        Conversation(llm)
    assert llm.engine.free_slots == 2


def test_a_model_without_a_template(tmp_path: Path, private_cache: Path) -> None:
    import hornito

    model = write_text_model(tmp_path / "base.gguf", template=None)
    with (
        hornito.load(model, device=DEVICE, context=64) as llm,
        pytest.raises(UsageError, match="no chat template"),
    ):
        Conversation(llm)


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([], [1]) == 0 and common_prefix([1], [1]) == 1
