"""`hornito cache`, and --prefix of `run` and `chat`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hornito.cli.main import main
from text_model import write_text_model
from tree import own_cache

Capture = pytest.CaptureFixture[str]
LOAD = ["--context", "256", "--weights", "fp32", "--precision", "high"]
SYSTEM = "You are a lamp.\nBe bright."


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model and what prefixes are made of."""
    with own_cache(tmp_path_factory):
        folder = tmp_path_factory.mktemp("desk")
        write_text_model(folder / "m.gguf")
        (folder / "system.txt").write_text(f"{SYSTEM}\n")
        (folder / "text.txt").write_text("once upon a time")
        yield folder


def command(capsys: Capture, *words: object) -> Any:
    """The JSON that a command prints; it must succeed."""
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys: Capture, message: str, *words: object) -> None:
    code = main([*map(str, words)])
    captured = capsys.readouterr()
    assert code == 2 or "made with" in captured.err
    assert captured.out == "" and message in captured.err


@pytest.mark.gpu
def test_a_system_prefix(desk: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved, shown, used by run and by a chat, deleted; answers are those without it."""
    model, file = desk / "m.gguf", desk / "system.prefix"
    saved = command(
        capsys, "cache", "save", model, file, "--system-file", desk / "system.txt", *LOAD
    )
    assert saved["bytes"] == file.stat().st_size and saved["path"] == str(file)
    shown = command(capsys, "cache", "info", file)
    assert shown["tokens"] == saved["tokens"] > 20 and shown["blocks"] == [1]
    assert shown["messages"] == [{"role": "system", "content": SYSTEM}]
    assert shown["identity"]["precision"] == "high" and shown["identity"]["weights"] == "fp32"
    assert main(["cache", "info", str(file)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["system"] == "You are a lamp. Be bright." and lines["kv"] == "fp32"

    run = ["run", model, "hello", "--max-tokens", 12, "--ignore-eos", *LOAD]
    cold = command(capsys, *run, "--system", SYSTEM)
    warm = command(capsys, *run, "--prefix", file)
    assert warm["token_ids"] == cold["token_ids"] and warm["text"] == cold["text"]
    assert (cold["reused_tokens"], warm["reused_tokens"]) == (0, saved["tokens"])
    assert cold["prompt_tokens"] == warm["prompt_tokens"]
    assert main([*map(str, run), "--prefix", str(file), "--stats"]) == 0
    assert f"; {saved['tokens']} reused" in capsys.readouterr().err
    fails(capsys, "both the beginning", *run, "--prefix", file, "--system", "x")

    chat = ["chat", model, "--max-tokens", 12, "--ignore-eos", *LOAD]
    answers = []
    for more in (["--system", SYSTEM], ["--prefix", file]):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/stats\n/system\n"))
        assert main([*map(str, [*chat, *more])]) == 0
        captured = capsys.readouterr()
        answers.append(captured.out)
        assert "You are a lamp." in captured.err
    assert answers[0] == answers[1] == f"{cold['text']}\n"
    assert f"prompt: {saved['tokens']} tokens reused" in captured.err

    assert command(capsys, "cache", "rm", file)["removed"][0]["bytes"] == saved["bytes"]
    assert not file.exists()


@pytest.mark.gpu
def test_prefixes_of_text_and_ids(desk: Path, capsys: Capture) -> None:
    model, text, ids = desk / "m.gguf", desk / "text.prefix", desk / "ids.prefix"
    saved = command(capsys, "cache", "save", model, text, "--text-file", desk / "text.txt", *LOAD)
    run = ["run", model, "--raw", "--max-tokens", 12, "--ignore-eos", *LOAD]
    warm = command(capsys, *run, " and then", "--prefix", text)
    assert (
        warm["reused_tokens"] == saved["tokens"] == command(capsys, "cache", "info", text)["tokens"]
    )
    assert len(warm["token_ids"]) == 12
    command(capsys, "cache", "save", model, ids, "--ids", "5,6,7", *LOAD)
    run = ["run", model, "--max-tokens", 12, "--ignore-eos", *LOAD]
    cold = command(capsys, *run, "--ids", "5,6,7,8,9")
    warm = command(capsys, *run, "--ids", "8,9", "--prefix", ids)
    assert warm["token_ids"] == cold["token_ids"] and warm["reused_tokens"] == 3
    # A template can't go on from plain text, and another setting is no use.
    fails(capsys, "was made from plain text: give --raw", *run, "hello", "--prefix", text)
    fails(capsys, "was made from plain text", "chat", model, *LOAD, "--prefix", text)
    for precision in ("normal", "low"):
        other = ["--context", "256", "--weights", "fp32", "--precision", precision]
        words = ["run", model, "--ids", "8", *other, "--prefix", ids]
        fails(capsys, f"made with precision = 'high'; this session has '{precision}'", *words)
    fails(capsys, "no such snapshot file", *run, "--ids", "8", "--prefix", desk / "none")
    # One that is none keeps the others from being deleted.
    fails(capsys, "is a text file, not a prefix snapshot", "cache", "rm", text, desk / "text.txt")
    assert text.exists() and (desk / "text.txt").exists()
    assert main(["cache", "rm", str(text), str(ids)]) == 0
    assert capsys.readouterr().out.count("removed ") == 2
    assert not text.exists() and not ids.exists()


def test_mistakes(desk: Path, capsys: Capture) -> None:
    """Each is said before a model is loaded."""
    model = desk / "m.gguf"
    (desk / "latin").write_bytes(b"caf\xe9")
    for message, words in (
        ("'load' is none of save, info, rm", ["load", model]),
        ("give MODEL and OUT", ["save", model]),
        ("give MODEL and OUT", ["save", model, "a", "b", "--ids", "1"]),
        ("give one of --text-file FILE, --system-file FILE and --ids", ["save", model, "out"]),
        ("give one of", ["save", model, "out", "--ids", "1", "--text-file", desk / "text.txt"]),
        ("--ids goes with `hornito cache save`", ["info", "file", "--ids", "1"]),
        ("no such snapshot file", ["info", desk / "none"]),
        ("is a text file, not a prefix snapshot", ["info", desk / "text.txt"]),
        ("--text-file none: no such file", ["save", model, "out", "--text-file", "none"]),
        ("m.gguf is a GGUF file, not a prefix snapshot: `hornito check", ["info", model]),
        ("is not UTF-8", ["save", model, "out", "--text-file", desk / "latin"]),
    ):
        fails(capsys, message, "cache", *words)
