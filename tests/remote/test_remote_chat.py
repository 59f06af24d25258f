"""`hornito chat --via`: the same conversation over a wire, and what breaks on one."""

from __future__ import annotations

import io
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

import hornito
from hornito.cli.main import main
from hornito.conversation import Conversation
from hornito.errors import HornitoError, UsageError
from hornito.remote import ConnectionLostError, RemoteRefusal, RemoteRunner
from hornito.remote_conversation import RemoteConversation
from hornito.text.side import open_text_side
from hornito.text.tokenizer import Tokenizer
from hornito.text.vocabulary import vocabulary_of
from text_model import write_sentencepiece_model, write_text_model
from tree import own_cache

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with own_cache(tmp_path_factory):
        yield write_text_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


def stand_in(how: str) -> str:
    return shlex.join([sys.executable, str(HERE / "stand_in.py"), how])


def said(conversation: Conversation | RemoteConversation, text: str) -> tuple[str, str | None]:
    chunks = list(conversation.say(text))
    return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


@pytest.mark.gpu
def test_it_is_the_conversation_that_runs_here(model: Path, kernels: None) -> None:
    """Turns, stop strings, a cut, a reset and a new system message: the same answers."""
    options = "--weights fp32 --precision high --context 512 --max-tokens 40"
    run = [sys.executable, "-m", "hornito", "runner", str(model), *options.split()]
    odd = [sys.executable, str(HERE / "odd_pipe.py"), *run]

    def turns(conversation: Conversation | RemoteConversation) -> Iterator[object]:
        conversation.settings.max_tokens = 12
        yield said(conversation, "hello world")
        yield said(conversation, "and <|im_end|> now?")
        whole = said(conversation, "stop there")[0]
        conversation.messages[-2:] = []
        conversation.settings.stop = (whole[3:6],)
        yield said(conversation, "stop there")
        conversation.settings.stop = ()
        conversation.set_system("be brief")
        yield said(conversation, "again")
        yield conversation.stats.reused_tokens
        conversation.reset()
        yield said(conversation, "hello world")
        yield conversation.messages

    with RemoteConversation(open_text_side(model), RemoteRunner(shlex.join(odd))) as remote:
        found = list(turns(remote))
    with (
        hornito.load(model, weights="fp32", precision="high", context=512) as llm,
        Conversation(llm) as here,
    ):
        expected = list(turns(here))
    assert found == expected


