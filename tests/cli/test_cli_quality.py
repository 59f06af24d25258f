"""`hornito eval quality`, `compile --eval` and what `inspect` shows, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hornito.cli.main import main
from hornito.package import open_package
from hornito.progress import TerminalProgress
from text_model import write_sentencepiece_model, write_text_model

pytestmark = pytest.mark.gpu

TEXT = " ".join(f"word{i} and {i * i}," for i in range(60))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model `m.gguf` and a text `t.txt`, with a cache of their own."""
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    write_text_model(tmp_path / "m.gguf")
    (tmp_path / "t.txt").write_text(TEXT)
    return tmp_path


def quality(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["eval", "quality", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_several_models_beside_their_source(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("fp32", "int8", "int4")
    paths = [folder / f"{name}.vxm" for name in names]
    for name, path in zip(names, paths, strict=True):
        assert main(["compile", str(folder / "m.gguf"), str(path), "--weights", name]) == 0
    capsys.readouterr()
    options = ("--text", folder / "t.txt", "--window", 64)
    found = quality(capsys, *paths, *options)
    assert found["evaluated"] == 64 * (found["text"]["tokens"] // 64)
    assert found["scored"] == found["evaluated"] // 64 * 31
    rows = [model["quality"] for model in found["models"]]
    assert rows[0]["kl_mean"] == 0 and rows[0]["top1"] == 1
    assert rows[0]["perplexity"] == rows[0]["reference_perplexity"] > 1
    assert 0 < rows[1]["kl_mean"] < rows[2]["kl_mean"]
    assert [model["weights"] for model in found["models"]] == list(names)
    assert 32 == found["models"][0]["bits"] > found["models"][1]["bits"]
    for path, model in zip(paths, found["models"], strict=True):
        with open_package(path) as package:
            assert package.manifest.quality == model["label"]
            assert package.verify() == []
    # Again, with the reference named, and as a table; the packages come out the same.
    before = [path.read_bytes() for path in paths]
    again = ["eval", "quality", *map(str, paths), "--ref", str(paths[0]), *map(str, options)]
    assert main(again) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 + len(paths) and lines[-1].startswith(f"| {paths[2]} | int4 |")
    assert [path.read_bytes() for path in paths] == before
    assert main(["inspect", str(paths[2])]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("quality")]
    assert "top-1" in shown[0] and "31 tokens" not in shown[0] and "of t.txt, high" in shown[0]
    assert main(["inspect", str(paths[2]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quality"] == found["models"][2]["label"]


def test_a_source_is_its_own_reference(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--text", folder / "t.txt", "--window", 32, "--tokens", 100, "--precision", "normal")
    found = quality(capsys, folder / "m.gguf", "--weights", "int8", *options)
    assert found["evaluated"] == 96
    label = found["models"][0]["label"]
    assert (label["precision"], label["kv"], label["window"]) == ("normal", "fp16", 32)
    assert label["reference"]["weights"] == "fp32" and 0 < label["kl_mean"] < 1


def test_what_lies_ahead_is_said_and_what_cannot_differ(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, before the work; progress comes by the rows, not by the window."""
    done: list[int] = []
    monkeypatch.setattr(TerminalProgress, "start", lambda *a: done.append(0))
    monkeypatch.setattr(TerminalProgress, "advance", lambda self, n=1: done.append(n))
    options = ["--text", str(folder / "t.txt"), "--window", "64", "--tokens", "130", "--json"]
    for weights, same in (("keep", True), ("int8", False)):
        assert (
            main(["eval", "quality", str(folder / "m.gguf"), "--weights", weights, *options]) == 0
        )
        captured = capsys.readouterr()
        ahead = "hornito: evaluates 128 tokens of t.txt with the model and with the reference"
        assert ahead in captured.err
        assert ("are so by construction" in captured.err) == same
        (model,) = json.loads(captured.out)["models"]
        assert model["same_values"] == same
        assert not same or (model["quality"]["kl_max"], model["quality"]["top1"]) == (0, 1)
        steps = done[len(done) - done[::-1].index(0) :]
        assert sum(steps) == 2 * 128 and len(steps) > 8  # of both models


def test_compile_and_eval(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "t.txt").write_text(TEXT * 3)
    command = ["compile", str(folder / "m.gguf"), str(folder / "m.vxm"), "--weights", "int4"]
    assert main([*command, "--eval", str(folder / "t.txt"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["quality"]
    with open_package(folder / "m.vxm") as package:
        assert package.manifest.quality == found and found["window"] == 512
    assert main([*command, "--eval", str(folder / "t.txt")]) == 0
    assert "quality: perplexity" in capsys.readouterr().out


def test_a_snapshot_outlives_the_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package, file = str(folder / "m.vxm"), str(folder / "p.safetensors")
    assert main(["compile", str(folder / "m.gguf"), package, "--weights", "fp16"]) == 0
    assert main(["cache", "save", package, file, "--ids", "5,6,7,8"]) == 0
    quality_options = ["--text", str(folder / "t.txt"), "--window", "64"]
    assert main(["eval", "quality", package, *quality_options]) == 0
    capsys.readouterr()
    command = ["run", package, "a", "--raw", "--prefix", file, "--max-tokens", "2", "--ignore-eos"]
    assert main(command) == 0


def test_windows_begin_with_bos(folder: Path) -> None:
    """A model that wants BOS gets it in every window."""
    from hornito.compiler import compile_source
    from hornito.diag.quality import read_text

    compile_source(write_sentencepiece_model(folder / "s.gguf"), folder / "s.vxm", weights="fp32")
    compile_source(folder / "m.gguf", folder / "m.vxm", weights="fp32")
    with open_package(folder / "s.vxm") as package:
        text = read_text(folder / "t.txt", package, window=50, tokens=None)
        assert all(ids[0] == 1 and 1 not in ids[1:] for ids in text.windows)
        assert len(text.windows) == text.tokens // 50 > 2
    with open_package(folder / "m.vxm") as package:
        text = read_text(folder / "t.txt", package, window=50, tokens=101)
        assert len(text.windows) == 2 and text.scored == 2 * 24
        assert text.windows[0] + text.windows[1] == tuple(_ids(folder / "m.vxm"))[:100]


def _ids(path: Path) -> list[int]:
    from hornito.text.tokenizer import package_tokenizer

    with open_package(path) as package:
        return package_tokenizer(package).encode(TEXT)


def test_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package, text = str(folder / "m.vxm"), str(folder / "t.txt")
    assert main(["compile", str(folder / "m.gguf"), package, "--weights", "int8"]) == 0
    (folder / "short.txt").write_text("a b c")
    (folder / "bytes.txt").write_bytes(b"\xff\xfe")
    (folder / "other").mkdir()
    other = str(write_sentencepiece_model(folder / "other" / "o.gguf"))
    window = ["--window", "64"]
    for arguments, words in (
        ([package], "--text FILE is missing"),
        ([package, "--text", text, "--context", "64"], "--window takes the place"),
        ([package, "--text", text, "--window", "8"], "16 to 512 tokens"),
        ([package, "--text", text, "--window", "513"], "not 513"),
        ([package, "--text", str(folder / "no.txt"), *window], "can't read the text"),
        ([package, "--text", str(folder / "short.txt"), *window], "a window takes 64"),
        ([package, "--text", str(folder / "bytes.txt"), *window], "no text in UTF-8"),
        ([package, "--text", text, *window, "--max-tokens", "5"], "goes with `hornito eval tool"),
        ([package, "--text", text, *window, "--weights", "int4"], "holds int8 weights"),
        ([package, other, "--text", text, *window], "name one reference with --ref"),
        ([package, "--ref", other, "--text", text, *window], "its tokenizer is another"),
        ([package, "--text", text, "--precision", "lo"], "'lo' is none of high, normal, low"),
    ):
        assert main(["eval", "quality", *arguments]) == 2, arguments
        assert words in capsys.readouterr().err
    assert main(["eval", "tool-calls", "builtin", package, "--text", text]) == 2
    assert "--text goes with `hornito eval quality`" in capsys.readouterr().err
    (folder / "m.gguf").unlink()
    assert main(["eval", "quality", package, "--text", text, *window]) == 2
    error = capsys.readouterr().err
    assert "m.gguf, which is not on this machine any more, or has changed" in error
    assert "with --ref" in error
    with open_package(package) as opened:
        assert opened.manifest.quality == {}
