"""Packages of tiny models and of SmolLM2, compiled once, in a cache folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hornito
from gguf_samples import HF, write_checkpoint
from hornito import loading
from hornito.diag import quality_models
from lent import lent_devices
from tiny import Compiled
from tree import own_cache

#: GGUF names of the matrices of a llama checkpoint of up to three layers.
MATRICES = ["token_embd.weight", "output.weight"] + [
    f"blk.{layer}.{part}.weight"
    for layer in range(3)
    for part in (
        *("attn_q", "attn_k", "attn_v", "attn_output"),
        *("ffn_gate", "ffn_up", "ffn_down"),
    )
]


@pytest.fixture(scope="session", autouse=True)
def private_cache(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Pipeline caches and compiled sources of these tests stay in their own folder."""
    with own_cache(tmp_path_factory):
        yield


@pytest.fixture(scope="module", autouse=True)
def lent(private_cache: None) -> Iterator[None]:
    """The loads of a file share devices, pipelines and all."""
    with lent_devices(loading, quality_models):
        yield


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """`compiled(name, source, weights)`: a tiny checkpoint's package, from its directory (`hf`) or
    from a GGUF file that holds the same weights in llama.cpp's layout (`gguf`, `gguf-f16`)."""
    folder = tmp_path_factory.mktemp("packages")

    def package(name: str, source: str = "hf", weights: str = "fp32") -> Path:
        path = folder / f"{name}-{source}-{weights}.vxm"
        if not path.exists():
            origin = HF / name
            if source != "hf":
                pytest.importorskip("gguf")
                kinds = dict.fromkeys(MATRICES, "F16") if source == "gguf-f16" else None
                origin = write_checkpoint(folder / f"{name}-{source}.gguf", name, quantise=kinds)
            hornito.compile_source(origin, path, weights=weights)
        return path

    return package


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """`smollm2(weights)`: the package of SmolLM2-135M-Instruct."""
    folder = tmp_path_factory.mktemp("smollm2")

    def package(weights: str) -> Path:
        path = folder / f"{weights}.vxm"
        if not path.exists():
            hornito.compile_source(smollm2_gguf, path, weights=weights)
        return path

    return package


@pytest.fixture(scope="session")
def gemma3(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """`gemma3(weights)`: the package of Gemma 3 270M."""
    folder = tmp_path_factory.mktemp("gemma3")

    def package(weights: str) -> Path:
        path = folder / f"{weights}.vxm"
        if not path.exists():
            hornito.compile_source(gemma3_gguf, path, weights=weights)
        return path

    return package
