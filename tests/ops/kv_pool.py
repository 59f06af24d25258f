"""KV blocks as a test sees them: scattered in memory, poisoned, reached through tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hornito.graph.reference import ReferenceState
from hornito.ops.base import BLOCK_POSITIONS, Array, KvLayout, Operand

POISON = 0x7FC17E5A
"""A NaN as fp32, and in both halves as fp16."""


class KvPool:
    """KV blocks of one kind, scattered in memory, with a table per slot.

    Everything is poison until `put` writes it, so a key that must not be seen shows as NaN. Table
    entries without a block point at a block of poison.
    """

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        *,
        half: bool,
        slots: int = 1,
        table_blocks: int = 4,
        layers: int = 2,
        layer: int = 1,
        owned: Sequence[int] | None = None,
        seed: int = 5,
    ) -> None:
        """`owned` blocks per slot, from position 0; the node's layer is `layer` of `layers`."""
        self.kv_heads, self.head_dim, self.half = kv_heads, head_dim, half
        self.layers, self.layer = layers, layer
        owned = owned if owned is not None else [table_blocks] * slots
        count = 1 + sum(owned)
        order = 1 + np.random.default_rng(seed).permutation(count - 1)
        self.table = np.zeros((slots, table_blocks), np.int64)
        at = 0
        for slot, blocks in enumerate(owned):
            self.table[slot, :blocks] = order[at : at + blocks]
            at += blocks
        shape = (count, layers, 2, kv_heads, BLOCK_POSITIONS, head_dim)
        self.dtype = np.dtype(np.float16 if half else np.float32)
        words = int(np.prod(shape)) * self.dtype.itemsize // 4
        self.data = np.full(words, POISON, np.uint32).view(self.dtype).reshape(shape)

    @property
    def block_bytes(self) -> int:
        return int(self.data[0].nbytes)

    def layout(self, table: Operand, layer: int = 0) -> KvLayout:
        """Where the graph's layer lies; its layer 0 is `self.layer` of the pool."""
        index = self.layer + layer
        return KvLayout(0, index, self.kv_heads, self.head_dim, self.half, table)

    def at(self, slot: int, position: int) -> tuple[int, int]:
        """Block and position inside it; an unowned position is an error of the test."""
        block = int(self.table[slot, position // BLOCK_POSITIONS])
        assert block != 0, "the test writes a position that the slot does not own"
        return block, position % BLOCK_POSITIONS

    def put(self, slot: int, position: int, k: Array, v: Array) -> None:
        """Store keys and values `[kv_heads, head_dim]` of one position."""
        block, inside = self.at(slot, position)
        self.data[block, self.layer, 0, :, inside] = to_half(k) if self.half else k
        self.data[block, self.layer, 1, :, inside] = to_half(v) if self.half else v

    def fill(self, slot: int, count: int, rng: np.random.Generator, scale: float = 1.0) -> None:
        """Random keys and values at the positions before `count`."""
        for position in range(count):
            shape = (self.kv_heads, self.head_dim)
            k = rng.standard_normal(shape) * scale
            self.put(slot, position, k, rng.standard_normal(shape))

    def state(self, slot: int, count: int) -> ReferenceState:
        """The evaluator's state that holds the slot's first `count` positions as layer 0."""
        state = ReferenceState()
        cache = state.layer(0)
        for position in range(count):
            block, inside = self.at(slot, position)
            cache.keys[position] = self.data[block, self.layer, 0, :, inside].astype(np.float64)
            cache.values[position] = self.data[block, self.layer, 1, :, inside].astype(np.float64)
        return state

    def copy(self) -> KvPool:
        twin = object.__new__(KvPool)
        twin.__dict__.update(self.__dict__)
        twin.data = self.data.copy()
        return twin


def to_half(values: Array) -> npt.NDArray[np.float16]:
    """fp16, nearest even, with finite values saturated as the KV store does."""
    values = np.asarray(values, np.float32)
    finite = np.isfinite(values)
    return np.where(finite, np.clip(values, -65504.0, 65504.0), values).astype(np.float16)
