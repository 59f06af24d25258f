"""Devices for runtime tests, tiny models compiled once, and kernels with faults."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_samples import HF
from hornito.compiler import compile_source
from hornito.ops import kernels as kernel_files
from hornito.plan import recording as recording_module
from hornito.plan import records as records_module
from hornito.runtime.engine import Engine
from hornito.vk.device import Device, open_device
from tiny import Broken, Compiled, open_engine
from tree import ROOT, kernel_tool, own_cache


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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def fresh(cache: Path, kernels: None) -> Iterator[Device]:
    """A software device whose pipelines nobody else has made."""
    with open_device("software") as opened:
        yield opened


@pytest.fixture(scope="module")
def software(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """A software device that tests of a file use one after the other: `clean`."""
    with own_cache(tmp_path_factory), open_device("software") as opened:
        yield opened


@pytest.fixture
def clean(software: Device, cache: Path) -> Iterator[Device]:
    """A software device with nothing on it, which may have made pipelines for other tests; its
    `caps` may be changed."""
    caps = software.caps
    yield software
    software.caps = caps
    assert software.allocated_bytes == 0


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Broken:
    """`broken(kernel, text, replacement)`: compile a kernel with its source changed, and use it."""

    def patch(kernel: str, text: str, replacement: str) -> None:
        tool = kernel_tool()
        tree = tmp_path / "kernels"
        shutil.copytree(ROOT / "src" / "hornito" / "kernels", tree)
        changed = 0
        for file in (tree / f"{kernel.partition('.')[0]}.comp", *(tree / "include").iterdir()):
            source = file.read_text()
            changed += source.count(text)
            file.write_text(source.replace(text, replacement))
        assert changed == 1
        errors: list[str] = []
        tools = tool.find_tools()
        jobs = [job for job in tool.plan_jobs(tree, tools, errors) if job.name == kernel]
        assert len(jobs) == 1 and not errors
        output = tmp_path / "broken.spv"
        assert tool.compile_job(jobs[0], tools, tree / "include", output) is None
        spirv = output.read_bytes()
        assert spirv != kernel_files.load_spirv(kernel)

        def load(name: str) -> bytes:
            return spirv if name == kernel else kernel_files.load_spirv(name)

        for module in (records_module, recording_module):
            monkeypatch.setattr(module, "load_spirv", load)

    return patch
