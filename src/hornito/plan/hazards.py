"""Barriers from declared ranges: one before every dispatch that touches what an earlier one wrote,
or writes what an earlier one reads, since the last barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hornito.ops.base import Dispatch, Operand

# A physical byte range: the name of its space, start and end.
Range = tuple[str, int, int]


def barriers(dispatches: Sequence[Dispatch], place: Callable[[Operand], Range]) -> tuple[bool, ...]:
    """For every dispatch, whether a barrier must come before it.

    Args:
        place: where an operand lies; values that share an arena share a space.
    """
    result = []
    read: list[Range] = []
    written: list[Range] = []
    for dispatch in dispatches:
        reads = [place(operand) for operand in dispatch.reads]
        writes = [place(operand) for operand in dispatch.writes]
        hazard = _touch(reads, written) or _touch(writes, written) or _touch(writes, read)
        if hazard:
            read, written = [], []
        read += reads
        written += writes
        result.append(hazard)
    return tuple(result)


def _touch(some: Sequence[Range], others: Sequence[Range]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in others)
