"""Faults at the boundary to the driver: the very calls that a driver would fail, do."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from hornito.errors import DeviceMemoryError
from hornito.ops import kernels as kernel_files
from hornito.vk import api
from hornito.vk.device import Device


def lose(device: Device, *, after: int = 0) -> None:
    """Every submission, wait and counter of the device says VK_ERROR_DEVICE_LOST from now on.

    Args:
        after: submissions that still succeed.
    """
    submit = device.vk.vkQueueSubmit
    left = after

    def lost(*arguments: Any) -> int:
        return int(api.VK_ERROR_DEVICE_LOST)

    def submit_some(*arguments: Any) -> int:
        nonlocal left
        if left == 0:
            for name in ("vkQueueSubmit", "vkWaitSemaphores", "vkGetSemaphoreCounterValue"):
                setattr(device.vk, name, lost)
            return lost()
        left -= 1
        code: int = submit(*arguments)
        return code

    if after:
        device.vk.vkQueueSubmit = submit_some
        return
    for name in ("vkQueueSubmit", "vkWaitSemaphores", "vkGetSemaphoreCounterValue"):
        setattr(device.vk, name, lost)


def fail_pipelines(device: Device, spirv: bytes) -> None:
    """`vkCreateComputePipelines` returns VK_ERROR_UNKNOWN for the modules of one kernel."""
    real_module, real_create = device.vk.vkCreateShaderModule, device.vk.vkCreateComputePipelines
    bad: set[int] = set()

    def module(owner: Any, info: Any, allocator: Any, out: Any) -> int:
        code: int = real_module(owner, info, allocator, out)
        given = info._obj
        mine = ctypes.string_at(given.pCode, given.codeSize) == spirv
        (bad.add if mine else bad.discard)(out._obj.value)
        return code

    def create(owner: Any, store: Any, count: int, info: Any, allocator: Any, out: Any) -> int:
        if info._obj.stage.module in bad:
            return int(api.VK_ERROR_UNKNOWN)
        code: int = real_create(owner, store, count, info, allocator, out)
        return code

    device.vk.vkCreateShaderModule = module
    device.vk.vkCreateComputePipelines = create


def fail_kernel(device: Device, kernel: str) -> None:
    """`fail_pipelines` of one of this project's kernels."""
    fail_pipelines(device, kernel_files.load_spirv(kernel))


def refuse_memory(monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    """Allocations of that label find no room."""
    real = Device.allocate

    def allocate(self: Device, size: int, kind: Any, given: str) -> Any:
        if given == label:
            raise DeviceMemoryError("no room for a test", needed=size, available=0)
        return real(self, size, kind, given)

    monkeypatch.setattr(Device, "allocate", allocate)
