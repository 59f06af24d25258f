"""Snapshots: what a session is at one position, without a copy of its keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hornito.errors import SessionError
from hornito.runtime.guard import uninterrupted
from hornito.runtime.kv_cache import Blocks, first_kept, held_bytes, release_blocks

if TYPE_CHECKING:
    import os

    from hornito.runtime.engine import Engine
    from hornito.runtime.sampler import Sampler

EMBEDDED = -1
"""Stands in the ids of a session or snapshot for a position that was given as an embedding."""


class Snapshot:
    """Block tables, token ids and the pending token of a session; made by `Session.snapshot()`.

    It owns its blocks together with the sessions that share them; `release()` gives them up.

    Attributes:
        ids: the tokens evaluated so far.
        pending: the next token, when it was known.
        vectors: the positions that were given as embeddings.
        sampler: what drew the pending token; None for the most likely one.
        messages: the conversation that the tokens are the beginning of, when they came from one of
            text alone.
        generation: the engine's when it was made; of an earlier one, the blocks are lost.
    """

    def __init__(
        self,
        engine: Engine,
        blocks: Blocks,
        ids: list[int],
        pending: int | None,
        vectors: dict[int, npt.NDArray[np.float32]],
        sampler: Sampler | None = None,
    ) -> None:
        self.engine = engine
        self.ids = ids
        self.pending = pending
        self.vectors = vectors
        self.sampler = sampler
        self.messages: tuple[dict[str, str], ...] = ()
        self.generation = engine.generation
        self._blocks = blocks
        self._released = False
        engine.snapshots.add(self)

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self.nbytes} bytes of KV blocks"
        return f"<Snapshot of {self.position} tokens, {state}>"

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *details: object) -> None:
        self.release()

    @property
    def position(self) -> int:
        """Tokens evaluated."""
        return len(self.ids)

    @property
    def blocks(self) -> Blocks:
        """The blocks by kind and index.

        Raises:
            SessionError: the snapshot was released, or its device was lost.
        """
        self.check()
        if self.lost:
            raise SessionError(
                "the keys and values of this snapshot were on a device that was lost; a session "
                "that restores it evaluates its tokens again"
            )
        return self._blocks

    @property
    def lost(self) -> bool:
        """Whether its keys and values were on a device that was lost."""
        return self.generation != self.engine.generation or self.engine.device.lost

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held, shared ones included."""
        return held_bytes(self.engine.pools, self._blocks)

    @property
    def first_kept(self) -> int:
        """The least position (beyond 0) that a session restored from here can be rewound to."""
        return first_kept(self.engine.pools, self._blocks)

    def check(self) -> None:
        """Raise SessionError when the snapshot or its engine is gone."""
        if self._released:
            raise SessionError("this snapshot was released")
        if self.engine.closed:
            raise SessionError("the model of this snapshot is closed")

    def adopt(self, blocks: Blocks) -> None:
        """Take over blocks that hold the same tokens, in place of those of a lost device."""
        self._blocks = blocks
        self.generation = self.engine.generation

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the snapshot to a file and return its size in bytes.

        Raises:
            HornitoError: it can't be written.
        """
        from hornito.runtime.snapshot_file import save_snapshot

        return save_snapshot(self, path)

    def release(self) -> None:
        """Give up the blocks; a second call does nothing."""
        with self.engine.lock, uninterrupted():
            if self._released:
                return
            self._released = True
            self.engine.snapshots.discard(self)
            if not self.engine.closed and self.generation == self.engine.generation:
                release_blocks(self.engine.pools, self._blocks, self.engine.last_ticket)

    def __del__(self) -> None:
        self.release()
