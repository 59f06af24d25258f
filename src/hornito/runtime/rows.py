"""Row records as the host writes them (kernels/include/rows.glsl)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hornito.ops.base import ROW_EMBEDDED, ROW_IGNORE_EOS, ROW_LIVE
from hornito.plan.plan import RING


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """What the host writes into one row record."""

    token: int
    position: int
    slot: int
    flags: int
    limit: int
    emitted: int

    def words(self) -> list[int]:
        """The record, `ROW_BYTES` as 32-bit words."""
        return [
            self.token,
            self.position,
            self.slot,
            self.flags,
            self.limit,
            self.emitted,
            RING,
            0,
        ]


def words(*values: int) -> bytes:
    """32-bit words."""
    return np.asarray(values, np.uint32).tobytes()


def row_bytes(records: Sequence[RowUpdate], rows: int) -> bytes:
    """Row records; rows of the bucket beyond them are not live."""
    table = np.zeros((rows, 8), np.uint32)
    for r, record in enumerate(records):
        table[r] = record.words()
    return table.tobytes()


def chunk_bytes(
    ids: Sequence[int], rows: int, *, position: int, slot: int, limit: int, emitted: dict[int, int]
) -> bytes:
    """Row records of consecutive tokens of one slot, none of which ends it; ids below 0 stand for
    rows that the host gives as embeddings.

    Args:
        emitted: the sequence number of each row that emits a record.
    """
    table = np.zeros((rows, 8), np.uint32)
    given = np.asarray(ids, np.int64)
    live = table[: len(given)]
    live[:, 0] = np.maximum(given, 0)
    live[:, 1] = position + np.arange(len(given))
    live[:, 2] = slot
    live[:, 3] = np.where(given < 0, ROW_EMBEDDED, 0) | ROW_LIVE | ROW_IGNORE_EOS
    live[:, 4] = limit
    live[:, 6] = RING
    for row, number in emitted.items():
        live[row, 5] = number
    return table.tobytes()
