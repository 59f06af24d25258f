"""Buffers, arenas, uploads and downloads on a real device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hornito.errors import DeviceMemoryError, SessionError, UsageError
from hornito.vk import api, transfer
from hornito.vk.device import Arena, Buffer, Device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["device", "host", "upload"])
def test_round_trip_of_every_kind(device: Device, kind: Any) -> None:
    buffer = device.allocate(1001, kind, f"{kind} buffer")
    assert buffer.size == 1001 and buffer.kind == kind and buffer.address % 16 == 0
    assert (buffer.view is not None) == (kind != "device" or device.caps.unified_memory)
    data = np.arange(1001, dtype=np.uint32).astype(np.uint8)
    device.upload([(buffer, 0, data)])
    assert device.download(buffer, 0, 1001) == data.tobytes()
    assert device.download(buffer, 1000, 1) == data.tobytes()[1000:]
    assert device.download(buffer, 5, 0) == b""


class _Hidden:
    """Takes a buffer's host view away, so that transfers go through staging as on a GPU."""

    def __init__(self, device: Device, size: int) -> None:
        self.buffer = device.allocate(size, "device", "hidden")
        self.buffer.view = None


@pytest.mark.parametrize("half", [64, 4096, 1 << 20])
def test_staged_upload_and_download(
    device: Device, half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both halves in flight, pieces that straddle them, odd sizes and offsets."""
    monkeypatch.setattr(transfer, "HALF_BYTES", half)
    size = 50_000
    buffer = _Hidden(device, size).buffer
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, size, dtype=np.uint8)
    seen: list[int] = []

    def pieces() -> Iterator[tuple[Buffer, int, Any]]:
        cuts = [0, 1, 4, 104, 4200, 4200, 20_000, 49_999, size]
        for first, last in pairwise(cuts):
            yield buffer, first, data[first:last]

    if half == 64:  # many submissions: keep it short
        device.upload([(buffer, 100, memoryview(data[100:1100]))], seen.append)
        assert device.download(buffer, 100, 1000) == data[100:1100].tobytes()
        assert sum(seen) == 1000
        return
    device.upload(pieces(), seen.append)
    assert sum(seen) == size
    assert device.download(buffer, 0, size) == data.tobytes()
    assert "staging" not in device.memory_report()


def test_upload_takes_arrays_of_any_type(device: Device) -> None:
    buffer = device.allocate(64, "device", "mixed")
    half = np.arange(8, dtype=np.float16).reshape(2, 4)
    device.upload([(buffer, 0, half), (buffer, 16, b"bytes"), (buffer, 32, np.float32(1.5))])
    got = device.download(buffer, 0, 64)
    assert got[:16] == half.tobytes() and got[16:21] == b"bytes"
    assert got[32:36] == np.float32(1.5).tobytes()
    device.upload([(buffer, 64, b"")])
    with pytest.raises(UsageError, match="contiguous"):
        device.upload([(buffer, 0, np.zeros((4, 4), np.float32)[:, ::2])])


def test_ranges_are_checked(device: Device, affine: Any) -> None:
    buffer = device.allocate(100, "device", "small")
    with pytest.raises(UsageError, match="upload of 8 bytes at 96 is outside buffer 'small'"):
        device.upload([(buffer, 96, b"12345678")])
    with pytest.raises(UsageError, match="download of 101 bytes"):
        device.download(buffer, 0, 101)
    recorder = device.command_buffer("ranges")
    for call in (
        lambda: recorder.copy(buffer, 0, affine.source, 0, 101),
        lambda: recorder.copy(buffer, -1, affine.source, 0, 4),
        lambda: recorder.fill(buffer, 0, 104),
        lambda: recorder.fill(buffer, 2, 4),
        lambda: recorder.update(buffer, 0, b"123"),
        lambda: recorder.update(affine.source, 0, b"1234" * 20_000),
    ):
        with pytest.raises(UsageError):
            call()
    recorder.end()


def test_copy_fill_update(device: Device) -> None:
    first = device.allocate(64, "device", "first")
    second = device.allocate(64, "host", "second")
    recorder = device.command_buffer("moves")
    recorder.fill(first, 0, 64, 0xDEADBEEF)
    recorder.barrier()
    recorder.update(first, 8, b"abcdefgh")
    recorder.barrier()
    recorder.copy(first, 4, second, 0, 16)
    recorder.end()
    assert recorder.barrier_count == 2
    device.wait(device.submit([recorder]))
    word = bytes.fromhex("efbeadde")
    assert second.view is not None
    assert bytes(second.view[:16]) == word + b"abcdefgh" + word


def test_report_and_free(device: Device) -> None:
    before = device.allocated_bytes
    buffers = [device.allocate(1000, "device", label) for label in ("kv", "kv", "weights")]
    report = device.memory_report()
    assert report["kv"] == 2 * report["weights"] >= 2000
    assert device.allocated_bytes - before == sum(buffer.allocated for buffer in buffers)
    for buffer in buffers:
        buffer.free()
        buffer.free()
    assert device.allocated_bytes == before
    assert "kv" not in device.memory_report()


def test_free_refuses_while_an_array_looks(device: Device) -> None:
    buffer = device.allocate(64, "host", "looked at")
    array = np.frombuffer(buffer.view, np.uint8)
    with pytest.raises(SessionError, match="'looked at' can't be freed"):
        buffer.free()
    assert buffer.view is not None
    buffer.view[0] = 7  # nothing was released
    assert array[0] == 7
    del array
    buffer.free()
    assert device.allocated_bytes == 0


def test_over_the_allocation_limit(device: Device) -> None:
    limit = device.caps.max_allocation_bytes
    with pytest.raises(DeviceMemoryError, match="in one allocation") as caught:
        device.allocate(limit + 1, "device", "huge")
    assert (caught.value.needed, caught.value.available) == (limit + 1, limit)
    assert f"{limit + 1:,}" in str(caught.value) and caught.value.exit_code == 5


def test_over_the_heap_budget(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: refused with both numbers before the driver can spill."""
    available, total = device.heap_budget()
    assert 0 < available <= total
    monkeypatch.setattr(Device, "heap_budget", lambda self: (1000, 5000))
    with pytest.raises(DeviceMemoryError, match="1,001 bytes needed, 1,000 of 5,000") as caught:
        device.allocate(1001, "device", "kv cache")
    assert (caught.value.needed, caught.value.available) == (1001, 1000)
    with pytest.raises(DeviceMemoryError, match="no memory for weights"):
        device.check_memory(api.VK_ERROR_OUT_OF_DEVICE_MEMORY, "call", 7000, "weights")


def test_c7_what_other_programs_hold_is_not_free(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver says what is left of the heap, and more than that is refused."""

    def other(physical: Any, properties: Any) -> None:
        kind = ctypes.POINTER(api.VkPhysicalDeviceMemoryBudgetPropertiesEXT)
        budget = ctypes.cast(properties._obj.pNext, kind)[0]
        for heap in range(len(device.memory_table.heap_sizes)):
            budget.heapBudget[heap], budget.heapUsage[heap] = 10_000_000, 9_000_000

    device.caps = replace(device.caps, has_memory_budget=True)
    monkeypatch.setattr(device._instance.vk, "vkGetPhysicalDeviceMemoryProperties2", other)
    assert device.heap_budget()[0] == 1_000_000
    device.allocate(1_000_000, "device", "fits").free()
    with pytest.raises(DeviceMemoryError, match=r"1,000,001 bytes needed, 1,000,000 of"):
        device.allocate(1_000_001, "device", "kv cache")


def test_budget_without_the_extension_counts_own_buffers(device: Device) -> None:
    device.caps = replace(device.caps, has_memory_budget=False)
    total = device.heap_budget()[1]
    buffer = device.allocate(1 << 20, "device", "counted")
    assert device.heap_budget() == (total - buffer.allocated, total)


def test_arena_over_several_chunks(device: Device) -> None:
    """C4: items are spread over chunks of the device's largest allocation, each item whole."""
    device.caps = replace(device.caps, max_allocation_bytes=4096)
    items = [("a", 3000), ("b", 2000), ("c", 4096), ("d", 500), ("e", 1)]
    arena = Arena(device, "weights", items)
    assert [buffer.size for buffer in arena.buffers] == [3584 + 1, 2000, 4096]
    assert arena.bytes == 3585 + 2000 + 4096
    assert list(arena) == ["a", "b", "c", "d", "e"] and len(arena) == 5
    for name, size in items:
        buffer, offset = arena[name]
        assert offset % 256 == 0 and offset + size <= buffer.size
        assert arena.address(name) == buffer.address + offset
        device.upload([(buffer, offset, name.encode() * size)])
    for name, size in items:
        buffer, offset = arena[name]
        assert device.download(buffer, offset, size) == name.encode() * size
    arena.free()
    arena.free()
    assert device.allocated_bytes == 0


def test_arena_names_the_item_that_does_not_fit(device: Device) -> None:
    device.caps = replace(device.caps, max_allocation_bytes=4096)
    with pytest.raises(DeviceMemoryError, match=r"weights: 'head' needs 4,097 .* 4,096 bytes"):
        Arena(device, "weights", [("small", 10), ("head", 4097)])
    assert device.allocated_bytes == 0


def test_arena_that_runs_short_frees_its_chunks(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.caps = replace(device.caps, max_allocation_bytes=4096)
    real = Device.allocate

    def second_fails(self: Device, size: int, kind: Any, label: str) -> Buffer:
        if self.allocated_bytes:
            raise DeviceMemoryError("short", needed=size, available=0)
        return real(self, size, kind, label)

    monkeypatch.setattr(Device, "allocate", second_fails)
    with pytest.raises(DeviceMemoryError, match="short"):
        Arena(device, "weights", [("a", 4096), ("b", 4096)])
    assert device.allocated_bytes == 0
