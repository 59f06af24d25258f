"""What `compile` may write over, and packages told by what they hold, not by their name."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest

from gguf_samples import HF
from hornito import rounding
from hornito.cli.main import main
from hornito.compiler import compile_source
from hornito.errors import UsageError
from hornito.package import holds_package, is_package, open_package
from hornito.quant.quantiser import Quantiser
from text_model import write_text_model

SOURCE = str(HF / "llama-tiny")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file, a package without an ending in its name, and a text; the current folder."""
    monkeypatch.chdir(tmp_path)
    write_text_model(tmp_path / "c.gguf")
    (tmp_path / "README.md").write_text("mine\n")
    compile_source("c.gguf", "small", weights="fp32")
    return tmp_path


@pytest.mark.parametrize("out", ["c.gguf", "./c.gguf", "link", "README.md", "copy/config.json"])
def test_no_file_of_the_user_is_replaced(
    desk: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "link").symlink_to("c.gguf")
    shutil.copytree(SOURCE, desk / "copy")
    before = Path(out).read_bytes()
    source = "copy" if out.startswith("copy") else "c.gguf"
    assert main(["compile", source, out]) == 2
    assert "exists and is no Hornito package, so it is not replaced" in capsys.readouterr().err
    assert Path(out).read_bytes() == before
    with pytest.raises(UsageError, match="is not replaced"):
        compile_source(source, out)


def test_packages_and_empty_files_are_replaced(desk: Path) -> None:
    (desk / "empty").touch()
    for out in ("small", "empty"):
        assert main(["compile", "c.gguf", out, "--weights", "fp16"]) == 0
        with open_package(out) as package:
            assert package.manifest.quant["weights"] == "fp16"


def test_a_package_is_stored_anew_in_its_place(desk: Path) -> None:
    assert main(["compile", "small", "small", "--weights", "int8"]) == 0
    with open_package("small") as package:
        assert package.manifest.quant["weights"] == "int8"
        package.check()
    assert sorted(p.name for p in desk.iterdir()) == ["README.md", "c.gguf", "small"]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (".", "is a directory: give the file to write, such as model.vxm"),
        ("folder", "is a directory: give the file to write, such as folder/model.vxm"),
        ("none/m.vxm", "can't write none/m.vxm: none does not exist"),
        ("README.md/m.vxm", "can't write README.md/m.vxm: README.md is no folder"),
        ("closed/m.vxm", "can't write closed/m.vxm: no permission to write in"),
    ],
)
def test_where_nothing_can_be_written_nothing_is_done(
    desk: Path,
    out: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_work(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    def access(path: Path, mode: int) -> bool:
        return path.name != "closed" or not mode & os.W_OK  # root may write everywhere

    (desk / "folder").mkdir()
    (desk / "closed").mkdir()
    monkeypatch.setattr("hornito.compiler.open_source", no_work)
    monkeypatch.setattr("hornito.package.target.os.access", access)
    assert main(["compile", "c.gguf", out]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("report", ["c.gguf", "m.vxm", "README.md", "none/r.json", "."])
def test_a_report_replaces_no_model(
    desk: Path, report: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (desk / "c.gguf").read_bytes()
    assert main(["compile", "c.gguf", "m.vxm", "--support-report", report]) == 2
    assert f"--support-report {report}: is a" in capsys.readouterr().err
    assert (desk / "c.gguf").read_bytes() == before and not (desk / "m.vxm").exists()


def test_a_report_replaces_a_report(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(SOURCE, desk / "copy")
    assert main(["compile", "copy", "m.vxm", "--support-report", "copy/config.json"]) == 2
    assert "is a file of the model" in capsys.readouterr().err
    for _ in range(2):
        assert main(["compile", "copy", "m.vxm", "--support-report", "r.json"]) == 0


def test_packages_are_told_by_their_content(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_package("small") and holds_package(desk / "small")
    assert not is_package("c.gguf") and not is_package("README.md") and not is_package("folder")
    assert is_package("none.vxm") and not holds_package("none.vxm")
    for verb in ("inspect", "check", "verify"):
        assert main([verb, "small"]) == 0
    assert main(["compile", "small", "smaller", "--weights", "int8"]) == 0
    with open_package("smaller") as package:
        assert package.manifest.quant["from"] == "fp32"
    capsys.readouterr()
    (desk / "noise").write_bytes(bytes(range(256)) * 8)
    assert main(["run", "noise", "x"]) == 2
    assert "Supported: a Hornito package (.vxm), a GGUF file" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_package_runs_whatever_its_name(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["small", "--ids", "1,2", "--max-tokens", "2", "--ignore-eos", "--context", "64"]
    assert main(["run", *words]) == 0
    assert capsys.readouterr().out


def test_the_default_type_of_a_package_is_named(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "small", "s.vxm", "--weights", "int8"]) == 0
    capsys.readouterr()
    assert main(["compile", "s.vxm", "s2.vxm"]) == 2
    err = capsys.readouterr().err
    assert "stored as fp16 unless another type is asked for" in err and "claim" not in err
    assert "Types with fewer: int4, int4m (--weights TYPE)" in err
    assert main(["compile", "s.vxm", "s2.vxm", "--weights", "fp16"]) == 2
    assert "fp16 would claim precision that is lost" in capsys.readouterr().err


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("free", [0, 150_000])
def test_a_full_disk_is_seen_before_work(
    desk: Path,
    weights: str,
    free: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_work(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(Quantiser, "run", no_work)
    assert main(["compile", SOURCE, "new.vxm", "--weights", weights]) == 1
    said = capsys.readouterr().err
    taken = r"it takes [\d,]+ bytes, and [\d,]+ bytes beside it while it is made"
    assert re.search(rf"can't write new\.vxm: {taken}, and .* has {free:,} bytes free", said), said
    assert not Path("new.vxm").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_disk_that_fills_up(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Temporary files have no names, so the package that they are for is named."""

    def full(dir: Path) -> BinaryIO:
        return open("/dev/full", "r+b")

    monkeypatch.setattr(rounding.tempfile, "TemporaryFile", full)
    assert main(["compile", SOURCE, "new.vxm", "--weights", "int8", "--quant-samples", "0"]) == 1
    said = capsys.readouterr().err
    assert f"can't write new.vxm: {desk} became full" in said and "[Errno" not in said
    assert re.search(r"takes about [\d,]+ bytes, and [\d,]+ bytes more while it is made", said), (
        said
    )
    assert sorted(p.name for p in desk.iterdir()) == ["README.md", "c.gguf", "small"]
