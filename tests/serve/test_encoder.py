"""Embeddings of an encoder package: the mean of its golden's hidden state, of length 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("onnx")

from faults import lose
from hornito.errors import UsageError
from hornito.importers.onnx_generic import Binding, parse
from hornito.serve.embeddings import EmbeddingService
from hornito.serve.encoder import Encoder
from hornito.serve.metrics import Metrics
from hornito.tensor.package import GraphSpec, compile_graphs
from hornito.vk.device import Device, open_device
from serve_samples import write_encoder
from serving import serving, wait
from tensor.models import bert_golden, model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder")).parent


@pytest.fixture(scope="module")
def encoder(folder: Path, device: str | None, kernels: None) -> Encoder:
    return Encoder(folder / "bert.vxm", None, lambda: open_device(device))


@pytest.fixture(scope="module")
def url(encoder: Encoder) -> Iterator[str]:
    with serving(EmbeddingService(encoder, Metrics(), "bert", 8)) as url:
        yield url


@pytest.fixture
def embedder(url: str) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_the_golden(embedder: Any) -> None:
    """Token ids in, the mean over real tokens out; the padding of any bucket changes nothing."""
    golden = bert_golden()
    count = int(golden["attention_mask"].sum())
    ids = golden["input_ids"][0, :count].tolist()
    hidden = golden["last_hidden_state"].reshape(-1, 48)[:count]
    mean = hidden.astype(np.float64).mean(axis=0)
    answer = embedder.embeddings.create(model="bert", input=ids)
    (found,) = answer.data
    np.testing.assert_allclose(found.embedding, mean / np.linalg.norm(mean), rtol=0, atol=1e-5)
    assert answer.object == "list" and found.object == "embedding" and answer.model == "bert"
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)


def test_texts(embedder: Any, encoder: Encoder) -> None:
    """More than a batch holds, of both buckets, in their order, as floats and as base64."""
    texts = ["a cat", "dog sleeps", "a cat " * 6, "a cat", "a dog sleeps a cat sleeps", "cat"]
    floats = embedder.embeddings.create(model="bert", input=texts, encoding_format="float")
    assert [one.index for one in floats.data] == list(range(6))
    vectors = np.array([one.embedding for one in floats.data])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=0, atol=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[3], rtol=0, atol=1e-6)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3
    packed = embedder.embeddings.create(model="bert", input=texts)  # base64 by itself
    np.testing.assert_array_equal(
        np.array([one.embedding for one in packed.data], np.float32), vectors.astype(np.float32)
    )
    assert floats.usage.prompt_tokens == sum(len(encoder.encode(text)) for text in texts)
    alone = embedder.embeddings.create(model="bert", input=texts[4]).data[0].embedding
    np.testing.assert_allclose(alone, vectors[4], rtol=0, atol=1e-6)
    same = embedder.embeddings.create(model="bert", input=texts[4], dimensions=48).data[0].embedding
    assert same == alone


def test_what_is_refused(url: str) -> None:
    def post(**body: Any) -> httpx.Response:
        return httpx.post(f"{url}/v1/embeddings", json={"model": "bert", **body})

    long = post(input="a cat " * 10)
    error = long.json()["error"]
    assert long.status_code == 400 and error["code"] == "context_length_exceeded"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (22, 16)
    for body, param in (
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [512]}, "input[0]"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "n": 2}, "n"),
    ):
        answer = post(**body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert post(model="other", input="a").status_code == 404
    chat = httpx.post(f"{url}/v1/chat/completions", json={"model": "bert"})
    assert chat.status_code == 404
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 16
    assert post(input="a").status_code == 200
    metrics = httpx.get(f"{url}/metrics").text
    assert 'hornito_answers_total{outcome="embedded"}' in metrics


def test_a_lost_device(url: str, encoder: Encoder) -> None:
    """503 once, by a request or by /health; then the device is there again."""
    body = {"model": "bert", "input": "a cat"}
    before = httpx.post(f"{url}/v1/embeddings", json=body).json()
    device: Device = encoder.device
    lose(device)
    assert httpx.get(f"{url}/health").status_code == 503
    wait(lambda: httpx.get(f"{url}/health").status_code == 200)
    assert encoder.device is not device
    assert httpx.post(f"{url}/v1/embeddings", json=body).json() == before
    lose(encoder.device)
    lost = httpx.post(f"{url}/v1/embeddings", json=body)
    assert lost.status_code == 503 and lost.json()["error"]["code"] == "device_lost"
    assert httpx.post(f"{url}/v1/embeddings", json=body).json() == before


def test_what_is_no_encoder(tmp_path: Path, device: str | None) -> None:
    from onnx import TensorProto, helper

    node = helper.make_node("Relu", ["x"], ["out"])
    proto = model([node], {"x": (TensorProto.FLOAT, [2, 3])})
    compile_graphs([GraphSpec(parse(Path("relu.onnx"), proto), Binding())], tmp_path / "m.vxm")
    with pytest.raises(UsageError, match="no encoder of text: it takes x"):
        Encoder(tmp_path / "m.vxm", None, lambda: open_device(device))
    with pytest.raises(UsageError, match="can't read"):
        Encoder(tmp_path / "m.vxm", tmp_path / "none.json", lambda: open_device(device))
