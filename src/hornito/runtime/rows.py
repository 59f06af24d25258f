"""Row records as the host writes them (kernels/include/rows.glsl)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
