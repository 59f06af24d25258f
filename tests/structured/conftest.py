"""A tiny model with text for answers of a given form."""

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


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny model's file, and a cache and devices of its own."""
    with own_cache(tmp_path_factory), lent_devices(loading):
        yield write_text_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(text_model: Path, kernels: None) -> Iterator[LLM]:
    """The tiny model, four slots, fp32 throughout."""
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")
    with hornito.load(
        text_model,
        device=os.environ.get("HORNITO_DEVICE"),
        slots=4,
        weights="fp32",
        precision="high",
        context=512,
        submission_ms=60_000.0,
    ) as loaded:
        yield loaded
