"""One checkpoint as a directory, a GGUF file and an ONNX export: one plan, the same tokens.

SmolLM2-135M is the numbers of its GGUF file (HORNITO_TEST_SMOLLM2) in fp32, written as a directory
and exported by tools/export_onnx.py, which needs torch and optimum; HORNITO_TEST_SMOLLM2_ONNX
names an export that is there already.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hornito
from gguf_samples import HF, write_checkpoint
from hornito.importers import open_source
from hornito.package import open_package
from onnx_samples import expected, unpack
from real_model import prompts
from tree import ROOT, load_tool

pytest.importorskip("onnx")
pytestmark = pytest.mark.gpu


def plan_of(package: Path) -> dict[str, Any]:
    """Graph and weights (as hashes) of a package, less the names of what each node covers."""
    with open_package(package) as opened:
        graph = dict(opened.manifest.graph)
        graph["nodes"] = [{k: v for k, v in n.items() if k != "covers"} for n in graph["nodes"]]
        graph["weights"] = dict(sorted(graph["weights"].items()))
        hashes = {n: h for n, h in opened.manifest.sha256.items() if n in graph["weights"]}
    assert set(hashes) == set(graph["weights"])
    return {"graph": graph, "hashes": hashes}


def greedy(package: Path, prompt: list[int], count: int, context: int) -> list[int]:
    """A greedy continuation at the highest precision."""
    with hornito.load(package, precision="high", context=context) as llm:
        return list(llm.generate(prompt, max_tokens=count, ignore_eos=True).token_ids)


def compiled_each(sources: dict[str, Path], folder: Path) -> list[Path]:
    packages = []
    for name, source in sources.items():
        packages.append(folder / f"{name}.vxm")
        hornito.compile_source(source, packages[-1], weights="fp32")
    return packages


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny"])
def test_tiny_checkpoints(tmp_path: Path, name: str) -> None:
    """Rows of q and k are permuted in Llama's GGUF files, and in no others."""
    pytest.importorskip("gguf")
    sources = {
        "directory": HF / name,
        "gguf": write_checkpoint(tmp_path / "model.gguf", name),
        "onnx": unpack(name, tmp_path / "export", "model.onnx"),
    }
    golden = expected(name)
    first, *others = compiled_each(sources, tmp_path)
    for other in others:
        assert plan_of(other) == plan_of(first)
    for package in (first, *others):
        assert greedy(package, golden.prompt, 32, 128) == golden.tokens


@pytest.fixture(scope="module")
def smollm2_sources(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("smollm2")
    ready = os.environ.get("HORNITO_TEST_SMOLLM2_ONNX")
    if ready:
        load_tool("export_onnx").write_checkpoint(open_source(smollm2_gguf), folder / "hf")
        return {"directory": folder / "hf", "gguf": smollm2_gguf, "onnx": Path(ready)}
    for needed in ("torch", "optimum.exporters.onnx"):
        if importlib.util.find_spec(needed.partition(".")[0]) is None:
            pytest.skip(f"exporting needs {needed}; or set HORNITO_TEST_SMOLLM2_ONNX")
    command = [sys.executable, str(ROOT / "tools" / "export_onnx.py"), str(smollm2_gguf)]
    command += [str(folder / "onnx"), "--checkpoint", str(folder / "hf")]
    subprocess.run(command, check=True)
    return {"directory": folder / "hf", "gguf": smollm2_gguf, "onnx": folder / "onnx"}


@pytest.mark.model
@pytest.mark.slow
def test_smollm2(smollm2_sources: dict[str, Path], tmp_path: Path) -> None:
    first, *others = compiled_each(smollm2_sources, tmp_path)
    for other in others:
        assert plan_of(other) == plan_of(first)
    prompt = prompts("smollm2-135m")["capital"]
    ids, want = prompt["prompt_ids"], prompt["greedy_ids"]
    for package in (first, *others):
        assert greedy(package, ids, len(want), 256) == want
