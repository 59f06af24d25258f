"""ONNX exports of the tiny models, unpacked where a test wants them, and what each must compute.

The files lie gzipped under tests/data/onnx; they were made by optimum-onnx (TorchScript, opset 18),
optimum 1.23 (`old446`, opset 14), torch's dynamo exporter (`dyn18`, `dyn23`), ONNX Runtime GenAI
(`genai`) and ONNX Runtime's quantisers (`q4`, `q4f16`) from the checkpoints under tests/data/hf.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_samples import HF
from tree import ROOT

ONNX = ROOT / "tests/data/onnx"

#: Every decoder: its checkpoint, and how far logits may be from the reference. Exports in fp16 and
#: in 4 bits with fp16 activations were made by references that compute in fp16.
CHECKPOINTS = {
    "qwen2-tiny": ("qwen2-tiny", 1e-3),
    "qwen2-bigvocab": ("qwen2-bigvocab", 1e-3),
    "llama-tiny": ("llama-tiny", 1e-3),
    "llama3-tiny": ("llama3-tiny", 1e-3),
    "qwen3-tiny": ("qwen3-tiny", 1e-3),
    "gemma3-tiny": ("gemma3-tiny", 1e-3),
    "mistral-tiny": ("mistral-tiny", 1e-3),
    "phi3-tiny": ("phi3-tiny", 1e-3),
    "phi3-longrope": ("phi3-longrope", 1e-3),
    "gpt2-tiny": ("gpt2-tiny", 1e-3),
    "gemma2-tiny-pos": ("gemma2-tiny", 1e-3),
    "llama-tiny-old446": ("llama-tiny", 1e-3),
    "qwen2-tiny-dyn18": ("qwen2-tiny", 1e-3),
    "qwen3-tiny-dyn23": ("qwen3-tiny", 1e-3),
    "gemma3-tiny-dyn23": ("gemma3-tiny", 1e-3),
    "gemma3-tiny-genai": ("gemma3-tiny", 1e-3),
    "qwen2-tiny-q4": ("qwen2-tiny", 1e-3),
    "qwen2-tiny-q4f16": ("qwen2-tiny", 3e-2),
    "qwen2-tiny-genai-int4": ("qwen2-tiny", 3e-2),
}
NAMES = tuple(CHECKPOINTS)
QUANTISED = ("qwen2-tiny-q4", "qwen2-tiny-q4f16", "qwen2-tiny-genai-int4")


@dataclass(frozen=True)
class Expected:
    """What a file computes: the prompt's logits (or only the last row's) and 32 greedy tokens."""

    prompt: list[int]
    tokens: list[int]
    logits: npt.NDArray[np.float32]
    tolerance: float

    def error(self, logits: npt.NDArray[Any]) -> float:
        """How far `logits [rows, V]` of the prompt are off."""
        got = logits if self.logits.ndim == 2 else logits[-1]
        return float(np.abs(got - self.logits).max())


def checkpoint(name: str) -> Path:
    """The directory of the same weights."""
    return HF / CHECKPOINTS[name][0]


def expected(name: str) -> Expected:
    """The golden of a file: transformers', or ONNX Runtime's where the file computes another."""
    path = ONNX / f"{name}.npz"
    with np.load(path if path.exists() else checkpoint(name) / "golden.npz") as data:
        own = "ort_tokens" in data
        logits = next(
            data[key]
            for key in ("ort_prefill_logits", "prefill_logits", "prefill_logits_last")
            if key in data
        )
        tokens = data["ort_tokens" if own else "tokens"]
        return Expected(data["prompt"].tolist(), tokens.tolist(), logits, CHECKPOINTS[name][1])


def unpack(name: str, folder: Path, file: str | None = None) -> Path:
    """The export as a file in `folder`, external data beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / (file or f"{name}.onnx")
    target.write_bytes(gzip.decompress((ONNX / f"{name}.onnx.gz").read_bytes()))
    data = ONNX / f"{name}.onnx.data.gz"
    if data.exists():
        (folder / f"{name}.onnx.data").write_bytes(gzip.decompress(data.read_bytes()))
    return target
