"""Caches that can't be written, odd names, and what killed compiles leave. No device."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gguf_samples import HF
from hornito import cache, compiler
from hornito.cli.main import main
from hornito.errors import HornitoError, UsageError
from hornito.package import open_package, write_package
from hornito.package.partial import abandoned, partial_path

LLAMA = HF / "llama-tiny"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refuse(*_: object, **__: object) -> None:
    raise OSError(30, "Read-only file system")


def test_a_cache_that_cant_be_written_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = compiler.compile_cached(LLAMA, None)
    monkeypatch.setattr(Path, "write_text", refuse)
    with caplog.at_level(logging.DEBUG, "hornito"):
        assert compiler.compile_cached(LLAMA, None) == first
    assert "no note of the use of" in caplog.text and "Read-only" in caplog.text


def test_the_use_of_a_download_is_not_noted_where_it_cant_be(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache.hub_directory() / "org" / "model"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"x")
    (folder / cache.MARKER).write_text("{}")
    monkeypatch.setattr(os, "utime", refuse)
    assert cache.resolve_model("org/model") == folder / "m.gguf"


def test_a_cache_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    monkeypatch.setenv("HORNITO_CACHE", str(file))
    with pytest.raises(HornitoError, match=r"file/models: Not a directory\. Set HORNITO_CACHE"):
        compiler.compile_cached(LLAMA, None)
    assert cache.list_models() == []


def test_a_read_only_cache_that_is_empty(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(HornitoError, match=r"cache/models: it is read-only\. Set HORNITO_CACHE"):
        compiler.compile_cached(LLAMA, None)


def test_long_names(root: Path, tmp_path: Path) -> None:
    link = tmp_path / ("m" * 245)
    link.symlink_to(LLAMA, target_is_directory=True)
    out = compiler.compile_cached(link, None)
    assert out.is_file() and len(out.name) < 255
    folder = tmp_path / ("ü" * 120)
    folder.mkdir()
    for file in Path(LLAMA).iterdir():
        (folder / file.name).symlink_to(file)
    out = compiler.compile_cached(folder, None)
    assert out.is_file() and out.name.startswith("ü" * 80 + "-default-")
    with pytest.raises(UsageError, match=r"can't look for the model 'aaaa.*File name too long"):
        cache.resolve_model("a" * 5000)


def test_the_error_of_a_write_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "unlink", refuse)
    file = tmp_path / "file"
    file.write_text("x")
    with (
        caplog.at_level(logging.DEBUG, "hornito"),
        pytest.raises(HornitoError, match=r"can't write .*file/m\.vxm .*Not a directory"),
    ):
        write_package(file / "m.vxm", {}, {}, [], {}, {}, {}, {}, {})
    assert "can't delete" in caplog.text


def test_a_target_with_the_longest_name(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 251 + ".vxm")
    write_package(target, {}, {}, [("w", "F32", (1,), lambda: bytes(4))], {}, {}, {}, {}, {})
    assert open_package(target).verify() == []
    assert os.listdir(tmp_path) == [target.name]


def killed_process() -> int:
    """The number of a process that is gone."""
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    return int(done.stdout)


def leftover(folder: Path, pid: int, age: float = 0.0) -> Path:
    """A partial package of a process."""
    path = partial_path(folder / "m-fp16-0123456789abcdef.vxm")
    path = path.with_name(path.name.replace(f"-{os.getpid()}-", f"-{pid}-"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(300_000))
    when = time.time() - age
    os.utime(path, (when, when))
    return path


def test_what_is_abandoned(tmp_path: Path) -> None:
    gone = killed_process()
    mine = leftover(tmp_path, os.getpid())
    old = leftover(tmp_path, os.getpid(), age=2 * 86400)
    dead = leftover(tmp_path, gone)
    elsewhere = dead.with_name(f".m.vxm.00000000-{gone}-0a1b2c3d.tmp")
    elsewhere.write_bytes(b"x")
    before = tmp_path / ".m.vxm.0a1b2c3d.tmp"  # of a version that noted no process
    before.write_bytes(b"x")
    (tmp_path / ".editor.tmp").write_bytes(b"x")
    os.utime(tmp_path / ".editor.tmp", (0, 0))
    assert set(abandoned(tmp_path)) == {old, dead}
    os.utime(before, (0, 0))
    os.utime(elsewhere, (0, 0))
    assert set(abandoned(tmp_path)) == {old, dead, before, elsewhere}
    assert mine.exists()


def test_a_compile_sweeps_what_killed_ones_left(root: Path) -> None:
    mine = leftover(cache.models_directory(), os.getpid())
    dead = leftover(cache.models_directory(), killed_process())
    compiler.compile_cached(LLAMA, None)
    assert not dead.exists() and mine.exists()


def test_list_shows_and_rm_deletes_leftovers(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = leftover(cache.models_directory(), killed_process())
    assert main(["list"]) == 0
    assert "1 unfinished file(s) of killed compiles take 0.3 MB" in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["leftovers"] == [{"path": str(dead), "bytes": 300_000}]
    assert main(["rm", "--all"]) == 0
    assert capsys.readouterr().out == "removed 1 unfinished file(s) of killed compiles (0.3 MB)\n"
    assert not dead.exists()
    assert main(["rm", "--all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": []}
