"""One device for all runtime tests, and tiny models compiled once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_samples import HF
from hornito.compiler import compile_source
from hornito.runtime.engine import Engine
from hornito.vk.device import Device, open_device
from tiny import Compiled, open_engine
from tree import own_cache


@pytest.fixture(scope="module")
def device(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """The device that the tests of a file share, pipelines and all."""
    with own_cache(tmp_path_factory), open_device(os.environ.get("HORNITO_DEVICE")) as opened:
        yield opened


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """`compiled(name, weights="fp32", disabled=())`: the package of a tiny checkpoint."""
    folder = tmp_path_factory.mktemp("packages")

    def package(name: str, weights: str = "fp32", disabled: tuple[str, ...] = ()) -> Path:
        path = folder / f"{name}-{weights}-{'-'.join(disabled)}.vxm"
        if not path.exists():
            compile_source(HF / name, path, weights=weights, disabled_passes=disabled)
        return path

    return package


@pytest.fixture(scope="module")
def engine(device: Device, compiled: Compiled) -> Iterator[Engine]:
    """llama-tiny with one slot, fp32 throughout."""
    with open_engine(device, compiled("llama-tiny")) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared(device: Device, compiled: Compiled) -> Iterator[Engine]:
    """llama-tiny with four slots, fp32 throughout."""
    with open_engine(device, compiled("llama-tiny"), slots=4) as opened:
        yield opened
