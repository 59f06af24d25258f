"""One live server with a tiny model for the tests of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hornito import loading
from lent import lent_devices
from tree import own_cache

if TYPE_CHECKING:
    from serving import Live


@pytest.fixture(scope="module", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the file's own, whose loads share devices, pipelines and all."""
    with own_cache(tmp_path_factory) as folder, lent_devices(loading):
        yield folder


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from text_model import write_text_model

    return write_text_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def device() -> str | None:
    return os.environ.get("HORNITO_DEVICE")


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, private_cache: Path, device: str | None, kernels: None
) -> Iterator[Live]:
    """With the tiny model; parametrised with "smollm2", with that one as its file holds it."""
    from serving import live

    if getattr(request, "param", "tiny") == "tiny":
        path, options = request.getfixturevalue("text_model"), {}
    else:
        path, options = request.getfixturevalue("smollm2_gguf"), {"weights": "keep"}
    with live(path, device=device, **options) as made:
        yield made


@pytest.fixture
def client(server: Live) -> Any:
    """The official client."""
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
