"""KV blocks: a pool of refcounted blocks of 64 positions, and the block tables that name them.

There is one kind of block per window and head shape, and one table per slot and kind; an entry is
the block's device address. The host owns the tables; the device has a copy that is brought up to
date before a submission.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hornito.errors import DeviceMemoryError, SessionError
from hornito.ops.base import BLOCK_POSITIONS
from hornito.plan.plan import KvKind
from hornito.vk.memory import Arena

if TYPE_CHECKING:
    from hornito.vk.device import Device
    from hornito.vk.memory import Buffer


class BlockPool:
    """The blocks of one kind: which are free, and how many owners the others have.

    A freed block is handed out again only after the last submission that may read it.
    """

    def __init__(self, device: Device, kind: KvKind, count: int, label: str) -> None:
        self.kind = kind
        self.count = count
        self._device = device
        self._arena = Arena(device, label, [(str(i), kind.block_bytes) for i in range(count)])
        self._addresses = [self._arena.address(str(i)) for i in range(count)]
        self._owners = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._retiring: list[tuple[int, int]] = []  # (ticket, block), in order of tickets

    @property
    def bytes(self) -> int:
        """Bytes of the whole pool."""
        return self._arena.bytes

    @property
    def used(self) -> int:
        """Blocks that have an owner."""
        return sum(owners > 0 for owners in self._owners)

    def address(self, block: int) -> int:
        """The device address of a block."""
        return self._addresses[block]

    def place(self, block: int) -> tuple[Buffer, int]:
        """Buffer and byte offset of a block."""
        return self._arena[str(block)]

    def take(self) -> int:
        """A free block, with one owner.

        Raises:
            DeviceMemoryError: all are in use.
        """
        if not self._free:
            self._reclaim()
        if not self._free:
            need = self.kind.block_bytes
            raise DeviceMemoryError(
                f"the KV pool is full: all {self.count} blocks of {BLOCK_POSITIONS} positions are "
                f"in use ({self.bytes:,} bytes). Close sessions, or load with more slots=, "
                "context= or kv_bytes=",
                needed=need,
                available=0,
            )
        block = self._free.pop()
        self._owners[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner."""
        if self._owners[block] == 0:
            raise SessionError(f"KV block {block} has no owner and can't be shared")
        self._owners[block] += 1

    def owners(self, block: int) -> int:
        """How many own the block."""
        return self._owners[block]

    def release(self, block: int, ticket: int) -> None:
        """One owner less; the last one's block is reused once `ticket` has completed."""
        if self._owners[block] == 0:
            raise SessionError(f"KV block {block} was released twice")
        self._owners[block] -= 1
        if self._owners[block] == 0:
            self._retiring.append((ticket, block))

    def _reclaim(self) -> None:
        done = self._device.completed()
        if self._retiring and self._retiring[0][0] > done:
            self._device.wait(self._retiring[0][0])
            done = self._device.completed()
        while self._retiring and self._retiring[0][0] <= done:
            self._free.append(self._retiring.pop(0)[1])

    def free(self) -> None:
        """Give the memory back."""
        self._arena.free()


class BlockTables:
    """The host's copy of every slot's block tables, and what the device's copy lacks."""

    def __init__(self, slots: int, kinds: int, blocks: int) -> None:
        self.entries: npt.NDArray[np.uint64] = np.zeros((slots, kinds, blocks), np.uint64)
        self._dirty: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the device's copy."""
        return int(self.entries.nbytes)

    def set(self, slot: int, kind: int, index: int, address: int) -> None:
        """Name the block of one table entry; 0 names none."""
        if self.entries[slot, kind, index] == address:
            return
        self.entries[slot, kind, index] = address
        low, high = self._dirty.get((slot, kind), (index, index))
        self._dirty[slot, kind] = (min(low, index), max(high, index))

    def take_updates(self) -> list[tuple[int, bytes]]:
        """(byte offset, bytes) of what changed since the last call."""
        updates = []
        _, kinds, blocks = self.entries.shape
        for (slot, kind), (low, high) in self._dirty.items():
            offset = ((slot * kinds + kind) * blocks + low) * 8
            updates.append((offset, self.entries[slot, kind, low : high + 1].tobytes()))
        self._dirty.clear()
        return updates


def pool_sizes(kinds: Sequence[KvKind], slots: int, table_blocks: int) -> list[int]:
    """Blocks per kind that let every slot fill its context."""
    return [slots * table_blocks for _ in kinds]
