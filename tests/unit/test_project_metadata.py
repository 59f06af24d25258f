"""What the project promises as a package: lazy names, progress, one version."""

from __future__ import annotations

import io
import subprocess
import sys
import tomllib

import pytest

import hornito
from hornito.progress import NullProgress, Progress, TerminalProgress
from tree import ROOT


def test_import_is_light() -> None:
    code = (
        "import sys, hornito;"
        "print([m for m in sys.modules if m.split('.')[0] in"
        " ('rich', 'tokenizers', 'jinja2', 'safetensors', 'torch', 'onnx')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


def test_names_are_found_when_used() -> None:
    assert hornito.HornitoError.exit_code == 1
    assert {"load", "LLM", "compile_source", "HornitoError"} <= set(dir(hornito))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hornito.nothing  # noqa: B018


def test_the_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert version("hornito") == hornito.__version__


def test_base_install_has_no_compiled_or_heavy_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {entry.split(">")[0] for entry in project["dependencies"]}
    assert names == {"numpy", "safetensors", "tokenizers", "jinja2", "rich", "threadpoolctl"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_off_a_terminal_is_one_line_for_slow_work() -> None:
    stream = io.StringIO()
    progress: Progress = TerminalProgress(stream)
    progress.start("fast", 2)
    progress.advance(2)
    progress.finish()
    progress.finish()
    assert stream.getvalue() == ""
    with TerminalProgress(stream, slow_seconds=0) as slow:
        slow.start("first", 2)
        slow.start("second", 2)
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == ["first", "second"]


def test_progress_on_a_terminal_draws_a_bar() -> None:
    stream = Terminal()
    with TerminalProgress(stream) as progress:
        progress.start("loading", 10)
        progress.advance(10)
    assert "loading" in stream.getvalue() and "10/10" in stream.getvalue()
    stream = Terminal()
    with TerminalProgress(stream) as progress:
        progress.start("uploading", 20_000_000)
        progress.advance(20_000_000)
    assert "100%" in stream.getvalue()


def test_progress_off_a_terminal_counts_while_it_lasts() -> None:
    stream = io.StringIO()
    with TerminalProgress(stream, slow_seconds=0) as progress:
        progress.start("prompt", 1200)
        progress.advance(256)
        progress.advance(944)
        progress.start("uploading", 20_000_000)
        progress.advance(5_000_000)
    lines = stream.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "prompt 256/1200",
        "prompt 1200/1200",
        "uploading 25%",
        "uploading 25%",
    ]


def test_null_progress_is_a_progress() -> None:
    progress: Progress = NullProgress()
    progress.start("x", 1)
    progress.advance()
    progress.finish()
