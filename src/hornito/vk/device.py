"""The device: everything that Hornito asks of Vulkan goes through here."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hornito.errors import (
    DeviceLostError,
    DeviceMemoryError,
    NoDeviceError,
    SessionError,
    UsageError,
    VulkanError,
    size_text,
)
from hornito.vk import api, transfer
from hornito.vk.caps import Caps
from hornito.vk.instance import (
    Instance,
    acquire_instance,
    names_array,
    release_instance,
    result_text,
)
from hornito.vk.loader import explain
from hornito.vk.memory import Arena, Buffer, MemoryKind, memory_table
from hornito.vk.pipeline import Pipeline, PipelineStore
from hornito.vk.probe import DeviceInfo, Probe, enabled_features, probe
from hornito.vk.queue import Queue
from hornito.vk.quirks import apply_quirks, quirks_for, without_features
from hornito.vk.record import Recorder
from hornito.vk.select import choose_device, device_rank
from hornito.vk.timing import SubmissionTimer

__all__ = ["Arena", "Buffer", "Device", "DeviceInfo", "list_devices", "open_device"]

logger = logging.getLogger("hornito")

_OUT_OF_MEMORY = (api.VK_ERROR_OUT_OF_DEVICE_MEMORY, api.VK_ERROR_OUT_OF_HOST_MEMORY)

# Devices that nobody closed are closed before the interpreter takes the modules apart.
_open_devices: weakref.WeakSet[Device] = weakref.WeakSet()
_working: set[Device] = set()
"""Those that were closed while they still worked on what they were given up over."""


@atexit.register
def _close_open_devices() -> None:
    for device in list(_open_devices):
        device.close()


def _validation_wanted() -> bool:
    return os.environ.get("HORNITO_VALIDATE", "") == "1"


def _probes(instance: Instance) -> list[Probe]:
    """Every physical device, sorted; raises NoDeviceError when there is none."""
    found = [probe(instance, h, i) for i, h in enumerate(instance.physical_devices())]
    if not found:
        raise NoDeviceError(
            explain(
                "no Vulkan driver found a device; install a driver for your GPU, or the software "
                "device: apt-get install mesa-vulkan-drivers"
            )
        )
    found.sort(key=lambda entry: device_rank(entry.info))  # stable
    return [
        replace(entry, info=replace(entry.info, index=index)) for index, entry in enumerate(found)
    ]


def list_devices() -> list[DeviceInfo]:
    """Every Vulkan device, best first: discrete, integrated, virtual, other, software.

    Devices that Hornito can't run on are listed with `usable` False and the reason.

    Raises:
        NoDeviceError: no loader, no driver or no device.
    """
    instance = acquire_instance(_validation_wanted())
    try:
        return [entry.info for entry in _probes(instance)]
    finally:
        release_instance(instance)


def open_device(
    selector: str | int | None = None,
    *,
    validate: bool | None = None,
    disable_features: Sequence[str] = (),
) -> Device:
    """Open a device.

    Args:
        selector: index in `list_devices()`, part of a name, a vendor (amd, intel, nvidia,
            qualcomm, arm, mesa, ...), 'pci:0000:01:00.0', a UUID in hex, or 'software' (also
            'cpu'). None takes $HORNITO_DEVICE, else the best usable device; a software device only
            when there is no other, with a warning.
        validate: run under the Khronos validation layer, whose messages are raised as VulkanError
            by the next call; None takes $HORNITO_VALIDATE == '1'.
        disable_features: optional features to do without (`hornito.vk.quirks.FEATURES`).

    Raises:
        NoDeviceError: no loader, driver or usable device, no match, or an ambiguous selector.
        UsageError: validation is wanted and the layer is not installed.
    """
    if selector is None:
        selector = os.environ.get("HORNITO_DEVICE") or None
    instance = acquire_instance(_validation_wanted() if validate is None else validate)
    try:
        probes = _probes(instance)
        chosen = choose_device([entry.info for entry in probes], selector)
        if selector is None and chosen.kind == "software":
            logger.warning(
                "no GPU found: running on the software device %s, which is slow "
                "(HORNITO_DEVICE=software silences this)",
                chosen.name,
            )
        return Device(instance, probes[chosen.index], disable_features)
    except BaseException:
        release_instance(instance)
        raise


class Device:
    """An open device with one compute queue; a context manager.

    Calls may come from several threads (submission is serialised); one Recorder belongs to one
    thread at a time. After a device loss every call raises DeviceLostError; `close` still works.
    A device whose work does not end in its time counts as lost as well; as there is no way to stop
    a kernel, nothing that it may use is freed before it has ended.

    Attributes:
        info: what the device is.
        caps: what it can do, after quirks.
        quirks: the rows of the quirk table that apply.
        disabled: optional features that are done without on request.
        allocated_bytes: device and host memory that its buffers hold.
    """

    def __init__(self, instance: Instance, found: Probe, disabled: Sequence[str] = ()) -> None:
        """Use `open_device`. Takes over the caller's reference to the instance."""
        self.info = found.info
        self.quirks = quirks_for(found.info)
        self.disabled = tuple(disabled)
        caps = apply_quirks(Caps.parse(found.record), self.quirks)
        self.caps = without_features(caps, self.disabled)
        self.memory_table = memory_table(found.memory, self.caps.unified_memory)
        self.queue_family = found.queue_family
        self.allocated_bytes = 0
        self._instance = instance
        self._physical = found.handle
        self._closed = True  # until there is something to close
        self._process = os.getpid()
        self._lost = False
        self._given_up = False
        self._lock = threading.Lock()
        self._buffers: dict[int, Buffer] = {}
        self._recorders: dict[int, Recorder] = {}
        self.handle = self._create(found)
        self.vk = api.DeviceFunctions(instance.vk, self.handle)
        self._name = self.vk.vkSetDebugUtilsObjectNameEXT if instance.validate else None
        try:
            self._queue = Queue(self)
            try:
                self._pipelines = PipelineStore(self, bytes(found.record["pipelineCacheUUID"]))
            except BaseException:
                self._queue.destroy()
                raise
        except BaseException:
            self.vk.vkDestroyDevice(self.handle, None)
            raise
        self._closed = False
        _open_devices.add(self)

    def _create(self, found: Probe) -> Any:
        features, extensions = enabled_features(found.record)
        priority = ctypes.c_float(1.0)
        queue = api.VkDeviceQueueCreateInfo()
        queue.queueFamilyIndex = found.queue_family
        queue.queueCount = 1
        queue.pQueuePriorities = ctypes.pointer(priority)
        info = api.VkDeviceCreateInfo()
        info.pNext = ctypes.addressof(features)
        info.queueCreateInfoCount = 1
        info.pQueueCreateInfos = ctypes.pointer(queue)
        info.enabledExtensionCount = len(extensions)
        info.ppEnabledExtensionNames = names_array(extensions)
        handle = ctypes.c_void_p()
        code = self._instance.vk.vkCreateDevice(
            found.handle, ctypes.byref(info), None, ctypes.byref(handle)
        )
        if code != 0:
            raise VulkanError(f"{found.info.name} can't be opened: {result_text(code)}", code=code)
        return handle

    # ---- errors ------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Refuse work on a closed or lost device, and raise what validation reported."""
        if self._closed:
            raise SessionError(f"device {self.info.name} was closed")
        if self.foreign:
            raise SessionError(
                f"device {self.info.name} belongs to the process that opened it; a forked child "
                "must open its own"
            )
        if self._lost:
            raise DeviceLostError(
                f"device {self.info.name} was lost; open it again", code=api.VK_ERROR_DEVICE_LOST
            )
        self._raise_validation()

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child of the process that opened the device."""
        return self._process != os.getpid()

    def _raise_validation(self) -> None:
        if self._instance.log is not None:
            self._instance.log.raise_pending()

    def note_result(self, code: int) -> None:
        """Mark the device lost and raise when a result says so."""
        if code == api.VK_ERROR_DEVICE_LOST:
            self._lost = True
            raise DeviceLostError(
                f"device {self.info.name} was lost (driver reset or watchdog); open it again",
                code=code,
            )

    def give_up(self, why: str) -> DeviceLostError:
        """Count the device as lost from now on, although it may go on working; the error to raise.

        Args:
            why: what it did, as a part of a sentence.
        """
        self._lost = self._given_up = True
        return DeviceLostError(
            f"{self.info.name} {why}: it counts as lost; open it again", code=api.VK_TIMEOUT
        )

    def _ended(self, ticket: int) -> bool:
        """Whether work of a device that was given up is over, as far as the driver says now."""
        try:
            return self._queue.completed() >= ticket
        except DeviceLostError:
            return True  # the driver has reset it

    def check(self, code: int, what: str) -> None:
        """Raise VulkanError (or DeviceLostError) when a call failed.

        Validation messages wait for the next public call: raising here would lose the handle of
        an object that was made.
        """
        if code < 0:
            self.note_result(code)
            raise VulkanError(f"{what} failed on {self.info.name}: {result_text(code)}", code=code)

    def check_memory(self, code: int, what: str, size: int, label: str) -> None:
        """Like `check`, with DeviceMemoryError for the out-of-memory codes."""
        if code in _OUT_OF_MEMORY:
            available, total = self.heap_budget()
            raise DeviceMemoryError(
                self._memory_message(size, label, available, total),
                needed=size,
                available=available,
            )
        self.check(code, what)

    def _memory_message(self, size: int, label: str, available: int, total: int) -> str:
        return (
            f"{self.info.name} has no memory for {label}: {size:,} bytes needed, {available:,} of "
            f"{total:,} bytes available; use a smaller context, smaller weights or another device"
        )

    def name_object(self, kind: int, handle: int, name: str) -> None:
        """Give an object a name in validation messages (only under validation)."""
        if self._name is None:
            return
        info = api.VkDebugUtilsObjectNameInfoEXT()
        info.objectType = kind
        info.objectHandle = handle
        info.pObjectName = name.encode()
        self._name(self.handle, ctypes.byref(info))

    # ---- memory ------------------------------------------------------------------------------

    def allocate(self, size: int, kind: MemoryKind, label: str) -> Buffer:
        """A buffer of `size` bytes, not initialised.

        Args:
            kind: 'device' (device local), 'host' (for reading back), 'upload' (for writing).
            label: adds up in `memory_report`.

        Raises:
            DeviceMemoryError: more than one allocation may hold, or more than is free.
        """
        self._enter()
        if size <= 0:
            raise UsageError(f"buffer {label!r} of {size} bytes")
        limit = self.caps.max_allocation_bytes
        if size > limit:
            raise DeviceMemoryError(
                f"{label}: {size:,} bytes exceed the {limit:,} that {self.info.name} allows in one "
                "allocation",
                needed=size,
                available=limit,
            )
        if kind == "device":
            available, total = self.heap_budget()
            if size > available:
                raise DeviceMemoryError(
                    self._memory_message(size, label, available, total),
                    needed=size,
                    available=available,
                )
        buffer = Buffer(self, size, kind, label)
        with self._lock:
            self._buffers[buffer.handle] = buffer
            self.allocated_bytes += buffer.allocated
        return buffer

    def forget_buffer(self, buffer: Buffer) -> None:
        """Called by `Buffer.free`."""
        with self._lock:
            del self._buffers[buffer.handle]
            self.allocated_bytes -= buffer.allocated

    def memory_report(self) -> dict[str, int]:
        """Bytes held by label, largest first."""
        totals: dict[str, int] = {}
        with self._lock:
            for buffer in self._buffers.values():
                totals[buffer.label] = totals.get(buffer.label, 0) + buffer.allocated
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def heap_budget(self) -> tuple[int, int]:
        """(available, total) bytes of the heap that 'device' buffers come from.

        With VK_EXT_memory_budget other programs count; without it only this device's buffers do.
        """
        heap = self.memory_table.device_heap()
        total = self.memory_table.heap_sizes[heap]
        if not self.caps.has_memory_budget:
            return max(total - self.allocated_bytes, 0), total
        properties = api.VkPhysicalDeviceMemoryProperties2()
        budget = api.VkPhysicalDeviceMemoryBudgetPropertiesEXT()
        properties.pNext = ctypes.addressof(budget)
        self._instance.vk.vkGetPhysicalDeviceMemoryProperties2(
            self._physical, ctypes.byref(properties)
        )
        return max(int(budget.heapBudget[heap]) - int(budget.heapUsage[heap]), 0), total

    def upload(
        self,
        pairs: Iterable[tuple[Buffer, int, Any]],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Copy host data into buffers: (buffer, byte offset, contiguous array or bytes-like).

        Memory that the host can see is written directly; the rest goes through at most 64 MiB of
        staging memory, so any amount of lazily produced data takes constant host memory. Both come
        after all work that was submitted, and all data has arrived when this returns. `progress`
        gets the bytes of each step.
        """
        self._enter()
        transfer.upload(self, pairs, progress)

    def download(self, buffer: Buffer, offset: int, size: int) -> bytes:
        """Bytes of a buffer, after all work that was submitted."""
        self._enter()
        return transfer.download(self, buffer, offset, size)

    # ---- pipelines ---------------------------------------------------------------------------

    def pipeline(
        self,
        spirv: bytes,
        *,
        name: str,
        spec: Mapping[int, int],
        push_size: int,
        subgroup_size: int | None = None,
        full_subgroups: bool = False,
    ) -> Pipeline:
        """A compute pipeline (entry point "main"), compiled once per setting.

        Args:
            spec: specialisation constants, id -> 32-bit value (a float's bits, a bool's 0 or 1).
            push_size: bytes of the push-constant block; `dispatch` takes exactly as many.
            subgroup_size: require this size; must be in the device's range.
            full_subgroups: require full subgroups.

        Raises:
            UnsupportedError: the device does not offer what was asked for.
            VulkanError: the driver could not compile it; the message names the kernel.
        """
        self._enter()
        pipeline = self._pipelines.get(spirv, name, spec, push_size, subgroup_size, full_subgroups)
        self._raise_validation()  # while the kernel's name is at hand in the traceback
        return pipeline

    def save_pipeline_cache(self) -> None:
        """Write compiled pipelines to disk, for the next start."""
        self._enter()
        self._pipelines.save()

    # ---- recording and submission ------------------------------------------------------------

    def command_buffer(self, label: str) -> Recorder:
        """A recording that has begun."""
        self._enter()
        recorder = Recorder(self, label)
        with self._lock:
            self._recorders[id(recorder)] = recorder
        return recorder

    def forget_recorder(self, recorder: Recorder) -> None:
        """Called by `Recorder.free`."""
        with self._lock:
            del self._recorders[id(recorder)]

    def create_query_pool(self, count: int) -> int:
        """A pool of timestamp queries; the recorder that asked destroys it."""
        info = api.VkQueryPoolCreateInfo()
        info.queryType = api.VK_QUERY_TYPE_TIMESTAMP
        info.queryCount = count
        pool = ctypes.c_uint64()
        code = self.vk.vkCreateQueryPool(self.handle, ctypes.byref(info), None, ctypes.byref(pool))
        self.check(code, "vkCreateQueryPool")
        return pool.value

    def submit(self, recordings: Sequence[Recorder]) -> int:
        """Run ended recordings in order, as one submission; returns a ticket for `wait`.

        The same recording may appear several times and may still be running from before.
        """
        self._enter()
        if self._queue.timer is not None:
            recordings = self._queue.timer.around(recordings)
        return self._queue.submit(recordings)

    def completed(self) -> int:
        """The newest ticket whose work is done."""
        self._enter()
        return self._queue.completed()

    def wait(self, ticket: int, timeout_s: float | None = None) -> None:
        """Block in the driver until a submission is done; its writes are visible to the host.

        Raises:
            DeviceLostError: the device was lost; or, with code VK_TIMEOUT (2), `timeout_s` passed,
                after which it counts as lost.
            SessionError: the ticket was never given out.
        """
        self._enter()
        self._queue.wait(ticket, timeout_s)

    def drain(self, ticket: int | None = None) -> bool:
        """Wait for a ticket (default: all work), before what it uses is destroyed.

        A lost device has nothing left to finish, which the driver says at once. One that was given
        up is not waited for.

        Returns:
            Whether the work is over.
        """
        last = self._queue.ticket if ticket is None else ticket
        if self._given_up:
            return self._ended(last)
        if self._closed:
            return True
        if self._lost:
            self.vk.vkDeviceWaitIdle(self.handle)
        else:
            self._queue.wait(last, None)
        return True

    @property
    def lost(self) -> bool:
        """Whether the device was lost."""
        return self._lost

    @property
    def usable(self) -> bool:
        """Whether it is open and was not lost."""
        return not self._closed and not self._lost

    @property
    def validating(self) -> bool:
        """Whether the validation layer is on."""
        return self._instance.validate

    def time_submissions(self) -> SubmissionTimer | None:
        """Measure the GPU time of all submissions from now on; None without timestamps."""
        if self._queue.timer is None and self.caps.timestamp_bits:
            self._queue.timer = SubmissionTimer(self)
        return self._queue.timer

    def read_timestamps(self, recorder: Recorder) -> list[int]:
        """Nanoseconds of each timestamp of a recording's last run, counted from an arbitrary start.

        Waits for that run. Differences are GPU time; the counter's wrap is undone.
        """
        self._enter()
        if recorder.last_ticket == 0:
            raise SessionError(f"recording {recorder.label!r} was never submitted")
        self.wait(recorder.last_ticket)
        raw: list[int] = []
        flags = api.VK_QUERY_RESULT_64_BIT | api.VK_QUERY_RESULT_WAIT_BIT
        for pool, count in recorder.timestamp_pools():
            values = (ctypes.c_uint64 * count)()
            code = self.vk.vkGetQueryPoolResults(
                self.handle, pool, 0, count, 8 * count, values, 8, flags
            )
            self.check(code, "vkGetQueryPoolResults")
            raw.extend(values)
        return unwrap_timestamps(raw, self.caps.timestamp_bits, self.caps.timestamp_period_ns)

    # ---- end of life -------------------------------------------------------------------------

    def close(self) -> None:
        """Release every object in order, and the instance with its last device; twice is a no-op.

        One that was given up and still works stays as it is; a later call, at the latest that at
        the end of the process, releases it.

        Raises:
            VulkanError: what the validation layer still had to say.
        """
        if self._closed:
            return
        if self._given_up and not self.foreign and not self._ended(self._queue.ticket):
            if self not in _working:
                _working.add(self)
                logger.warning(
                    "%s still works on what it was given up over: its %s stay allocated",
                    *(self.info.name, size_text(self.allocated_bytes)),
                )
            return
        self._closed = True
        _open_devices.discard(self)
        _working.discard(self)
        if self.foreign:
            return  # a forked child has no driver threads to wait for; the parent owns all of it
        # Its result is of no interest: a lost device is torn down all the same.
        self.vk.vkDeviceWaitIdle(self.handle)
        if not self._lost:
            self._pipelines.save()
        for recorder in list(self._recorders.values()):
            recorder._destroy(self)
        for buffer in list(self._buffers.values()):
            buffer._destroy(self)
        self._recorders.clear()
        self._buffers.clear()
        self.allocated_bytes = 0
        self._pipelines.destroy()
        self._queue.destroy()
        self.vk.vkDestroyDevice(self.handle, None)
        release_instance(self._instance)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def __repr__(self) -> str:
        return f"Device({self.info.name!r}, {self.info.kind})"


def unwrap_timestamps(raw: Sequence[int], bits: int, period_ns: float) -> list[int]:
    """Nanoseconds from counters of `bits` valid bits, increasing past a wrap of the counter."""
    mask = (1 << bits) - 1
    base = 0
    previous = 0
    result = []
    for value in raw:
        value &= mask
        if value < previous:
            base += mask + 1
        previous = value
        result.append(round((base + value) * period_ns))
    return result
