"""A tiny model with text for answers of a given form."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import hornito
from hornito.api import LLM
from text_model import write_text_model


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory, kernels: None) -> Iterator[LLM]:
    """The tiny model, four slots, fp32 throughout."""
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")
    patch = pytest.MonkeyPatch()
    patch.setenv("HORNITO_CACHE", str(tmp_path_factory.mktemp("cache")))
    path = write_text_model(tmp_path_factory.mktemp("models") / "tiny.gguf")
    with hornito.load(
        path,
        device=os.environ.get("HORNITO_DEVICE"),
        slots=4,
        weights="fp32",
        precision="high",
        context=512,
    ) as loaded:
        yield loaded
    patch.undo()
