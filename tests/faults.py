"""Faults at the boundary to the driver: the very calls that a driver would fail, do."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import pytest

from hornito.errors import DeviceMemoryError
from hornito.ops import kernels as kernel_files
from hornito.vk import api
from hornito.vk.device import Device

_WAITS = ("vkQueueSubmit", "vkWaitSemaphores", "vkGetSemaphoreCounterValue")
_HARMFUL = ("vkDeviceWaitIdle", "vkDestroyBuffer", "vkFreeMemory", "vkDestroyDevice")


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
            for name in _WAITS:
                setattr(device.vk, name, lost)
            return lost()
        left -= 1
        code: int = submit(*arguments)
        return code

    if after:
        device.vk.vkQueueSubmit = submit_some
        return
    for name in _WAITS:
        setattr(device.vk, name, lost)


class Hang:
    """No submission of a device ends, as its driver tells it, from now on until `end`.

    Args:
        after: submissions that still do.

    Attributes:
        harm: calls that waited for ever, or pulled memory from under a running kernel.
    """

    def __init__(self, device: Device, *, after: int = 0) -> None:
        self.harm: list[str] = []
        self._queue = device._queue
        self._vk = device.vk
        self._real = {name: getattr(device.vk, name) for name in (*_WAITS, *_HARMFUL)}
        self._left = after
        if after:
            self._put("vkQueueSubmit", self._submit)
        else:
            self._begin()

    def _put(self, name: str, call: Any) -> None:
        setattr(self._vk, name, call)

    def _submit(self, *arguments: Any) -> int:
        if self._left == 0:
            self._begin()
        self._left -= 1
        return int(self._real["vkQueueSubmit"](*arguments))

    def _begin(self) -> None:
        done = self._queue.ticket
        self._queue.wait(done, None)

        def wait(device: Any, info: Any, timeout: int) -> int:
            if info._obj.pValues[0] <= done:
                return 0
            time.sleep(min(timeout / 1e9, 0.02))
            return int(api.VK_TIMEOUT)

        def counter(device: Any, semaphore: Any, value: Any) -> int:
            value._obj.value = done
            return 0

        def harmful(name: str) -> Any:
            return lambda *arguments: self.harm.append(name) or 0

        self._put("vkQueueSubmit", self._real["vkQueueSubmit"])
        self._put("vkWaitSemaphores", wait)
        self._put("vkGetSemaphoreCounterValue", counter)
        for name in _HARMFUL:
            self._put(name, harmful(name))

    def end(self) -> None:
        """The driver works again, and tells what has ended."""
        for name, call in self._real.items():
            self._put(name, call)


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
