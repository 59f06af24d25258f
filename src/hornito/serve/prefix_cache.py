"""Snapshots of earlier requests, from which later prompts start.

Layers without a window let a prompt start anywhere inside a snapshot, so one at the end of each
answer is enough, and the end of a longer sequence stands for all its beginnings. Sliding layers
have forgotten what lies before their window, so a snapshot counts as a whole: one is kept at the
end of each prompt and one at the end of each answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hornito.runtime.prefix import best_match
from hornito.runtime.snapshot import EMBEDDED, Snapshot

if TYPE_CHECKING:
    from hornito.runtime.engine import Engine
    from hornito.runtime.session import Session


class PrefixCache:
    """Snapshots by last use, within a budget of bytes; used by one thread.

    They give way when a KV pool is full.

    Attributes:
        budget: bytes of KV blocks that they may hold; 0 keeps none.
        lookups, hits: prompts that came, and those that started from something.
    """

    def __init__(self, engine: Engine, budget: int | None = None) -> None:
        """Begin empty.

        Args:
            budget: by default all of the KV pools: what running requests leave.
        """
        self._engine = engine
        self._kept: list[Snapshot] = []  # the least recently used first
        self._sliding = any(pool.kind.window for pool in engine.pools)
        self.budget = sum(pool.bytes for pool in engine.pools) if budget is None else budget
        self.lookups = 0
        self.hits = 0
        for pool in engine.pools:
            pool.make_room = self.evict

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def keeps_prompts(self) -> bool:
        """Whether the end of a prompt is worth a snapshot of its own."""
        return self._sliding

    @property
    def nbytes(self) -> int:
        """Bytes of the KV blocks that snapshots hold, each block counted once."""
        total = 0
        for kind, pool in enumerate(self._engine.pools):
            blocks = {b for s in self._kept for b in s.blocks[kind] if b is not None}
            total += len(blocks) * pool.kind.block_bytes
        return total

    def start(self, session: Session, ids: Sequence[int]) -> int:
        """Bring a fresh session to the longest kept beginning of `ids`.

        At least the last of `ids` is left to evaluate.

        Returns:
            the tokens that need no evaluation, which are the session's position.
        """
        self.lookups += 1
        match = best_match(list(self._engine.snapshots), ids)
        if match is None:
            return 0
        session.restore(match.snapshot)
        session.rewind(match.tokens)
        self.hits += 1
        self._touch(match.snapshot)
        return match.tokens

    def keep(self, session: Session) -> None:
        """Hold on to what a session is now, within the budget; of a lost device nothing is left."""
        ids = session.ids
        if not ids or not self.budget or EMBEDDED in ids or self._engine.device.lost:
            return
        for kept in self._kept:
            if kept.ids == ids or (not self._sliding and kept.ids[: len(ids)] == ids):
                self._touch(kept)
                return
        if not self._sliding:
            for kept in [k for k in self._kept if ids[: k.position] == k.ids]:
                self._drop(kept)
        self._kept.append(session.snapshot())
        if self.budget < sum(pool.bytes for pool in self._engine.pools):
            while self.nbytes > self.budget:
                self.evict()

    def evict(self) -> bool:
        """Release the least recently used snapshot; False when there is none."""
        if not self._kept:
            return False
        self._drop(self._kept[0])
        return True

    def clear(self) -> None:
        """Release all."""
        while self.evict():
            pass

    def _touch(self, snapshot: Snapshot) -> None:
        if snapshot in self._kept:
            self._kept.remove(snapshot)
            self._kept.append(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        self._kept.remove(snapshot)
        snapshot.release()
