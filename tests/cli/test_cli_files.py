"""Verbs that were given the wrong kind of file say what it is and what to do with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gguf_samples import HF
from hornito.cli.files import kind_of
from hornito.cli.main import main
from text_model import write_text_model


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """One file of each kind."""
    write_text_model(tmp_path / "m.gguf")
    (tmp_path / "m.txt").write_text("café\n" * 20_000, encoding="utf-8")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "folder").mkdir()
    data = {"x": np.zeros(4, np.float32)}
    save_file(data, tmp_path / "w.safetensors")
    save_file(data, tmp_path / "p.prefix", {"hornito.snapshot": "{}"})
    assert main(["compile", str(HF / "llama-tiny"), str(tmp_path / "m.vxm")]) == 0
    return tmp_path


def test_kinds(desk: Path) -> None:
    assert {path.name: kind_of(path) for path in desk.iterdir()} == {
        "m.gguf": "a GGUF file",
        "m.txt": "a text file",
        "empty": "an empty file",
        "noise": "",
        "folder": "a directory",
        "w.safetensors": "a safetensors file",
        "p.prefix": "a prefix snapshot",
        "m.vxm": "a Hornito package",
    }
    assert kind_of(HF / "llama-tiny") == "a model directory" and kind_of(desk / "none") == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "m.gguf"], "is a GGUF file, not a Hornito package: `hornito check m.gguf`"),
        (["verify", "m.txt"], "is a text file, not a Hornito package"),
        (["inspect", "folder"], "is a directory, not a Hornito package"),
        (
            ["verify", "p.prefix"],
            "is a prefix snapshot, not a Hornito package: `hornito cache info",
        ),
        (["cache", "info", "m.vxm"], "is a Hornito package, not a prefix snapshot: `hornito insp"),
        (["cache", "info", "w.safetensors"], "is a safetensors file, not a prefix snapshot"),
        (["compile", "m.txt", "o.vxm"], "is a text file, not a model"),
        (["compile", "p.prefix", "o.vxm"], "is a prefix snapshot, not a model"),
        (["compile", "empty", "o.vxm"], "is an empty file, not a model"),
    ],
)
def test_wrong_kinds(
    desk: Path,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(desk)
    capsys.readouterr()
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "KeyError" not in err


def test_truncated_files_have_a_next_step(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, verb in (("m.vxm", "inspect"), ("m.gguf", "check")):
        data = (desk / name).read_bytes()
        (desk / name).write_bytes(data[: len(data) // 2])
        capsys.readouterr()
        assert main([verb, str(desk / name)]) == 2
        assert "copy, download or compile it again" in capsys.readouterr().err


def test_verify_says_what_to_do(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((desk / "m.vxm").read_bytes())
    data[-100] ^= 1
    (desk / "m.vxm").write_bytes(data)
    capsys.readouterr()
    assert main(["verify", str(desk / "m.vxm")]) == 1
    out, err = capsys.readouterr()
    assert "1 damaged: " in out and "compile its source again" in err


@pytest.mark.gpu
def test_verify_before_use(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", str(desk / "m.vxm"), "--ids", "1,2", "--max-tokens", "2", "--ignore-eos"]
    words += ["--context", "64"]
    assert main([*words, "--verify"]) == 0
    data = bytearray((desk / "m.vxm").read_bytes())
    data[-100] ^= 1
    (desk / "m.vxm").write_bytes(data)
    capsys.readouterr()
    assert main([*words, "--verify"]) == 2
    assert "1 damaged: " in capsys.readouterr().err
    monkeypatch.setenv("HORNITO_VERIFY", "1")
    assert main(words) == 2
    assert "1 damaged: " in capsys.readouterr().err
    monkeypatch.setenv("HORNITO_VERIFY", "0")
    assert main(words) == 0
