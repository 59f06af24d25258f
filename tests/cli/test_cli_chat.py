"""`hornito chat`: what is read as a message, the commands, both streams, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hornito.cli.chat import Entry, interrupting, read_entry
from hornito.cli.main import main
from hornito.cli.settings import describe_settings, set_setting
from hornito.conversation import ChatSettings
from hornito.errors import UsageError
from hornito.runtime.idle import IdleProof
from proofs import prove_while_waiting, wait_for
from text_model import write_text_model
from tree import own_cache


def entries(*lines: str) -> list[Entry]:
    left = list(lines)
    found = []
    while (entry := read_entry(lambda prompt: left.pop(0) if left else None)) is not None:
        found.append(entry)
    return found


def test_entries() -> None:
    assert entries("hi", "/stats", "/set a  b ", " /no command") == [
        Entry("hi"),
        Entry("/stats", command=True),
        Entry("/set a  b", command=True),
        Entry(" /no command"),
    ]
    assert entries("a\\", "b\\", "c", "d") == [Entry("a\nb\nc"), Entry("d")]
    assert entries('"""', "one", "", "two", '"""', "x") == [Entry("one\n\ntwo"), Entry("x")]
    assert entries('"""one', 'two"""') == [Entry("one\ntwo")]
    assert entries('"""/bye"""') == [Entry("/bye")]
    assert entries('"""', "no end") == [Entry("no end")]
    assert entries("no end\\") == [Entry("no end")]
    assert entries() == []


def test_settings() -> None:
    settings = ChatSettings()
    set_setting(settings, "max-tokens", "7")
    set_setting(settings, "max_tokens", "8")
    set_setting(settings, "--ignore-eos", "on")
    set_setting(settings, "stop", "END OF")
    assert (settings.max_tokens, settings.ignore_eos, settings.stop) == (8, True, ("END OF",))
    assert describe_settings(settings)[:3] == [
        "max-tokens 8",
        "stop 'END OF'",
        "ignore-eos on",
    ]
    set_setting(settings, "stop", "-")
    assert settings.stop == ()
    for name, value, message in (
        ("colour", "red", "no setting is called 'colour'; there are max-tokens"),
        ("tempp", "0", "'tempp'; did you mean 'temp'"),
        ("temperatur", "0", "did you mean 'temperature'"),
        ("max-tokens", "0", "'0' is no whole number from 1"),
        ("ignore-eos", "maybe", "neither on nor off"),
        ("stop", "", "needs a value"),
    ):
        with pytest.raises(UsageError, match=message):
            set_setting(settings, name, value)


def test_ctrl_c_twice() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[int] = []
    with interrupting(lambda: seen.append(1)):
        signal.raise_signal(signal.SIGINT)
        assert seen == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with own_cache(tmp_path_factory):
        yield write_text_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


def talk(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    *options: str,
) -> tuple[int, list[str], list[str]]:
    """Exit code, lines of stdout and lines of stderr of a chat from a pipe."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    code = main(["chat", str(model), "--max-tokens", "6", "--context", "512", *options])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


@pytest.mark.gpu
def test_lines_from_a_pipe(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = talk(model, monkeypatch, capsys, "hello\n\n/bye\nnever\n")
    assert code == 0
    # The random model finds no end token.
    assert [line for line in err if "cut" in line] == [
        "(cut at 6 tokens; /set max-tokens 12 allows more)"
    ]


@pytest.mark.gpu
def test_commands(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a chat.json"
    text = f"""/system
/system be kind
hello
/save "{path}"
/reset
/stats
/load '{path}'
/set max-tokens 3
again
/stats
/system -
/help
"""
    code, _, err = talk(model, monkeypatch, capsys, text, "--stats")
    assert code == 0, err
    assert any(re.fullmatch(r"saved 2 messages, and their KV cache \(.+\.kv", line) for line in err)
    for line in (
        "no system message of yours is set",
        "system message set",
        "the conversation is empty",
        "turns: 1; 0 of 512 tokens in the KV cache",
        "loaded 2 messages",
        "max-tokens 3",
        "system message removed",
        "/bye              leave (as does Ctrl-D)",
    ):
        assert line in err, line
    saved = json.loads(path.read_text())
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]
    assert any(line.startswith("turns: 2; ") for line in err)
    assert any("tok/s; prompt: 0 reused" in line for line in err)
    assert any(line.startswith("device: ") for line in err)


@pytest.mark.gpu
@pytest.mark.software
def test_kernels_are_proved_while_a_message_is_typed(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A load has no time for them; the proof halts for each answer, and the next uses them."""
    proofs: list[IdleProof] = []

    class Typist(io.StringIO):
        """Is slow with the third message."""

        lines = 0

        def readline(self, size: int | None = -1, /) -> str:
            self.lines += 1
            if self.lines == 3:
                wait_for(proofs[0])
            return super().readline()

    prove_while_waiting(monkeypatch, tmp_path, proofs.append)
    text = "/stats\nhello\n/stats\nhello\n"
    monkeypatch.setattr("sys.stdin", Typist(text))
    assert main(["chat", str(model), "--max-tokens", "6", "--context", "512"]) == 0
    captured = capsys.readouterr()
    kernels = [line for line in captured.err.splitlines() if line.startswith("kernels: ")]
    assert re.match(r"kernels: 0 proved on this device, [1-9]\d* unproven, ", kernels[0])
    assert re.match(r"kernels: [1-9]\d* proved on this device; ", kernels[1])
    assert len(captured.out.splitlines()) >= 2
    assert not any(thread.name == "hornito-proof" for thread in threading.enumerate())


