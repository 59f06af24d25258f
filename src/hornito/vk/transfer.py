"""Moves bytes between host and device through a small ring of staging memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from hornito.errors import UsageError
from hornito.vk.memory import Buffer

if TYPE_CHECKING:
    from hornito.vk.device import Device
    from hornito.vk.record import Recorder

HALF_BYTES = 32 << 20  # each of the two halves of the upload ring
_SMALL = 4096  # bytes that are read from uncached memory rather than copied by the GPU first
_SLICE = 16 << 20  # bytes of one host copy between progress reports

Data = memoryview | bytes | bytearray | np.ndarray


def as_bytes(data: Any) -> np.ndarray:
    """A flat uint8 view of contiguous data, without a copy."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise UsageError("an array to upload must be contiguous (C order)")
        return data.reshape(-1).view(np.uint8)
    flat = memoryview(data)
    if flat.nbytes == 0:  # which frombuffer refuses
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(flat, dtype=np.uint8)


class _Half:
    """One half of the ring: its range of the staging buffer, its recording, its last ticket."""

    def __init__(self, device: Device, offset: int, size: int, label: str) -> None:
        self.recorder: Recorder = device.command_buffer(label)
        self.offset = offset
        self.size = size
        self.used = 0


class Uploader:
    """Streams data into device buffers; the host fills one half while the GPU copies the other."""

    def __init__(self, device: Device, half_bytes: int) -> None:
        self._device = device
        self.staging: Buffer = device.allocate(2 * half_bytes, "upload", "staging")
        if self.staging.view is None:
            raise UsageError("staging memory is not visible to the host")
        self._bytes = np.frombuffer(self.staging.view, dtype=np.uint8)
        self._halves = [
            _Half(device, index * half_bytes, half_bytes, f"upload {index}") for index in (0, 1)
        ]
        self._current = 0

    def write(self, target: Buffer, offset: int, source: np.ndarray) -> None:
        """Queue bytes for a target; blocks only when both halves are in flight."""
        done = 0
        while done < len(source):
            half = self._halves[self._current]
            count = min(len(source) - done, half.size - half.used)
            start = half.offset + half.used
            self._bytes[start : start + count] = source[done : done + count]
            half.recorder.copy(self.staging, start, target, offset + done, count)
            # Copies start on 16 bytes, which every transfer engine takes at full speed.
            half.used += -(-count // 16) * 16
            done += count
            if half.used >= half.size:
                self._flip()

    def _flip(self) -> None:
        """Submit the current half and make the other one ready for new data."""
        half = self._halves[self._current]
        if half.used == 0:
            return
        half.recorder.end()
        self._device.submit([half.recorder])
        self._current = 1 - self._current
        other = self._halves[self._current]
        if other.recorder.ended:
            other.recorder.reset()  # waits for its copies
        other.used = 0

    def finish(self) -> None:
        """Submit what is left and wait for all of it."""
        self._flip()
        for half in self._halves:
            if half.recorder.last_ticket:
                self._device.wait(half.recorder.last_ticket)

    def free(self) -> None:
        """Release the ring."""
        del self._bytes
        for half in self._halves:
            half.recorder.free()
        self.staging.free()


def upload(
    device: Device,
    pairs: Iterable[tuple[Buffer, int, Any]],
    progress: Callable[[int], None] | None,
) -> None:
    """See `Device.upload`."""
    uploader: Uploader | None = None
    known = list(pairs) if isinstance(pairs, list | tuple) else None
    most = min(HALF_BYTES, device.caps.max_allocation_bytes // 2 // 4096 * 4096)
    half = most
    if known is not None:
        total = sum(len(as_bytes(data)) + 16 for _, _, data in known)
        half = min(most, max(4096, -(-total // 4096) * 4096))
    device.drain()  # memory that the host writes directly must not be in use
    try:
        for target, offset, data in pairs if known is None else known:
            source = as_bytes(data)
            if offset < 0 or offset + len(source) > target.size:
                raise UsageError(
                    f"upload of {len(source)} bytes at {offset} is outside buffer "
                    f"{target.label!r} of {target.size} bytes"
                )
            if target.view is None and uploader is None and len(source):
                uploader = Uploader(device, half)
            mapped = None if target.view is None else np.frombuffer(target.view, dtype=np.uint8)
            for start in range(0, len(source), _SLICE):
                part = source[start : start + _SLICE]
                if mapped is not None:
                    mapped[offset + start : offset + start + len(part)] = part
                elif uploader is not None:
                    uploader.write(target, offset + start, part)
                if progress is not None:
                    progress(len(part))
        if uploader is not None:
            uploader.finish()
    finally:
        if uploader is not None:
            uploader.free()


def download(device: Device, source: Buffer, offset: int, size: int) -> bytes:
    """See `Device.download`."""
    if offset < 0 or size < 0 or offset + size > source.size:
        raise UsageError(
            f"download of {size} bytes at {offset} is outside buffer {source.label!r} "
            f"of {source.size} bytes"
        )
    device.drain()
    if source.view is not None and (source.cached or size <= _SMALL):
        return bytes(source.view[offset : offset + size])
    if size == 0:
        return b""
    part = min(size, HALF_BYTES, device.caps.max_allocation_bytes)
    staging = device.allocate(part, "host", "staging")
    if staging.view is None:
        raise UsageError("staging memory is not visible to the host")
    recorder = device.command_buffer("download")
    result = bytearray(size)
    try:
        for start in range(0, size, part):
            count = min(part, size - start)
            if start:
                recorder.reset()
            recorder.copy(source, offset + start, staging, 0, count)
            recorder.end()
            device.wait(device.submit([recorder]))
            result[start : start + count] = staging.view[:count]
    finally:
        recorder.free()
        staging.free()
    return bytes(result)
