"""KV blocks: a pool of refcounted blocks of 64 positions, and the block tables that name them.

There is one kind of block per window and head shape, and one table per slot and kind; an entry is
the block's device address. The host owns the tables; the device has a copy that is brought up to
date before a submission.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hornito.errors import DeviceMemoryError, SessionError, UsageError, size_text
from hornito.ops.base import BLOCK_POSITIONS, ceil_div
from hornito.plan.plan import KvKind
from hornito.vk.memory import Arena

if TYPE_CHECKING:
    from hornito.vk.device import Device
    from hornito.vk.memory import Buffer


class BlockPool:
    """The blocks of one kind: which are free, and how many owners the others have.

    A freed block is handed out again only after the last submission that may read it.

    Attributes:
        make_room: asked to give up blocks when none is free; False when it has none to give.
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
        self.make_room: Callable[[], bool] = lambda: False

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
        while not self._free and self.make_room():
            self._reclaim()
        if not self._free:
            need = self.kind.block_bytes
            raise DeviceMemoryError(
                f"the KV pool is full: all {self.count} blocks of {BLOCK_POSITIONS} positions are "
                f"in use ({size_text(self.bytes)}). Close sessions or snapshots, or load with "
                "more slots, a larger context or more kv_bytes",
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

    def forget_device(self) -> None:
        """Take the device's copy for lost: all of it is an update again."""
        slots, kinds, blocks = self.entries.shape
        for slot in range(slots):
            for kind in range(kinds):
                self._dirty[slot, kind] = (0, blocks - 1)

    def take_updates(self) -> list[tuple[int, bytes]]:
        """(byte offset, bytes) of what changed since the last call."""
        updates = []
        _, kinds, blocks = self.entries.shape
        for (slot, kind), (low, high) in self._dirty.items():
            offset = ((slot * kinds + kind) * blocks + low) * 8
            updates.append((offset, self.entries[slot, kind, low : high + 1].tobytes()))
        self._dirty.clear()
        return updates


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block whose content must be in another before the next call runs."""

    pool: BlockPool
    source: int
    target: int


Blocks = list[list[int | None]]
"""Per kind, the block of each 64 positions; None where a sliding window has passed."""


class SequenceBlocks:
    """The blocks of one sequence: which it owns, which it shares, and its slot's table entries.

    Args:
        rewind_budget: positions that a sliding kind keeps beyond its window.
    """

    def __init__(
        self, pools: Collection[BlockPool], tables: BlockTables, slot: int, rewind_budget: int
    ) -> None:
        self._pools = list(pools)
        self._tables = tables
        self._slot = slot
        self._budget = rewind_budget
        self._blocks: Blocks = [[] for _ in self._pools]

    def prepare(self, position: int, end: int, ticket: int) -> list[BlockCopy]:
        """Own alone every block of the positions `[position, end)`, free what windows have passed.

        Args:
            ticket: the newest submission, the last that may read what is freed.

        Returns:
            the copy of the partly filled block at `position`, for each kind that shares it.

        Raises:
            DeviceMemoryError: the pool is exhausted; nothing is lost then.
        """
        # All are taken before any is used: half a change could not be undone.
        taken: list[tuple[int, int, int]] = []  # (kind, index, block)
        try:
            for kind, (pool, blocks) in enumerate(zip(self._pools, self._blocks, strict=True)):
                self._free_passed(kind, position, ticket)
                for index in range(position // BLOCK_POSITIONS, ceil_div(end, BLOCK_POSITIONS)):
                    block = blocks[index] if index < len(blocks) else None
                    if block is None or pool.owners(block) > 1:
                        taken.append((kind, index, pool.take()))
        except BaseException:
            for kind, _, block in taken:
                self._pools[kind].release(block, ticket)
            raise
        copies = []
        for kind, index, own in taken:
            pool, blocks = self._pools[kind], self._blocks[kind]
            if index == len(blocks):
                blocks.append(None)
            shared = blocks[index]
            if shared is not None:
                if index * BLOCK_POSITIONS < position:
                    copies.append(BlockCopy(pool, shared, own))
                pool.release(shared, ticket)
            self._set(kind, index, own)
        return copies

    def _free_passed(self, kind: int, position: int, ticket: int) -> None:
        for index in range(self._passed(kind, position)):
            self._drop(kind, index, ticket)

    def _passed(self, kind: int, position: int) -> int:
        """Blocks at the start that neither the window nor the rewind budget reaches."""
        window = self._pools[kind].kind.window
        if not window:
            return 0
        passed = max(0, position - self._budget - window + 1) // BLOCK_POSITIONS
        return min(passed, len(self._blocks[kind]))

    def truncate(self, position: int, ticket: int) -> None:
        """Release the blocks that lie wholly at or behind `position`."""
        for kind, blocks in enumerate(self._blocks):
            keep = ceil_div(position, BLOCK_POSITIONS)
            for index in range(keep, len(blocks)):
                self._drop(kind, index, ticket)
            del blocks[keep:]

    @property
    def first_kept(self) -> int:
        """See the function `first_kept`."""
        return first_kept(self._pools, self._blocks)

    def share(self, position: int) -> Blocks:
        """A list of the blocks of the positions up to this one, each with one owner more.

        What lies behind, for steps to come or in flight, stays with this sequence alone; so does
        what a window has passed and the next call frees.
        """
        kept = [blocks[: ceil_div(position, BLOCK_POSITIONS)] for blocks in self._blocks]
        for kind, blocks in enumerate(kept):
            passed = min(self._passed(kind, position), len(blocks))
            blocks[:passed] = [None] * passed
        share_blocks(self._pools, kept)
        return kept

    def replace(self, blocks: Blocks, ticket: int) -> None:
        """Give up the own blocks and take over a list whose owners count this sequence already."""
        self.truncate(0, ticket)
        for kind, given in enumerate(blocks):
            self._blocks[kind] = [None] * len(given)
            for index, block in enumerate(given):
                if block is not None:
                    self._set(kind, index, block)

    def of_kind(self, kind: int) -> Sequence[int | None]:
        """The blocks of one kind, those included that the next call frees; they stay this
        sequence's own."""
        return self._blocks[kind]

    def held(self) -> list[int]:
        """Blocks held per kind, shared ones included."""
        return [sum(block is not None for block in blocks) for blocks in self._blocks]

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held, shared ones included."""
        return held_bytes(self._pools, self._blocks)

    def _set(self, kind: int, index: int, block: int) -> None:
        self._blocks[kind][index] = block
        self._tables.set(self._slot, kind, index, self._pools[kind].address(block))

    def _drop(self, kind: int, index: int, ticket: int) -> None:
        block = self._blocks[kind][index]
        if block is None:
            return
        self._blocks[kind][index] = None
        self._tables.set(self._slot, kind, index, 0)
        self._pools[kind].release(block, ticket)


def first_kept(pools: Collection[BlockPool], blocks: Blocks) -> int:
    """The least position (beyond 0) at which a sequence can go on with these blocks.

    It is 0 unless a sliding kind has freed blocks: the token at the position must find its window.
    """
    first = 0
    for pool, own in zip(pools, blocks, strict=True):
        freed = [i for i, block in enumerate(own) if block is None]
        if freed:
            first = max(first, (max(freed) + 1) * BLOCK_POSITIONS + pool.kind.window - 1)
    return first


def held_bytes(pools: Collection[BlockPool], blocks: Blocks) -> int:
    """Bytes of the blocks in a list."""
    return sum(
        pool.kind.block_bytes
        for pool, own in zip(pools, blocks, strict=True)
        for block in own
        if block is not None
    )


def share_blocks(pools: Collection[BlockPool], blocks: Blocks) -> None:
    """One owner more for every block of a list."""
    for pool, own in zip(pools, blocks, strict=True):
        for block in own:
            if block is not None:
                pool.share(block)


def release_blocks(pools: Collection[BlockPool], blocks: Blocks, ticket: int) -> None:
    """One owner less for every block of a list, which is emptied."""
    for pool, own in zip(pools, blocks, strict=True):
        for block in own:
            if block is not None:
                pool.release(block, ticket)
        own.clear()


def pool_sizes(
    kinds: Collection[KvKind],
    *,
    slots: int,
    table_blocks: int,
    advance: int,
    rewind_budget: int,
    kv_bytes: int | None,
) -> list[int]:
    """Blocks per kind.

    By default every slot can fill its context, while two snapshots (a prefix, and the end of a
    prompt) hold a tail each. A sliding kind holds its window and the rewind budget three times, for
    the session and for either snapshot, and the `advance` positions of one call.

    Args:
        kv_bytes: bytes to use instead, in the same proportions.

    Raises:
        UsageError: they are too few for one slot to evaluate anything.
    """
    counts = []
    for kind in kinds:
        per_slot = table_blocks + 2
        if kind.window:
            tail = ceil_div(kind.window + rewind_budget, BLOCK_POSITIONS) + 2
            per_slot = min(per_slot, 3 * tail + ceil_div(advance, BLOCK_POSITIONS))
        counts.append(per_slot * slots)
    if kv_bytes is None:
        return counts
    usual = sum(n * kind.block_bytes for n, kind in zip(counts, kinds, strict=True))
    counts = [n * kv_bytes // usual for n in counts]
    if min(counts, default=1) < 1:
        raise UsageError(f"kv_bytes={kv_bytes} holds no block of some kind; {usual} is the usual")
    return counts