@pytest.fixture
def talk(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> object:
    def run(how: str, text: str, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = main(["chat", str(model), "--via", stand_in(how), *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_answers_on_stdout_and_all_else_on_stderr(talk: object, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    text = f"hi\n/stats\n/save {path}\n/reset\n/load {path}\n/set stop x\n/set temp 1\n/help\n"
    code, out, err = talk("well", text, "--stats")  # type: ignore[operator]
    assert code == 2 and out.count("\n") == 1
    for line in (
        "runner: stand-in: ready",
        "turns: 1; ",
        "saved 2 messages; their KV cache stays with the runner",
        "the conversation is empty",
        "loaded 2 messages",
        "stop 'x'",
        "temp is the runner's: give it in the command of --via",
        "tok/s",
    ):
        assert line in err, line
    assert "device:" not in err and "ignore-eos" not in err


@pytest.mark.parametrize(
    ("how", "what", "answers"),
    (
        (
            "die",
            r"hung up \(exit code 3\); it said:\n  stand-in: ready\n  stand-in: out of power",
            2,
        ),
        ("cut", r"hung up \(exit code 0\)", 2),
        ("noise", r"wrote 'Segmentation fault', which is no line of the protocol", 2),
        ("mute", r"hung up \(exit code 7\)", 0),
        ("flood", r"wrote '\[2Jwelcome' and 200 more lines", 0),
        ("endless", r"wrote a line that begins with '\[2Jwelcome.*' and has no end", 0),
    ),
)
def test_a_dropped_connection_says_so(talk: object, how: str, what: str, answers: int) -> None:
    """The chat ends with exit code 1 and the reason; what had come was printed."""
    code, out, err = talk(how, "hi\nagain\nnever\n")  # type: ignore[operator]
    assert code == 1 and "Traceback" not in err and "\x1b" not in err
    assert re.search(
        "hornito: error: the connection to the runner is lost: the command " + what, err
    )
    assert out.count("\n") == answers


def test_a_refused_turn_does_not_end_the_chat(model: Path) -> None:
    with RemoteConversation(open_text_side(model), RemoteRunner(stand_in("refuse"))) as chat:
        first = said(chat, "one")
        held = chat.position
        with pytest.raises(RemoteRefusal, match=r"too many +tokens"):
            said(chat, "two")
        assert chat.position < held + 40
        chat.reset()
        assert said(chat, "one") == first


def test_an_interrupted_answer_stays_as_far_as_it_came(model: Path) -> None:
    """What the runner still says of it is dropped before the next turn."""
    with RemoteConversation(open_text_side(model), RemoteRunner(stand_in("slow"))) as chat:
        chunks = chat.say("hello")
        next(chunks)
        chat.interrupt()
        last = list(chunks)[-1]
        assert last.finish_reason == "interrupted" and len(chat.messages) == 2
        assert chat.stats.generated_tokens <= 2
        whole = said(chat, "x")
        assert whole[1] == "stop"
        chunks = chat.say("bye")
        next(chunks)
        began = time.monotonic()
    assert time.monotonic() - began < 4  # a runner in the middle of an answer is not waited for


@pytest.mark.gpu
def test_another_model_behind_the_command_is_refused(
    model: Path,
    kernels: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the first message, naming both; the same words in another form are none."""
    options = "--weights fp32 --context 512 --max-tokens 4"
    other = write_sentencepiece_model(tmp_path / "other.gguf")
    for far, code in ((other, 2), (model, 0)):
        run = [sys.executable, "-m", "hornito", "runner", str(far), *options.split()]
        monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
        assert main(["chat", str(model), "--via", shlex.join(run)]) == code
        captured = capsys.readouterr()
        assert "warning" not in captured.err
        if code:
            assert captured.out == "" and "the models don't match: the runner has " in captured.err
            assert str(other) in captured.err and f"{model} here" in captured.err


def test_a_runner_of_an_older_version_is_warned_of(talk: object, model: Path) -> None:
    code, out, err = talk("well", "hi\n")  # type: ignore[operator]
    assert code == 0 and out.count("\n") == 1
    assert "warning: the runner can't say which words its model has (it is older" in err
    assert str(model) in err


def test_an_id_that_the_vocabulary_lacks_ends_the_chat(talk: object) -> None:
    code, _, err = talk("foreign", "hi\nnever\n")  # type: ignore[operator]
    assert code == 1 and err.count("outside the vocabulary of 512") == 1


def test_a_vocabulary_is_the_same_in_every_form(model: Path) -> None:
    """GGUF files name the ids that a directory has no words for."""
    words = ["a", "[PAD1]", "<0x0A>", "[PAD3]", ""]

    class Words:
        vocab_size = 5

        def id_to_piece(self, token: int) -> str:
            return words[token]

    padded = vocabulary_of(cast("Tokenizer", Words()))
    assert padded.size == 3
    words[1:2], Words.vocab_size = [""], 3
    assert vocabulary_of(cast("Tokenizer", Words())) == padded
    words[1] = "c"
    assert vocabulary_of(cast("Tokenizer", Words())) != padded
    assert vocabulary_of(open_text_side(model).tokenizer).size == 512


def test_what_cannot_be_started(model: Path) -> None:
    for command, reason in (
        ("no-such-command-here x", "no-such-command-here can't be started"),
        ("'", "No closing quotation"),
        ("", "needs a command"),
    ):
        with pytest.raises(UsageError, match=reason):
            RemoteRunner(command)
    assert isinstance(ConnectionLostError("x"), HornitoError)


def test_options_of_the_runner_are_refused_here(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, value in (("--temp", "1"), ("--context", "99"), ("--prefix", "x")):
        assert main(["chat", str(model), "--via", stand_in("well"), flag, value]) == 2
        assert f"{flag} is for the runner" in capsys.readouterr().err


def test_a_model_without_words(tmp_path: Path, model: Path) -> None:
    path = write_text_model(tmp_path / "m.gguf", template=None)
    with pytest.raises(UsageError, match="has no chat template, so it can't chat"):
        open_text_side(path)
    assert open_text_side(model).eos_ids
