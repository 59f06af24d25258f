"""The benchmark of quality over storage types, on a tiny model: 2,048 tokens of a book."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_samples import HF
from text_model import write_text_model
from tree import ROOT

pytestmark = pytest.mark.gpu

FORMS = ("int8", "int4", "GGUF Q8_0", "GGUF Q4_0")


def test_forms_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights: what is expected of every rounding holds, and the files say all of it."""
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    config = json.loads((HF / "llama3-tiny" / "config.json").read_text())
    assert config["hidden_size"] % 32 == 0
    model = write_text_model(tmp_path / "m.gguf", name="llama3-tiny")
    command = [sys.executable, str(ROOT / "benchmarks" / "quality.py"), str(model)]
    command += [str(tmp_path / "q"), "--text", str(ROOT / "benchmarks" / "data" / "alice.txt")]
    command += ["--tokens", "1024", "--window", "256"]
    for form in FORMS:
        command += ["--only", form]
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads((tmp_path / "q.json").read_text())
    assert found["evaluated"] == 1024 and found["scored"] == 4 * 127
    rows = {row["form"]: row for row in found["rows"]}
    assert list(rows) == list(FORMS)
    kl = {form: row["kl_mean"] for form, row in rows.items()}
    assert 0 < kl["int8"] < kl["int4"]
    assert kl["int8"] <= 1.05 * kl["GGUF Q8_0"]
    assert kl["int4"] < kl["GGUF Q4_0"]
    assert rows["GGUF Q4_0"]["bits"] < 5 < 8 < rows["GGUF Q8_0"]["bits"] < 9
    table = (tmp_path / "q.md").read_text()
    assert all(f"| {form} |" in table for form in FORMS)
    assert "int8: mean KL" in table and "times that of GGUF Q8_0" in table
    assert "int4: mean KL" in table and "times that of GGUF Q4_0" in table
    # What is there is not measured again.
    before = (tmp_path / "q.json").read_bytes()
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "q.json").read_bytes() == before
