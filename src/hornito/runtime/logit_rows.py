"""Logits of many rows of a session, a few at a time, where the head leaves them on the device.

A part of `Session` in a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hornito.ops.base import Operand
from hornito.plan.plan import LOGITS_ROWS

if TYPE_CHECKING:
    from hornito.runtime.session import Session


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Logits `[count, V]` fp32 of consecutive tokens, until the session's engine runs again.

    Attributes:
        first: which of the given ids row 0 belongs to.
        count: rows.
        kind, rows: the bucket that evaluated them.
        address: where they lie on the device.
    """

    first: int
    count: int
    kind: str
    rows: int
    address: int


def logit_rows(
    session: Session,
    ids: Sequence[int],
    *,
    skip: int = 0,
    chunk: int | None = None,
    copy: bool = False,
) -> Iterator[LogitRows]:
    """Evaluate `ids` as `Session.prefill` does, and hand out the logits after each but the first
    `skip`.

    Args:
        skip: rows at the start whose logits are not wanted.
        chunk: as for `Session.prefill`.
        copy: bring them to the engine's host buffer `logits` as well.

    The session holds the ids that were evaluated when the next rows are asked for; it has a pending
    token at the end. Nothing else may run on the engine between two of them.

    Raises:
        UsageError, ContextOverflowError: as for `Session.prefill`.
    """
    engine = session.engine
    with engine.lock:
        ids = session._admit(ids)
        for start, rows, live in session._schedule(len(ids), chunk):
            kind = "batch" if rows == 1 else "chunk"
            session._evaluate(ids[start : start + live], rows, "none")
            for first in range(min(live, max(0, skip - start)), live, LOGITS_ROWS):
                picked = range(first, min(first + LOGITS_ROWS, live))
                session._tail(kind, rows, "logits", live, picked, copy=copy)
                name = engine.logits_name(kind, rows)
                address = engine.address(kind, Operand(name, 0, 4))
                yield LogitRows(start + first, len(picked), kind, rows, address)
        session._tail(kind, rows, "argmax", live, [live - 1])
        session._collect(kind, 1)
