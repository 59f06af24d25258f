"""Damaged files end in a HornitoError or open: never a crash, a hang or a large allocation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_samples import HF, tiny_vocabulary, write_checkpoint
from tree import ROOT

SCRIPT = Path(__file__).with_name("mutate.py")


def run(kind: str, seed: int, count: int, folder: Path) -> dict[str, int]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), kind, str(seed), str(count), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**env, "RAYON_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["slowest"] < 5.0
    outcomes: dict[str, int] = result["outcomes"]
    assert sum(outcomes.values()) == count
    return outcomes


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by RLIMIT_AS")
@pytest.mark.parametrize("seed", [1, 2])
def test_gguf(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("gguf")
    write_checkpoint(tmp_path / "model.gguf", "llama3-tiny", vocabulary=tiny_vocabulary())
    outcomes = run("gguf", seed, 150, tmp_path)
    assert outcomes["FormatError"] > 50 and outcomes["ok"] > 5


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by RLIMIT_AS")
@pytest.mark.parametrize("seed", [1, 2])
def test_safetensors(tmp_path: Path, seed: int) -> None:
    folder = Path(shutil.copytree(HF / "llama3-tiny", tmp_path / "model"))
    outcomes = run("safetensors", seed, 150, folder)
    assert outcomes["FormatError"] > 50 and outcomes["ok"] > 5
