"""Recording: one primary command buffer, recorded once and submitted any number of times."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from hornito.errors import SessionError, UnsupportedError, UsageError
from hornito.vk import api
from hornito.vk.instance import check

if TYPE_CHECKING:
    from hornito.vk.device import Device
    from hornito.vk.memory import Buffer
    from hornito.vk.pipeline import Pipeline

_COMPUTE = api.VK_PIPELINE_BIND_POINT_COMPUTE
_STAGE = api.VK_SHADER_STAGE_COMPUTE_BIT
_WORK = api.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | api.VK_PIPELINE_STAGE_TRANSFER_BIT
_QUERY_BLOCK = 64  # timestamps per query pool
UPDATE_LIMIT = 65536  # bytes of one vkCmdUpdateBuffer


def _memory_barrier(*, host: bool) -> Any:
    barrier = api.VkMemoryBarrier()
    barrier.srcAccessMask = api.VK_ACCESS_SHADER_WRITE_BIT | api.VK_ACCESS_TRANSFER_WRITE_BIT
    barrier.dstAccessMask = (
        api.VK_ACCESS_SHADER_READ_BIT
        | api.VK_ACCESS_SHADER_WRITE_BIT
        | api.VK_ACCESS_TRANSFER_READ_BIT
        | api.VK_ACCESS_TRANSFER_WRITE_BIT
    )
    if host:
        barrier.dstAccessMask |= api.VK_ACCESS_HOST_READ_BIT
    return barrier


_BARRIER = _memory_barrier(host=False)
_HOST_BARRIER = _memory_barrier(host=True)
_BARRIER_REFERENCE = ctypes.byref(_BARRIER)
_HOST_BARRIER_REFERENCE = ctypes.byref(_HOST_BARRIER)


def _ended(*arguments: Any) -> Any:
    raise SessionError("this recording has ended; reset() it before recording again")


class Recorder:
    """Records compute work; made by `Device.command_buffer`.

    A recording starts with a full barrier, so that recordings submitted one after the other see
    each other's writes, and ends with one, so that the host may read after `Device.wait`. Between
    two dispatches there is a barrier only where `barrier()` is called.

    Attributes:
        label: names the recording in errors and reports.
        dispatch_count, barrier_count: what was recorded since the last reset (the two implied
            barriers are not counted).
        gpu_ns: GPU time of one run, as far as somebody measured it; 0 when nobody did.
    """

    def __init__(self, device: Device, label: str) -> None:
        self.label = label
        self.dispatch_count = 0
        self.barrier_count = 0
        self.gpu_ns = 0.0
        self.last_ticket = 0  # of the newest submission that holds this recording
        self.ended = False
        self._device: Device | None = device
        self._limits = device.caps.max_workgroup_count
        self._bound: Pipeline | None = None
        self._query_pools: list[int] = []
        self._timestamps = 0
        self._create(device)
        try:
            self._begin(device)
        except BaseException:
            self._destroy(device)
            raise

    def _create(self, device: Device) -> None:
        vk = device.vk
        pool_info = api.VkCommandPoolCreateInfo()
        pool_info.queueFamilyIndex = device.queue_family
        pool = ctypes.c_uint64()
        code = vk.vkCreateCommandPool(
            device.handle, ctypes.byref(pool_info), None, ctypes.byref(pool)
        )
        device.check(code, f"vkCreateCommandPool for {self.label}")
        self._pool = pool.value
        info = api.VkCommandBufferAllocateInfo()
        info.commandPool = self._pool
        info.level = api.VK_COMMAND_BUFFER_LEVEL_PRIMARY
        info.commandBufferCount = 1
        self.command = ctypes.c_void_p()
        code = vk.vkAllocateCommandBuffers(
            device.handle, ctypes.byref(info), ctypes.byref(self.command)
        )
        if code < 0:
            vk.vkDestroyCommandPool(device.handle, pool, None)
        device.check(code, f"vkAllocateCommandBuffers for {self.label}")
        device.name_object(api.VK_OBJECT_TYPE_COMMAND_BUFFER, self.command.value or 0, self.label)

    def _begin(self, device: Device) -> None:
        vk = device.vk
        info = api.VkCommandBufferBeginInfo()
        # One recording may be submitted again while it runs, or several times in one submission.
        info.flags = api.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT
        check(vk.vkBeginCommandBuffer(self.command, ctypes.byref(info)), "vkBeginCommandBuffer")
        # Held as attributes: one lookup each in dispatch(), and end() swaps them out.
        self._vk_bind = vk.vkCmdBindPipeline
        self._vk_push = vk.vkCmdPushConstants
        self._vk_dispatch = vk.vkCmdDispatch
        self._vk_barrier = vk.vkCmdPipelineBarrier
        self._vk_barrier(self.command, _WORK, _WORK, 0, 1, _BARRIER_REFERENCE, 0, None, 0, None)

    def _open(self) -> Device:
        """The device, when this recording still accepts commands."""
        if self._device is None:
            raise SessionError(f"recording {self.label!r} was freed")
        if self.ended:
            _ended()
        return self._device

    @property
    def freed(self) -> bool:
        """Whether `free` was called, or the device closed."""
        return self._device is None

    def dispatch(self, pipeline: Pipeline, push: bytes, groups: tuple[int, int, int]) -> None:
        """Run `groups` workgroups of a pipeline with `push` as its push-constant block."""
        x, y, z = groups
        limit_x, limit_y, limit_z = self._limits
        if x > limit_x or y > limit_y or z > limit_z or len(push) != pipeline.push_size:
            self._reject(pipeline, push, groups)
        if pipeline is not self._bound:
            self._vk_bind(self.command, _COMPUTE, pipeline.handle)
            self._bound = pipeline
        if push:
            self._vk_push(self.command, pipeline.layout, _STAGE, 0, len(push), push)
        self._vk_dispatch(self.command, x, y, z)
        self.dispatch_count += 1

    def _reject(self, pipeline: Pipeline, push: bytes, groups: tuple[int, int, int]) -> None:
        self._open()
        if len(push) != pipeline.push_size:
            raise UsageError(
                f"{pipeline.name}: push constants have {len(push)} bytes, "
                f"the pipeline declares {pipeline.push_size}"
            )
        raise UsageError(
            f"{pipeline.name}: {groups} workgroups exceed the device's limit of {self._limits}"
        )

    def barrier(self) -> None:
        """Everything before is done and visible to shaders and copies that follow.

        The host needs none: `end` records the barrier for what it reads.
        """
        self._vk_barrier(self.command, _WORK, _WORK, 0, 1, _BARRIER_REFERENCE, 0, None, 0, None)
        self.barrier_count += 1

    def copy(
        self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, size: int
    ) -> None:
        """Copy bytes between buffers."""
        device = self._open()
        _inside(source, source_offset, size)
        _inside(target, target_offset, size)
        if size == 0:
            return
        region = api.VkBufferCopy(srcOffset=source_offset, dstOffset=target_offset, size=size)
        device.vk.vkCmdCopyBuffer(
            self.command, source.handle, target.handle, 1, ctypes.byref(region)
        )

    def update(self, target: Buffer, offset: int, data: bytes) -> None:
        """Write bytes that travel inside the command buffer: at most 65536, a multiple of 4."""
        device = self._open()
        _inside(target, offset, len(data))
        if len(data) > UPDATE_LIMIT or len(data) % 4 or offset % 4 or not data:
            raise UsageError(
                f"update of {target.label!r}: {len(data)} bytes at {offset}; it takes 4 to "
                f"{UPDATE_LIMIT} bytes in multiples of 4"
            )
        device.vk.vkCmdUpdateBuffer(self.command, target.handle, offset, len(data), data)

    def fill(self, target: Buffer, offset: int, size: int, word: int = 0) -> None:
        """Set `size` bytes to copies of a 32-bit word; offset and size are multiples of 4."""
        device = self._open()
        _inside(target, offset, size)
        if size % 4 or offset % 4:
            raise UsageError(
                f"fill of {target.label!r}: {size} bytes at {offset}, not multiples of 4"
            )
        if size:
            device.vk.vkCmdFillBuffer(self.command, target.handle, offset, size, word)

    def timestamp(self, index: int) -> None:
        """Write the GPU's clock when all work before is done; indices count up from 0.

        Read them with `Device.read_timestamps`. Put a barrier before it to time one dispatch.
        """
        device = self._open()
        if device.caps.timestamp_bits == 0:
            raise UnsupportedError(f"{device.info.name} has no timestamps on its compute queue")
        if index != self._timestamps:
            raise UsageError(
                f"timestamp {index} of {self.label!r}: the next index is {self._timestamps}"
            )
        block, slot = divmod(index, _QUERY_BLOCK)
        if block == len(self._query_pools):
            self._query_pools.append(device.create_query_pool(_QUERY_BLOCK))
        pool = self._query_pools[block]
        if slot == 0:
            device.vk.vkCmdResetQueryPool(self.command, pool, 0, _QUERY_BLOCK)
        stage = api.VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT
        device.vk.vkCmdWriteTimestamp(self.command, stage, pool, slot)
        self._timestamps = index + 1

    def timestamp_pools(self) -> list[tuple[int, int]]:
        """(query pool, timestamps in it) of this recording."""
        counts = range(0, self._timestamps, _QUERY_BLOCK)
        return [
            (pool, min(_QUERY_BLOCK, self._timestamps - first))
            for pool, first in zip(self._query_pools, counts, strict=False)
        ]

    def end(self) -> None:
        """Close the recording; it can be submitted from now on. Twice is an error."""
        device = self._open()
        stages = _WORK | api.VK_PIPELINE_STAGE_HOST_BIT
        self._vk_barrier(
            self.command, _WORK, stages, 0, 1, _HOST_BARRIER_REFERENCE, 0, None, 0, None
        )
        code = device.vk.vkEndCommandBuffer(self.command)
        self.ended = True
        self._vk_bind = self._vk_push = self._vk_dispatch = self._vk_barrier = _ended
        device.check(code, f"vkEndCommandBuffer of {self.label}")

    def reset(self) -> None:
        """Forget what was recorded and begin again, after its last submission is done."""
        device = self._device
        if device is None:
            raise SessionError(f"recording {self.label!r} was freed")
        if self.last_ticket:
            device.wait(self.last_ticket)
        code = device.vk.vkResetCommandPool(device.handle, self._pool, 0)
        device.check(code, f"vkResetCommandPool of {self.label}")
        self.dispatch_count = self.barrier_count = self._timestamps = 0
        self._bound = None
        self.ended = False
        self._begin(device)

    def free(self) -> None:
        """Release the recording after its last submission is done; twice is harmless.

        On a device that was given up and still works it stays.
        """
        device = self._device
        if device is None:
            return
        if device.drain(self.last_ticket):
            self._destroy(device)
            device.forget_recorder(self)

    def _destroy(self, device: Device) -> None:
        """Give the handles back; no submission of it may be running."""
        self._device = None
        self.ended = True
        self._vk_bind = self._vk_push = self._vk_dispatch = self._vk_barrier = _ended
        for pool in self._query_pools:
            device.vk.vkDestroyQueryPool(device.handle, pool, None)
        self._query_pools = []
        device.vk.vkDestroyCommandPool(device.handle, self._pool, None)

    def __repr__(self) -> str:
        return f"Recorder({self.label!r}, {self.dispatch_count} dispatches)"


def _inside(buffer: Buffer, offset: int, size: int) -> None:
    if offset < 0 or size < 0 or offset + size > buffer.size:
        raise UsageError(
            f"{size} bytes at {offset} are outside buffer {buffer.label!r} of {buffer.size} bytes"
        )
