"""Tiny models with text, loaded once for the tests of the Python interface."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import hornito
from hornito import loading
from hornito.api import LLM
from lent import lent_devices
from text_model import write_text_model
from tree import own_cache


@pytest.fixture(scope="module", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the file's own, whose loads share devices, pipelines and all."""
    with own_cache(tmp_path_factory) as folder, lent_devices(loading):
        yield folder


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(text_model: Path, private_cache: Path, kernels: None) -> Iterator[LLM]:
    """The tiny model with text, two slots, fp32 throughout."""
    device = os.environ.get("HORNITO_DEVICE")
    with hornito.load(
        text_model, device=device, slots=2, weights="fp32", precision="high", context=512
    ) as loaded:
        yield loaded
