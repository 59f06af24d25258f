"""`hornito run` on a stand-in engine: what it asks for and what it prints where."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hornito
from hornito.cli.main import main
from hornito.errors import ContextOverflowError, DeviceMemoryError, NoDeviceError
from hornito.runtime.results import Chunk, Timings, TokenLogprob


@dataclass
class FakeLLM:
    """Answers ' Paris' and '.' to everything."""

    has_tokenizer: bool = True
    has_chat_template: bool = True
    device_line: str = "test device"
    feature_line: str = "float16"
    context: int = 512
    model_context: int = 512
    tokenizer: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(token_bytes={7: b" Paris", 8: b"."}.get)
    )
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    closed: bool = False

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def time_gpu(self) -> SimpleNamespace:
        return SimpleNamespace(seconds=lambda: 0.6)

    def plan_summary(self) -> str:
        return "plan: 14 dispatches a layer"

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    def chat_ids(self, messages: object) -> list[int]:
        return [1, 2, 3, 4]

    def stream(self, prompt: str | list[int], **options: Any) -> Iterator[Chunk]:
        self.calls.append(("stream", prompt, options))
        return self._chunks()

    def stream_chat(self, messages: object, **options: Any) -> Iterator[Chunk]:
        self.calls.append(("chat", messages, options))
        return self._chunks()

    def _chunks(self) -> Iterator[Chunk]:
        texts = (" Paris", ".") if self.has_tokenizer else ("", "")
        timings = Timings(31, 0.5, 2, 0.25)
        yield Chunk(texts[0], (7,))
        yield Chunk(texts[1], (8, 2), "eos", timings)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()

    def load(model: str, **options: Any) -> FakeLLM:
        options.pop("progress")
        fake.calls.append(("load", model, options))
        return fake

    monkeypatch.setitem(vars(hornito), "load", load)
    return fake


GREEDY = {"max_tokens": 256, "stop": (), "ignore_eos": False}


def test_text_gets_the_chat_template(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m.vxm", "Hi"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (" Paris.\n", "")
    load, chat = llm.calls
    assert load[:2] == ("load", "m.vxm") and load[2].pop("precision") == "normal"
    assert load[2].pop("slots") == 1 and not any(load[2].values())
    assert chat == ("chat", [{"role": "user", "content": "Hi"}], GREEDY)
    assert llm.closed


def test_options_arrive(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORNITO_DEVICE", "nvidia")
    monkeypatch.setenv("HORNITO_KV", "fp16")
    flags = "--raw --context 128 --precision high --kv fp32 --weights fp32 --max-tokens 3 --temp 0"
    more = ["--stop", "a", "--stop", "b", "--ignore-eos"]
    assert main(["run", "m.vxm", "Hi", *flags.split(), *more]) == 0
    load, stream = llm.calls
    given = {
        "device": "nvidia",
        "context": 128,
        "precision": "high",
        "kv": "fp32",
        "weights": "fp32",
        "verify": False,
    }
    assert given.items() <= load[2].items()
    options = {"max_tokens": 3, "temperature": 0.0, "stop": ("a", "b"), "ignore_eos": True}
    assert stream == ("stream", "Hi", options)


def test_without_template_the_text_is_raw(llm: FakeLLM) -> None:
    llm.has_chat_template = False
    assert main(["run", "m.vxm", "Hi"]) == 0
    assert llm.calls[1][:2] == ("stream", "Hi")


def test_stdin(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SimpleNamespace(buffer=io.BytesIO("é\n\n".encode()))
    monkeypatch.setattr("sys.stdin", text)
    assert main(["run", "m.vxm", "-", "--raw"]) == 0
    assert llm.calls[1][:2] == ("stream", "é\n")


def stdin_of(
    monkeypatch: pytest.MonkeyPatch, data: bytes, *, pipe: bool = True, terminal: bool = False
) -> None:
    """Stdin that holds `data` and has come to its end: a pipe, or the null device."""
    there, back = os.pipe() if pipe else (os.open(os.devnull, os.O_RDONLY), None)
    if back is not None:
        os.write(back, data)
        os.close(back)
    file = io.TextIOWrapper(os.fdopen(there, "rb"))
    monkeypatch.setattr(file, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stdin", file)


def test_stdin_is_the_prompt_where_there_is_none(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin_of(monkeypatch, "Où?\n".encode())
    assert main(["run", "m.vxm", "--raw"]) == 0
    assert llm.calls[1][:2] == ("stream", "Où?")
    for words in ([], ["-"]):
        for pipe in (True, False):
            stdin_of(monkeypatch, b"\n" if pipe else b"", pipe=pipe)
            capsys.readouterr()
            assert main(["run", "m.vxm", *words]) == 2
            assert "there is no prompt: stdin is empty. Give PROMPT" in capsys.readouterr().err
    stdin_of(monkeypatch, b"caf\xe9")
    assert main(["run", "m.vxm"]) == 2
    assert "stdin is not UTF-8" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", None)
    assert main(["run", "m.vxm"]) == 2


def test_text_beside_a_prompt_is_not_read(
    llm: FakeLLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Nor is it waited for, where the pipe stays open; that it lies there is said."""
    note = "stdin is not read beside PROMPT"
    text = tmp_path / "text"
    text.write_text("A text.\n")
    there, back = os.pipe()
    waiting, end = os.pipe()
    os.write(end, b"A text.")
    for file, said in ((text.open(), True), (os.fdopen(there), False), (os.fdopen(waiting), True)):
        llm.calls.clear()
        monkeypatch.setattr("sys.stdin", file)
        assert main(["run", "m.vxm", "Summarise", "--raw"]) == 0
        assert llm.calls[1][:2] == ("stream", "Summarise")
        assert (note in capsys.readouterr().err) is said
        file.close()
    os.close(back)
    os.close(end)
    stdin_of(monkeypatch, b"", pipe=False)
    assert main(["run", "m.vxm", "Summarise", "--raw"]) == 0
    monkeypatch.setattr("sys.stdin", None)
    assert main(["run", "m.vxm", "Summarise", "--raw"]) == 0
    assert note not in capsys.readouterr().err


