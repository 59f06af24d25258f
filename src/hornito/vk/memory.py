"""Device memory: which memory type serves which purpose, buffers, and arenas of several chunks.

The choice of a type is a pure function on the device's table, so that tests hold it to recorded
tables of real devices.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hornito.errors import DeviceMemoryError, SessionError
from hornito.vk import api

if TYPE_CHECKING:
    from hornito.vk.device import Device

MemoryKind = Literal["device", "host", "upload"]

DEVICE_LOCAL = api.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT
HOST_VISIBLE = api.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT
HOST_COHERENT = api.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
HOST_CACHED = api.VK_MEMORY_PROPERTY_HOST_CACHED_BIT
# Lazily allocated, protected, AMD's uncached and NVIDIA's RDMA types are of no use here.
_ORDINARY = DEVICE_LOCAL | HOST_VISIBLE | HOST_COHERENT | HOST_CACHED

BUFFER_USAGE = (
    api.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
    | api.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
    | api.VK_BUFFER_USAGE_TRANSFER_DST_BIT
    | api.VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT
)
# Kernels read whole 16-byte vectors: buffers end on this boundary.
BUFFER_GRANULE = 256


@dataclass(frozen=True, slots=True)
class MemoryType:
    """One row of the device's memory types: property flags and heap index."""

    flags: int
    heap: int


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """The memory types and heap sizes of a device.

    Attributes:
        types: in the driver's order.
        heap_sizes: bytes of each heap.
        heap_local: whether each heap is device local.
        unified: host and device share one memory (integrated and software devices).
    """

    types: tuple[MemoryType, ...]
    heap_sizes: tuple[int, ...]
    heap_local: tuple[bool, ...]
    unified: bool

    def device_heap(self) -> int:
        """The index of the heap that 'device' buffers come from."""
        return self.types[choose_memory_type(self, "device", ~0, 0)].heap


def choose_memory_type(table: MemoryTable, kind: MemoryKind, allowed: int, size: int) -> int:
    """The index of the memory type for a buffer.

    `device` takes device-local memory of the largest heap, never a small window of host-visible
    video memory (BAR). On unified memory it takes the largest heap of all, as every heap is the
    same DRAM and the device-local one may be a small carve-out, and prefers a type that the host
    can write directly.
    `host` and `upload` are coherent; `host` prefers cached memory (read back), `upload` uncached,
    and both leave video memory alone unless the memory is unified.

    Args:
        allowed: bit mask of types that the buffer may use.
        size: bytes; heaps smaller than this are out.

    Raises:
        DeviceMemoryError: no heap of the kind is as large as `size`.
    """
    if kind == "device":
        needed = 0 if table.unified else DEVICE_LOCAL
    else:
        needed = HOST_VISIBLE | HOST_COHERENT
    fitting = [
        index
        for index, entry in enumerate(table.types)
        if allowed >> index & 1 and entry.flags & needed == needed and not entry.flags & ~_ORDINARY
    ]
    largest = max((table.heap_sizes[table.types[index].heap] for index in fitting), default=0)
    candidates = [i for i in fitting if table.heap_sizes[table.types[i].heap] >= size]
    if not candidates:
        raise DeviceMemoryError(
            f"a {kind} buffer of {size:,} bytes fits no memory heap of this device "
            f"(the largest has {largest:,} bytes)",
            needed=size,
            available=largest,
        )

    def rank(index: int) -> tuple[int, ...]:
        flags = table.types[index].flags
        heap = table.heap_sizes[table.types[index].heap]
        local = bool(flags & DEVICE_LOCAL)
        cached = bool(flags & HOST_CACHED)
        if kind == "device":
            mapped = flags & (HOST_VISIBLE | HOST_COHERENT) == HOST_VISIBLE | HOST_COHERENT
            return (-heap, not local, mapped != table.unified, cached, index)
        return (local and not table.unified, cached != (kind == "host"), -heap, index)

    return min(candidates, key=rank)


