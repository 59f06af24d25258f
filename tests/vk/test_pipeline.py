"""Pipelines, their cache on disk, push constants, subgroups and timestamps."""

from __future__ import annotations

import logging
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults import fail_pipelines
from hornito.errors import UnsupportedError, UsageError, VulkanError
from hornito.vk import pipeline as pipeline_module
from hornito.vk.device import Device, open_device

pytestmark = pytest.mark.gpu


def test_same_settings_share_a_pipeline(device: Device, affine: Any, shader: Any) -> None:
    spirv = shader("affine")
    same = device.pipeline(spirv, name="other", spec={2: 1, 1: 11, 0: 64}, push_size=20)
    assert same is affine.pipeline
    other = device.pipeline(spirv, name="affine", spec={0: 64, 1: 12, 2: 1}, push_size=20)
    assert other is not same and other.layout == same.layout
    assert (other.name, other.push_size, other.spec) == ("affine", 20, ((0, 64), (1, 12), (2, 1)))


def test_specialisation_reaches_the_shader(device: Device, affine: Any, shader: Any) -> None:
    other = device.pipeline(shader("affine"), name="a", spec={0: 32, 1: 2, 2: 2}, push_size=20)
    recorder = device.command_buffer("spec")
    recorder.dispatch(other, affine.push, (-(-affine.count // 32), 1, 1))
    recorder.end()
    device.wait(device.submit([recorder]))
    got = np.frombuffer(device.download(affine.target, 0, 4 * affine.count), np.uint32)
    np.testing.assert_array_equal(got, (affine.values * 3 + 2) * 3 + 2)


def test_push_size_and_group_limits_are_checked(device: Device, affine: Any) -> None:
    recorder = device.command_buffer("checked")
    with pytest.raises(UsageError, match="push constants have 16 bytes, the pipeline declares 20"):
        recorder.dispatch(affine.pipeline, affine.push[:16], (1, 1, 1))
    too_many = device.caps.max_workgroup_count[1] + 1
    with pytest.raises(UsageError, match="exceed the device's limit"):
        recorder.dispatch(affine.pipeline, affine.push, (1, too_many, 1))
    assert recorder.dispatch_count == 0
    recorder.end()


def test_impossible_requests(device: Device, shader: Any) -> None:
    spirv = shader("affine")
    with pytest.raises(UnsupportedError, match="push-constant block of 4096 bytes"):
        device.pipeline(spirv, name="big", spec={}, push_size=4096)
    wrong = device.caps.subgroup_max * 2
    with pytest.raises(UnsupportedError, match=f"odd: subgroup size {wrong} can't be required"):
        device.pipeline(spirv, name="odd", spec={0: 64}, push_size=20, subgroup_size=wrong)
    with pytest.raises(VulkanError, match="junk: not a SPIR-V module"):
        device.pipeline(b"junk" * 8, name="junk", spec={}, push_size=0)


def test_failed_compilation_names_the_kernel(device: Device, shader: Any) -> None:
    """D3: the caller gets an error to fall back on, and the device stays usable."""
    spirv = shader("affine")
    fail_pipelines(device, spirv)
    with pytest.raises(VulkanError, match=r"kernel gemm/subgroup: .* could not compile") as caught:
        device.pipeline(spirv, name="gemm/subgroup", spec={0: 64}, push_size=20)
    assert caught.value.code == -13
    twin = device.pipeline(shader("subgroup"), name="gemm/plain", spec={0: 64}, push_size=8)
    assert twin.name == "gemm/plain" and twin.handle != 0


@pytest.mark.parametrize("full", [False, True])
def test_subgroup_size_is_honoured(device: Device, shader: Any, full: bool) -> None:
    caps = device.caps
    if not caps.has_subgroup_size_control or (full and not caps.has_full_subgroups):
        pytest.skip(f"{device.info.name} has no subgroup size control")
    spirv = shader("subgroup")
    size = caps.subgroup_min
    while size <= caps.subgroup_max:
        buffer = device.allocate(4 * 128, "device", "sizes")
        pipeline = device.pipeline(
            spirv, name="sizes", spec={0: 128}, push_size=8, subgroup_size=size, full_subgroups=full
        )
        recorder = device.command_buffer("sizes")
        recorder.dispatch(pipeline, struct.pack("<Q", buffer.address), (1, 1, 1))
        recorder.end()
        device.wait(device.submit([recorder]))
        got = np.frombuffer(device.download(buffer, 0, 512), np.uint32)
        assert set(got & 0xFFFF) == {size}
        if full:
            assert set(got >> 16) == {128 // size}
        size *= 2


def _cache_file(folder: Path) -> Path:
    files = list(folder.iterdir())
    assert len(files) == 1, files  # no temporary file is left behind
    return files[0]


def test_cache_file_is_written_and_read(device: Device, affine: Any, private_cache: Path) -> None:
    device.save_pipeline_cache()
    file = _cache_file(private_cache)
    assert device.info.uuid in file.name and affine.pipeline.handle
    written = file.read_bytes()
    assert int.from_bytes(written[:4], "little") >= 32
    file.unlink()
    device.save_pipeline_cache()  # nothing new was compiled: nothing to write
    assert not file.exists()


@pytest.mark.parametrize(
    "damage", [b"", b"x", b"\0" * 64, None, "flip"], ids=["empty", "short", "zeros", "cut", "flip"]
)
def test_damaged_cache_is_ignored(
    shader: Any, private_cache: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """I4: any file there leads to a working device and a good file at the end."""
    spirv = shader("affine")
    with open_device(0) as device:
        device.pipeline(spirv, name="a", spec={0: 64}, push_size=20)
    file = _cache_file(private_cache)
    good = file.read_bytes()
    if damage is None:
        damage = good[:20]
    elif damage == "flip":  # another driver's UUID
        damage = good[:16] + bytes(16) + good[32:]
    file.write_bytes(damage)
    with caplog.at_level(logging.WARNING, logger="hornito"), open_device(0) as device:
        device.pipeline(spirv, name="a", spec={0: 64}, push_size=20)
    ignored = [r for r in caplog.records if "pipeline cache" in r.getMessage()]
    assert len(ignored) == (1 if damage else 0)
    assert _cache_file(private_cache).read_bytes()[:32] == good[:32]


def test_cache_folder_that_can_not_be_written(
    shader: Any, private_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private_cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="hornito"), open_device(0) as device:
        pipeline = device.pipeline(shader("affine"), name="a", spec={0: 64}, push_size=20)
        assert pipeline.handle
    assert "can't be written" in caplog.text


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORNITO_CACHE", "/somewhere")
    assert pipeline_module.cache_directory() == Path("/somewhere")
    monkeypatch.delenv("HORNITO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert pipeline_module.cache_directory() == Path("/xdg/hornito")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert pipeline_module.cache_directory() == Path.home() / ".cache" / "hornito"


def test_timestamps_grow_and_measure(device: Device, slow_affine: Any) -> None:
    if device.caps.timestamp_bits == 0:
        pytest.skip(f"{device.info.name} has no timestamps")
    recorder = device.command_buffer("timed")
    recorder.timestamp(0)
    recorder.dispatch(slow_affine.pipeline, slow_affine.push, slow_affine.groups)
    recorder.barrier()
    recorder.timestamp(1)
    for index in range(2, 70):  # past one query pool
        recorder.timestamp(index)
    with pytest.raises(UsageError, match="the next index is 70"):
        recorder.timestamp(71)
    recorder.end()
    started = time.perf_counter_ns()
    device.wait(device.submit([recorder]))
    wall = time.perf_counter_ns() - started
    times = device.read_timestamps(recorder)
    assert len(times) == 70 and times == sorted(times)
    assert 0 < times[1] - times[0] <= wall
    assert times[1] - times[0] > times[69] - times[1]


def test_recording_starts_over(device: Device, affine: Any) -> None:
    recorder = device.command_buffer("again")
    for count in (1, 2):
        for _ in range(count):
            recorder.dispatch(affine.pipeline, affine.push, affine.groups)
            recorder.barrier()
        if device.caps.timestamp_bits:
            recorder.timestamp(0)
        recorder.end()
        assert (recorder.dispatch_count, recorder.barrier_count) == (count, count)
        device.wait(device.submit([recorder]))
        recorder.reset()
        assert (recorder.dispatch_count, recorder.barrier_count) == (0, 0)
    recorder.end()
    device.wait(device.submit([recorder]))
    assert device.read_timestamps(recorder) == []


def test_dispatch_is_cheap(shader: Any) -> None:
    """Recording must not cost a decode step its time: about 2 us here, 20 us are never right."""
    with open_device(0, validate=False) as device:
        pipeline = device.pipeline(shader("affine"), name="a", spec={0: 64}, push_size=20)
        recorder = device.command_buffer("many")
        push, groups = bytes(20), (1, 1, 1)
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(2000):
                recorder.dispatch(pipeline, push, groups)
                recorder.barrier()
            best = min(best, (time.perf_counter() - started) / 2000)
        assert best < 20e-6
