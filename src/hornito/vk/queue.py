"""The compute queue of a device: submissions, their tickets, and waiting for them."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hornito.errors import SessionError
from hornito.vk import api
from hornito.vk.timing import SubmissionTimer

if TYPE_CHECKING:
    from hornito.vk.device import Device
    from hornito.vk.record import Recorder

# One wait in the driver lasts at most this long, so that Ctrl-C is answered.
_WAIT_SLICE_NS = 250_000_000


class Queue:
    """One queue with a timeline semaphore, whose values are the tickets.

    Attributes:
        ticket: the newest submission's.
        timer: measures submissions, once asked for.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._handle = ctypes.c_void_p()
        self._lock = threading.Lock()
        self._completed = 0
        self.ticket = 0
        self.timer: SubmissionTimer | None = None
        vk = device.vk
        vk.vkGetDeviceQueue(device.handle, device.queue_family, 0, ctypes.byref(self._handle))
        kind = api.VkSemaphoreTypeCreateInfo()
        kind.semaphoreType = api.VK_SEMAPHORE_TYPE_TIMELINE
        info = api.VkSemaphoreCreateInfo()
        info.pNext = ctypes.addressof(kind)
        semaphore = ctypes.c_uint64()
        code = vk.vkCreateSemaphore(
            device.handle, ctypes.byref(info), None, ctypes.byref(semaphore)
        )
        device.check(code, "vkCreateSemaphore")
        self._semaphore = semaphore.value

    def submit(self, recordings: Sequence[Recorder]) -> int:
        """See `Device.submit`."""
        device = self._device
        for recorder in recordings:
            if not recorder.ended or recorder.freed:
                raise SessionError(f"recording {recorder.label!r} is not ended, or was freed")
        commands = (ctypes.c_void_p * len(recordings))(*(r.command for r in recordings))
        semaphore = ctypes.c_uint64(self._semaphore)
        value = ctypes.c_uint64()
        timeline = api.VkTimelineSemaphoreSubmitInfo()
        timeline.signalSemaphoreValueCount = 1
        timeline.pSignalSemaphoreValues = ctypes.pointer(value)
        info = api.VkSubmitInfo()
        info.pNext = ctypes.addressof(timeline)
        info.commandBufferCount = len(recordings)
        info.pCommandBuffers = commands
        info.signalSemaphoreCount = 1
        info.pSignalSemaphores = ctypes.pointer(semaphore)
        with self._lock:
            value.value = self.ticket + 1
            code = device.vk.vkQueueSubmit(self._handle, 1, ctypes.byref(info), 0)
            if code == 0:
                self.ticket += 1
                for recorder in recordings:
                    recorder.last_ticket = self.ticket
        device.check(code, "vkQueueSubmit")
        return value.value

    def completed(self) -> int:
        """The newest ticket whose work is done."""
        device = self._device
        value = ctypes.c_uint64()
        code = device.vk.vkGetSemaphoreCounterValue(
            device.handle, self._semaphore, ctypes.byref(value)
        )
        device.check(code, "vkGetSemaphoreCounterValue")
        # A lost device may report the largest number for work that never ran.
        self._completed = max(self._completed, min(value.value, self.ticket))
        return self._completed

    def wait(self, ticket: int, timeout_s: float | None) -> None:
        """See `Device.wait`."""
        device = self._device
        if ticket > self.ticket:
            raise SessionError(f"ticket {ticket} was never submitted (the newest is {self.ticket})")
        if ticket <= self._completed:
            return
        semaphore = ctypes.c_uint64(self._semaphore)
        value = ctypes.c_uint64(ticket)
        info = api.VkSemaphoreWaitInfo()
        info.semaphoreCount = 1
        info.pSemaphores = ctypes.pointer(semaphore)
        info.pValues = ctypes.pointer(value)
        deadline = None if timeout_s is None else time.monotonic_ns() + int(timeout_s * 1e9)
        while True:
            left = _WAIT_SLICE_NS
            if deadline is not None:
                left = max(min(left, deadline - time.monotonic_ns()), 0)
            code = device.vk.vkWaitSemaphores(device.handle, ctypes.byref(info), left)
            if code != api.VK_TIMEOUT:
                break
            if device.lost:  # another thread has given it up
                code = api.VK_ERROR_DEVICE_LOST
                break
            if deadline is not None and time.monotonic_ns() >= deadline:
                raise device.give_up(f"did not finish ticket {ticket} in {timeout_s} s")
        device.check(code, "vkWaitSemaphores")
        self._completed = max(self._completed, ticket)

    def destroy(self) -> None:
        """Release the semaphore; the device must be idle."""
        device = self._device
        device.vk.vkDestroySemaphore(device.handle, self._semaphore, None)