@pytest.mark.gpu
def test_answers_go_to_stdout_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, alone, _ = talk(model, monkeypatch, capsys, "hello\n")
    _, more, _ = talk(model, monkeypatch, capsys, "/stats\nhello\n/foo\n/stats\n", "--stats")
    assert alone == more


@pytest.mark.gpu
def test_errors_do_not_end_a_chat(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "x" * 600
    code, out, err = talk(model, monkeypatch, capsys, f"/foo\n{long}\n/load none.json\nhello\n")
    assert code == 2 and out  # the last error's code; the message after it was answered
    errors = [line for line in err if line.startswith("hornito: error: ")]
    assert "unknown command /foo" in errors[0]
    assert "the context holds 512" in errors[1] and "/reset" in errors[1]
    assert "there is no file none.json" in errors[2]
    for command, message in (
        ("/reset now", "/reset takes nothing"),
        ("/temp 0", "unknown command /temp; it is a setting: /set temp 0"),
        ("/temperature", "/set temp VALUE"),
        ("/rest", "did you mean /reset?"),
        ("/save", "takes one FILE"),
        ("/save 'a", "No closing quotation"),
        ("/set max-tokens x", "no whole number"),
        ("/save /no/such/folder/x", "No such file"),
    ):
        code, _, err = talk(model, monkeypatch, capsys, command + "\n")
        assert code in (1, 2) and message in "\n".join(err)


@pytest.mark.gpu
def test_a_full_context_says_so(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "y" * 450 + "\n"
    _, _, err = talk(model, monkeypatch, capsys, text, "--max-tokens", "200", "--ignore-eos")
    assert (
        "(the context of 512 tokens is full; /reset starts over, and --overflow truncate goes "
        "on with the end)"
    ) in err


@pytest.mark.gpu
def test_a_model_without_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_text_model(tmp_path / "base.gguf", template=None)
    code, _, err = talk(base, monkeypatch, capsys, "hello\n")
    assert code == 2 and "has no chat template" in err[-1]


@pytest.mark.gpu
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_stops_the_answer_only(model: Path) -> None:
    """The first answer is stopped in the middle; the second message is answered."""
    options = ["--context", "8192", "--max-tokens", "100000", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hornito", "chat", str(model), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "HORNITO_DEVICE": os.environ.get("HORNITO_DEVICE", "software")},
    )
    assert process.stdin and process.stdout
    try:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.read(20)  # it is streaming
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"/set max-tokens 4\nmore\n/stats\n")
        process.stdin.flush()
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert b"(stopped)" in err and b"turns: 2; " in err and b"Traceback" not in err


@pytest.mark.gpu
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_terminal(model: Path) -> None:
    """Prompt, banner, dim statistics within 30 columns, history; Ctrl-D leaves."""
    import fcntl
    import pty
    import termios

    main_end, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "hornito", "chat", str(model), "--max-tokens", "4"],
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        env={**os.environ, "HORNITO_DEVICE": "software", "TERM": "xterm", "COLUMNS": ""},
    )
    os.close(other_end)
    seen, at = b"", 0

    def until(*texts: bytes) -> None:
        """Reads until each of the texts has come behind the one before."""
        nonlocal seen, at
        for text in texts:
            while (found := seen.find(text, at)) < 0:
                seen += os.read(main_end, 4096)
            at = found + len(text)

    try:
        until(b">>> ")
        os.write(main_end, b"hello\n")
        until(b"reused", b">>> ")
        os.write(main_end, b"\x04")
        with suppress(OSError):  # the other end is closed
            while data := os.read(main_end, 4096):
                seen += data
        process.wait(60)
    finally:
        process.kill()
        os.close(main_end)
    assert process.returncode == 0
    assert b"\x1b[2m" in seen  # dim
    plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07", b"", seen).decode()
    words = " ".join(plain.split())
    assert "/help shows the commands" in words and "tok/s; prompt: 0 reused" in words
    notes = plain[plain.index("context") :].splitlines()
    assert max(len(line) for line in notes if not line.startswith(">>>")) <= 30
    assert Path(os.environ["HORNITO_CACHE"], "chat_history").read_text() == "hello\n"


def test_every_setting_is_listed_and_goes_by_both_names() -> None:
    settings = ChatSettings()
    names = [line.split()[0] for line in describe_settings(settings)]
    assert names == [
        "max-tokens",
        "stop",
        "ignore-eos",
        "temp",
        "top-k",
        "top-p",
        "min-p",
        "repeat-penalty",
        "presence-penalty",
        "frequency-penalty",
        "seed",
        "sampling",
    ]
    assert "temp 0 (default)" in describe_settings(settings)
    assert "seed random (default)" in describe_settings(settings)
    for name, value in (("temperature", "0.5"), ("repetition_penalty", "1.1"), ("top_k", "40")):
        set_setting(settings, name, value)
    lines = describe_settings(settings)
    assert {"temp 0.5", "repeat-penalty 1.1", "top-k 40"} <= set(lines)
    assert settings.sampling == {"temperature": 0.5, "repetition_penalty": 1.1, "top_k": 40}
    set_setting(settings, "sampling", "model")
    assert "top-p 1 (of the model, if it has one)" in describe_settings(settings)
