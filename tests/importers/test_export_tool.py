"""tools/export_onnx.py on the tiny checkpoints, over opsets and attentions: every export becomes
the graph of its directory. Needs torch, transformers and optimum's exporter; started by hand."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gguf_samples import HF
from hornito.graph.graph import Graph
from hornito.importers import open_source
from tree import ROOT

pytest.importorskip("onnx")
pytestmark = pytest.mark.slow

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "smollm3", "gemma2", "gemma3")
SPELLINGS = ((13, "eager"), (14, "sdpa"), (17, "eager"), (18, "sdpa"), (20, "sdpa"))


def spelled(graph: Graph) -> list[Any]:
    return [(n.op, n.name, n.inputs, dict(n.attrs)) for n in graph]


@pytest.mark.parametrize(("opset", "attention"), SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_exports_become_the_directorys_graph(
    tmp_path: Path, family: str, opset: int, attention: str
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("optimum.exporters.onnx")
    checkpoint = HF / f"{family}-tiny"
    command = [sys.executable, str(ROOT / "tools" / "export_onnx.py"), str(checkpoint)]
    command += [str(tmp_path), "--opset", str(opset), "--attention", attention]
    subprocess.run(command, check=True, capture_output=True)
    source, theirs = open_source(tmp_path), open_source(checkpoint)
    assert source.builder is not None
    module = importlib.import_module(f"hornito.models.{theirs.model_type}")
    reference = module.build(theirs.config, theirs.tensors, "fp32")
    assert spelled(source.builder("fp32")) == spelled(reference)