class Buffer:
    """A VkBuffer with memory of its own.

    Attributes:
        handle: the VkBuffer.
        address: its 64-bit device address.
        size: bytes, as asked for.
        label: for memory reports and error messages.
        kind: what it was allocated for.
        cached: reading through `view` is fast.
        view: writable bytes when the host can see them, else None. The view, and arrays made from
            it, must not be used after `free` or after the device closes.
    """

    __slots__ = (
        "_device", "_mapped", "_memory", "address", "allocated", "cached", "handle", "kind",
        "label", "size", "view",
    )  # fmt: skip

    def __init__(self, device: Device, size: int, kind: MemoryKind, label: str) -> None:
        self._device: Device | None = None
        self._memory = 0
        self.handle = 0
        self.size = size
        self.kind = kind
        self.label = label
        self.view: memoryview | None = None
        self._mapped: weakref.ref[Any] | None = None  # dies with the last look at the memory
        vk, owner = device.vk, device.handle
        info = api.VkBufferCreateInfo()
        info.size = -(-size // BUFFER_GRANULE) * BUFFER_GRANULE
        info.usage = BUFFER_USAGE
        handle = ctypes.c_uint64()
        code = vk.vkCreateBuffer(owner, ctypes.byref(info), None, ctypes.byref(handle))
        device.check_memory(code, f"vkCreateBuffer for {label}", size, label)
        try:
            requirements = api.VkMemoryRequirements()
            vk.vkGetBufferMemoryRequirements(owner, handle, ctypes.byref(requirements))
            self.allocated = int(requirements.size)
            index = choose_memory_type(
                device.memory_table, kind, requirements.memoryTypeBits, self.allocated
            )
            self._memory = self._allocate(device, index)
            code = vk.vkBindBufferMemory(owner, handle, self._memory, 0)
            device.check(code, f"vkBindBufferMemory for {label}")
            flags = device.memory_table.types[index].flags
            self.cached = bool(flags & HOST_CACHED)
            if flags & HOST_COHERENT and (kind != "device" or device.memory_table.unified):
                self.view = self._map(device)
            address = api.VkBufferDeviceAddressInfo()
            address.buffer = handle
            self.address = int(vk.vkGetBufferDeviceAddress(owner, ctypes.byref(address)))
        except BaseException:
            vk.vkDestroyBuffer(owner, handle, None)
            if self._memory:
                vk.vkFreeMemory(owner, self._memory, None)
            raise
        self.handle = handle.value
        self._device = device
        device.name_object(api.VK_OBJECT_TYPE_BUFFER, self.handle, label)

    def _allocate(self, device: Device, memory_type: int) -> int:
        flags = api.VkMemoryAllocateFlagsInfo()
        flags.flags = api.VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT
        info = api.VkMemoryAllocateInfo()
        info.pNext = ctypes.addressof(flags)
        info.allocationSize = self.allocated
        info.memoryTypeIndex = memory_type
        memory = ctypes.c_uint64()
        code = device.vk.vkAllocateMemory(
            device.handle, ctypes.byref(info), None, ctypes.byref(memory)
        )
        device.check_memory(code, f"vkAllocateMemory for {self.label}", self.size, self.label)
        return memory.value

    def _map(self, device: Device) -> memoryview:
        pointer = ctypes.c_void_p()
        code = device.vk.vkMapMemory(
            device.handle, self._memory, 0, api.VK_WHOLE_SIZE, 0, ctypes.byref(pointer)
        )
        device.check(code, f"vkMapMemory for {self.label}")
        raw: Any = (ctypes.c_uint8 * self.size).from_address(pointer.value or 0)
        raw.owner = self  # whoever holds the view keeps the device open until it is closed by hand
        self._mapped = weakref.ref(raw)
        return memoryview(raw).cast("B")

    def free(self) -> None:
        """Release the buffer after the work that was submitted so far; twice is harmless.

        On a device that was given up and still works it stays.

        Raises:
            SessionError: the view, or an array made from it, is still referenced.
        """
        device = self._device
        if device is None:
            return
        if self._mapped is not None:
            self.view = None
            raw = self._mapped()
            if raw is not None:
                self.view = memoryview(raw).cast("B")
                raise SessionError(
                    f"buffer {self.label!r} can't be freed: its view, or an array made from it, "
                    "is still in use"
                )
        if device.drain():
            self._destroy(device)
            device.forget_buffer(self)

    def _destroy(self, device: Device) -> None:
        """Give the handles back; the device must be idle."""
        self._device = None
        self.view = None
        device.vk.vkDestroyBuffer(device.handle, self.handle, None)
        device.vk.vkFreeMemory(device.handle, self._memory, None)

    def __repr__(self) -> str:
        return f"Buffer({self.label!r}, {self.size:,} bytes, {self.kind})"


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Where each item of an arena lives.

    Attributes:
        places: (chunk, byte offset) of each item, in the order given.
        chunk_sizes: bytes of each chunk.
    """

    places: tuple[tuple[int, int], ...]
    chunk_sizes: tuple[int, ...]


def plan_chunks(sizes: Sequence[int], max_chunk: int, alignment: int) -> ChunkPlan:
    """Place items of `sizes` bytes, in order, into as few chunks of at most `max_chunk` bytes as
    first-fit needs; offsets are multiples of `alignment`. An item is never split.

    Raises:
        ValueError: an item is larger than `max_chunk`; the caller knows its name.
    """
    places: list[tuple[int, int]] = []
    used: list[int] = []
    for size in sizes:
        if size > max_chunk:
            raise ValueError(f"an item of {size:,} bytes exceeds the chunk limit of {max_chunk:,}")
        starts = [-(-end // alignment) * alignment for end in used]
        fitting = (i for i, start in enumerate(starts) if start + size <= max_chunk)
        chunk = next(fitting, len(used))
        if chunk == len(used):
            used.append(0)
            starts.append(0)
        offset = starts[chunk]
        places.append((chunk, offset))
        used[chunk] = offset + size
    return ChunkPlan(tuple(places), tuple(used))


class Arena(Mapping[str, tuple[Buffer, int]]):
    """Named items in a few buffers, none larger than the device allows in one allocation.

    `arena[name]` is (buffer, byte offset); chunks are as large as their items need.

    Args:
        device: where to allocate.
        label: for memory reports; chunks share it.
        items: (name, bytes) in order of placement.
        kind: memory kind of every chunk.
        alignment: of every item's offset, bytes.

    Raises:
        DeviceMemoryError: an item exceeds the largest allocation, or memory is short. What was
            allocated until then is freed.
    """

    def __init__(
        self,
        device: Device,
        label: str,
        items: Sequence[tuple[str, int]],
        *,
        kind: MemoryKind = "device",
        alignment: int = 256,
    ) -> None:
        limit = device.caps.max_allocation_bytes
        for name, size in items:
            if size > limit:
                raise DeviceMemoryError(
                    f"{label}: {name!r} needs {size:,} bytes, but {device.info.name} allows "
                    f"{limit:,} bytes in one allocation",
                    needed=size,
                    available=limit,
                )
        plan = plan_chunks([size for _, size in items], limit, alignment)
        self.label = label
        self.buffers: list[Buffer] = []
        try:
            for size in plan.chunk_sizes:
                self.buffers.append(device.allocate(max(size, 1), kind, label))
        except BaseException:
            self.free()
            raise
        self._sizes = dict(items)
        self._places = {
            name: (self.buffers[chunk], offset)
            for (name, _), (chunk, offset) in zip(items, plan.places, strict=True)
        }

    def __getitem__(self, name: str) -> tuple[Buffer, int]:
        return self._places[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def address(self, name: str) -> int:
        """The device address of an item."""
        buffer, offset = self._places[name]
        return buffer.address + offset

    def size(self, name: str) -> int:
        """The bytes of an item."""
        return self._sizes[name]

    @property
    def bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(buffer.size for buffer in self.buffers)

    def free(self) -> None:
        """Release every chunk."""
        while self.buffers:
            self.buffers[-1].free()
            self.buffers.pop()


def memory_table(properties: Any, unified: bool) -> MemoryTable:
    """The table of a VkPhysicalDeviceMemoryProperties."""
    heaps = properties.memoryHeaps[: properties.memoryHeapCount]
    local = api.VK_MEMORY_HEAP_DEVICE_LOCAL_BIT
    return MemoryTable(
        types=tuple(
            MemoryType(int(entry.propertyFlags), int(entry.heapIndex))
            for entry in properties.memoryTypes[: properties.memoryTypeCount]
        ),
        heap_sizes=tuple(int(heap.size) for heap in heaps),
        heap_local=tuple(bool(heap.flags & local) for heap in heaps),
        unified=unified,
    )
