"""Every example runs, in a process, as its first line says."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tree import ROOT

#: `embeddings` runs a model of tensors (tests/tensor/test_example.py), `openai_...` ask a server
#: (tests/serve/test_cli_serve.py).
EXAMPLES = sorted(
    p
    for p in (ROOT / "examples").glob("*.py")
    if p.stem != "embeddings" and not p.stem.startswith("openai_")
)

#: What each prints about the tiny model, whose text is random.
LINES = {
    "generate": ["Once upon a time"],
    "stream": [],
    "chat": ["> Hi", "> And you?", " tokens reused, "],
    "score": ["perplexity", " Paris is in France", " Paris is in Spain"],
    "batch": ["'One' -> ", "'Two' -> ", "'Three' -> "],
    "token_ids": ["the same, step by step: True"],
}


def usage(path: Path) -> list[str]:
    """The arguments in the example's first line, MODEL included."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text is not None
    words = shlex.split(text.splitlines()[0].split(": ", 1)[1])
    assert words[:2] == ["python", f"examples/{path.name}"]
    return words[2:]


def run(path: Path, model: Path) -> subprocess.CompletedProcess[str]:
    arguments = [str(model) if word == "MODEL" else word for word in usage(path)]
    return subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )


def test_all_are_known_and_short() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(LINES)
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 40, path.name
        assert "MODEL" in usage(path)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
@pytest.mark.parametrize("arguments", [[], ["model.gguf"]])
def test_missing_arguments_show_the_usage(path: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stdout == ""
    assert f"python examples/{path.name}" in done.stderr and "Traceback" not in done.stderr


WRONG = {
    "MODEL": "none.gguf",
    "URL": "http://127.0.0.1:9/v1",  # the port that discards, where nothing listens
    "model.onnx": "none.onnx",
    "tokenizer.json": "none.json",
    "1,2,3": "1,two",
}
"""Arguments of examples, and what is given instead."""


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_wrong_arguments_are_told_in_a_line(path: Path, tmp_path: Path) -> None:
    if path.stem.startswith("openai_"):
        pytest.importorskip("openai")
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text is not None
    line = next(line for line in text.splitlines() if "python examples/" in line)
    words = shlex.split(line[line.index("python ") :])[2:]
    arguments = [WRONG.get(word, word) for word in words]
    assert arguments != words
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 1 and done.stdout == ""
    (said,) = done.stderr.splitlines()
    assert path.name in said and len(said) > len(str(path)) + 10


@pytest.mark.parametrize("content", (b"", b"{}", b"\xff"))
def test_a_file_that_is_no_tokenizer(content: bytes, tmp_path: Path) -> None:
    """The tokenizers of its library raise errors of no class of their own."""
    path, file = ROOT / "examples" / "embeddings.py", tmp_path / "tokenizer.json"
    file.write_bytes(content)
    command = [sys.executable, str(path), "model.onnx", str(file), "A cat sleeps.", "A pet naps."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert str(file) in done.stderr.splitlines()[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_tiny(path: Path, text_model: Path) -> None:
    done = run(path, text_model)
    assert done.returncode == 0, done.stderr
    for line in LINES[path.stem]:
        assert line.strip() in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.slow
def test_smollm2(smollm2_gguf: Path) -> None:
    """A model that knows something."""
    score = run(ROOT / "examples/score.py", smollm2_gguf).stdout.splitlines()
    assert score[0].endswith("Paris is in France") and score[1].endswith("Paris is in Spain")
    chat = run(ROOT / "examples/chat.py", smollm2_gguf)
    assert "(0 tokens reused" not in chat.stdout and chat.returncode == 0