def test_a_chat_begins_on_a_terminal(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    chats: list[Any] = []
    monkeypatch.setattr("hornito.cli.chat.run", lambda arguments: chats.append(arguments) or 0)
    stdin_of(monkeypatch, b"", terminal=True)
    assert main(["run", "m.vxm"]) == 0
    assert chats[0].max_tokens == 1024 and not llm.calls


@pytest.mark.parametrize(
    ("most", "context", "message"),
    [
        (3, 64, "the answer was cut at 3 tokens; --max-tokens 6 allows more"),
        (9, 64, "the context of 64 tokens is full; --context holds more, and --overflow truncate"),
        (9, 512, "the context of 512 tokens is full; --overflow truncate goes on with the end"),
    ],
)
def test_a_cut_answer_is_told(
    llm: FakeLLM,
    most: int,
    context: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def chunks() -> Iterator[Chunk]:
        yield Chunk(" Paris", (7, 8, 2), "length", Timings(31, 0.5, 2, 0.25))

    llm.context = context
    monkeypatch.setattr(llm, "_chunks", chunks)
    assert main(["run", "m.vxm", "Hi", "--max-tokens", str(most)]) == 0
    out, err = capsys.readouterr()
    assert out == " Paris\n" and message in err and len(err.splitlines()) == 1
    assert main(["run", "m.vxm", "Hi", "--max-tokens", str(most), "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_logprobs_show_texts(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def chunks() -> Iterator[Chunk]:
        places = (TokenLogprob(7, -0.25, ((7, -0.25), (8, -1.5))),)
        yield Chunk(" Paris", (7,), "stop", Timings(31, 0.5, 2, 0.25), places)

    monkeypatch.setattr(llm, "_chunks", chunks)
    assert main(["run", "m.vxm", "Hi", "--logprobs", "2"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "log-probability of each token, then the 2 most likely ones of its place:",
        "7 ' Paris': -0.2500  7 ' Paris': -0.2500  8 '.': -1.5000",
    ]
    llm.has_tokenizer = False
    assert main(["run", "m.vxm", "--ids", "1", "--logprobs", "2"]) == 0
    assert capsys.readouterr().err.splitlines()[1] == "7: -0.2500  7: -0.2500  8: -1.5000"


def test_ids(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m.vxm", "--ids", "1,2,3", "--show-ids"]) == 0
    assert llm.calls[1][:2] == ("stream", [1, 2, 3])
    assert capsys.readouterr().out == " Paris.\n7,8,2\n"


def test_without_tokenizer(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.has_tokenizer = llm.has_chat_template = False
    assert main(["run", "m.vxm", "Hi"]) == 2
    assert "m.vxm has no tokenizer: give the prompt as token ids" in capsys.readouterr().err
    assert main(["run", "m.vxm", "--ids", "1"]) == 0
    assert capsys.readouterr().out == "7,8,2\n"


def test_stats_go_to_stderr(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m.vxm", "Hi", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == " Paris.\n"
    assert captured.err.splitlines() == [
        "device: test device",
        "features: float16",
        "prompt: 31 tokens in 0.50 s, 62.0 tok/s",
        "decode: 2 tokens in 0.25 s, 8.0 tok/s (finish: eos)",
        "device busy: 0.60 of 0.75 s (80%), by the device's timestamps",
        "plan: 14 dispatches a layer",
    ]


def test_json(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m.vxm", "Hi", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["text"] == " Paris." and data["token_ids"] == [7, 8, 2]
    assert data["finish_reason"] == "eos" and data["prompt_tokens"] == 31


def test_prompt_file(llm: FakeLLM, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("zwölf\r\n\n".encode())
    assert main(["run", "m.vxm", "--prompt-file", str(tmp_path / "p.txt"), "--raw"]) == 0
    assert llm.calls[1][:2] == ("stream", "zwölf\r\n")
    assert main(["run", "m.vxm", "--prompt-file", str(tmp_path / "none")]) == 2
    (tmp_path / "p.txt").write_bytes(b"caf\xe9")
    assert main(["run", "m.vxm", "--prompt-file", str(tmp_path / "p.txt")]) == 2


def test_system_message(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m.vxm", "Hi", "--system", "Be kind"]) == 0
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]
    assert llm.calls[1][:2] == ("chat", messages)
    assert main(["run", "m.vxm", "Hi", "--system", "x", "--raw"]) == 2
    assert "--system needs a chat template" in capsys.readouterr().err


def test_verbose_shows_the_prompt_on_stderr(
    llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "m.vxm", "Hi", "--system", "Be kind", "--verbose"]) == 0
    captured = capsys.readouterr()
    assert captured.out == " Paris.\n"
    assert captured.err.splitlines() == [
        "prompt (the chat template's, 4 tokens):",
        "<system>Be kind<user>Hi",
        "--",
    ]


@pytest.mark.parametrize("json_wanted", [False, True])
def test_ctrl_c_keeps_what_has_come(
    llm: FakeLLM,
    json_wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def chunks() -> Iterator[Chunk]:
        yield Chunk("It was", (7,))
        signal.raise_signal(signal.SIGINT)
        yield Chunk(" a", (8,))
        pytest.fail("the answer went on")

    monkeypatch.setattr(llm, "_chunks", chunks)
    assert main(["run", "m.vxm", "Hi", *(["--json"] if json_wanted else [])]) == 130
    captured = capsys.readouterr()
    assert captured.err == "hornito: interrupted\n" and llm.closed
    if json_wanted:
        data = json.loads(captured.out)
        assert (data["text"], data["token_ids"]) == ("It was a", [7, 8])
        assert data["finish_reason"] == "interrupted"
    else:
        assert captured.out == "It was a\n"


def test_ctrl_c_during_the_prompt(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def chunks() -> Iterator[Chunk]:
        signal.raise_signal(signal.SIGINT)
        yield Chunk("never", (7,))

    monkeypatch.setattr(llm, "_chunks", chunks)
    assert main(["run", "m.vxm", "Hi"]) == 130
    assert capsys.readouterr().out == "" and llm.closed


def test_the_answer_comes_before_the_statistics(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both streams in one file: all of stdout is there before stderr says more."""
    both = io.StringIO()

    class Out(io.StringIO):
        """Holds text back until it is flushed, as a pipe's buffer does."""

        def flush(self) -> None:
            both.write(self.getvalue())
            self.seek(0)
            self.truncate()

    monkeypatch.setattr("sys.stdout", Out())
    monkeypatch.setattr("sys.stderr", both)
    assert main(["run", "m.vxm", "Hi", "--stats", "--show-ids"]) == 0
    assert both.getvalue().startswith(" Paris.\n7,8,2\ndevice: test device\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoDeviceError("no driver"), 4),
        (DeviceMemoryError("short", needed=2, available=1), 5),
        (ContextOverflowError("long", tokens=2, context=1), 1),
    ],
)
def test_engine_errors(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(model: str, **_: Any) -> None:
        raise error

    monkeypatch.setitem(vars(hornito), "load", load)
    assert main(["run", "m.vxm", "Hi"]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == f"hornito: error: {error}\n"
