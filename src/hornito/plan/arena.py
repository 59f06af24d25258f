"""Packing of activations into one arena by live range: pure arithmetic, no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class LiveRange:
    """A buffer of `size` bytes that is in use from step `first` to step `last`, both included."""

    name: str
    size: int
    first: int
    last: int

    def overlaps(self, other: LiveRange) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets of the packed buffers, and the arena's size.

    `guard` bytes behind every buffer belong to nobody; tests fill and check them.
    """

    offsets: dict[str, int]
    sizes: dict[str, int]
    total: int
    guard: int


def pack(
    ranges: Sequence[LiveRange],
    *,
    alignment: int = ALIGNMENT,
    guard: int = 0,
    share: bool = True,
) -> Layout:
    """Give every buffer an offset such that no two live at once share a byte.

    Largest first, each at the lowest offset that is free for its whole life. With a guard no two
    buffers share a byte at all: otherwise one's guard band would be another's data.

    Args:
        share: whether buffers that are not live at once may share bytes.
    """
    share = share and not guard
    placed: list[tuple[int, int, LiveRange]] = []  # offset, end, range; sorted by offset
    offsets: dict[str, int] = {}
    total = 0
    for item in sorted(ranges, key=lambda r: (-r.size, r.first, r.name)):
        need = -(-(item.size + guard) // alignment) * alignment
        at = 0
        for offset, end, other in placed:
            if share and not item.overlaps(other):
                continue
            if at + need <= offset:
                break
            at = max(at, end)
        placed.append((at, at + need, item))
        placed.sort(key=lambda entry: entry[0])
        offsets[item.name] = at
        total = max(total, at + need)
    return Layout(offsets, {r.name: r.size for r in ranges}, total, guard)
