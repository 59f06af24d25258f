"""Every command and script of the README and the quickstart runs, on a tiny model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_samples import HF
from hornito.compiler import compile_source
from hub_server import Hub, serve
from text_model import write_text_model
from tree import ROOT

pytestmark = pytest.mark.gpu

#: Lines that other scripts and tests stand for: making an environment, the project's own scripts.
ELSEWHERE = (
    "python3 -m venv",
    ".venv/bin/",
    ". .venv/bin/activate",
    "./scripts/",
)
DOCUMENTS = ["README.md", "docs/quickstart.md"]
SERVED = "http://127.0.0.1:8000"


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(document: str) -> list[str]:
    lines = [line for block in blocks(document, "sh") for line in block.splitlines()]
    return [line for line in lines if line.strip() and not line.startswith(ELSEWHERE)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    gguf = write_text_model(folder / "model.gguf").read_bytes()
    tiny = {path.name: path.read_bytes() for path in (HF / "llama-tiny").iterdir()}
    repositories = {"org/model": {"model.gguf": gguf}, "org/quantised": {"model.gguf": gguf}}
    with serve({**repositories, "org/checkpoint": tiny}) as server:
        yield server


@pytest.fixture(scope="module")
def desk(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with what the documents take for granted, and an environment."""
    pytest.importorskip("huggingface_hub")
    folder = tmp_path_factory.mktemp("desk")
    write_text_model(folder / "model.gguf")
    # What the demo leaves, under its name.
    (folder / ".cache").mkdir()
    compile_source(folder / "model.gguf", folder / ".cache" / "smollm2-135m-instruct.vxm")
    for name in ("prompt", "system", "story"):
        (folder / f"{name}.txt").write_text("hello\n")
    bin_folder = tmp_path_factory.mktemp("bin")
    script = bin_folder / "hornito"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hornito "$@"\n')
    script.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "HORNITO_CACHE": str(tmp_path_factory.mktemp("cache")),
        "HORNITO_CONTEXT": "256",
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path_factory.mktemp("hf")),
        "NO_PROXY": "127.0.0.1",
    }
    return folder, environment


@pytest.mark.parametrize("document", [*DOCUMENTS, "docs/sessions.md"])
def test_commands(document: str, desk: tuple[Path, dict[str, str]]) -> None:
    """In order, as a newcomer would type them."""
    folder, environment = desk
    lines = commands(document)
    verbs = set()
    for line in lines:
        words = shlex.split(line, comments=True)
        verbs |= {words[i + 1] for i, word in enumerate(words) if word == "hornito"}
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=300,
        )
        assert done.returncode == 0, (line, done.stderr)
        assert "Traceback" not in done.stderr
    assert (
        {"doctor", "pull", "chat"} if document in DOCUMENTS else {"cache", "run", "chat"}
    ) <= verbs


def ask_a_server(script: str, folder: Path, environment: dict[str, str]) -> None:
    """Run a script of a client against `hornito serve model.vxm`, on a free port."""
    pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "hornito", "serve", "model.vxm", "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        try:
            lines = iter(server.stderr)
            found = next(filter(None, (re.search(r"on (http://[\d.:]+)", line) for line in lines)))
            done = subprocess.run(
                [sys.executable, "-c", script.replace(SERVED, found[1])],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
        finally:
            server.kill()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, "docs/api.md", "docs/sessions.md", "docs/structured.md"]
)
def test_scripts(document: str, desk: tuple[Path, dict[str, str]]) -> None:
    folder, environment = desk
    if not (folder / "model.vxm").exists():
        subprocess.run(
            [sys.executable, "-m", "hornito", "compile", "model.gguf", "model.vxm"],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
        )
    scripts = blocks(document, "python")
    assert scripts
    for script in scripts:
        if SERVED in script:
            ask_a_server(script, folder, environment)
            continue
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=folder,
            env={**environment, "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
