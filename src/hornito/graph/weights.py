"""Lazy weight data: read, transformed and converted in row blocks when they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

# Rows are converted in blocks of about this many elements, so that memory stays bounded.
BLOCK_ELEMENTS = 4 * 1024 * 1024


class WeightData(Protocol):
    """What a weight needs of its source: a shape and rows as fp32.

    For a tensor of one dimension, `rows` slices its elements.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def source_names(self) -> tuple[str, ...]: ...

    def rows(self, start: int, stop: int) -> FloatArray: ...


@dataclass(frozen=True, slots=True)
class ArrayData:
    """Data computed at import, such as RoPE frequencies."""

    array: FloatArray
    source_names: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def rows(self, start: int, stop: int) -> FloatArray:
        return self.array[start:stop]


@dataclass(frozen=True, slots=True)
class StackedData:
    """Several matrices of one width, one above the other."""

    parts: tuple[WeightData, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (sum(part.shape[0] for part in self.parts), *first[1:])

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.source_names)

    def rows(self, start: int, stop: int) -> FloatArray:
        pieces: list[FloatArray] = []
        base = 0
        for part in self.parts:
            count = part.shape[0]
            lo, hi = max(start - base, 0), min(stop - base, count)
            if lo < hi:
                pieces.append(part.rows(lo, hi))
            base += count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class InterleavedData:
    """Two tensors of one shape, row by row in turn."""

    even: WeightData
    odd: WeightData

    @property
    def shape(self) -> tuple[int, ...]:
        return (2 * self.even.shape[0], *self.even.shape[1:])

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.even.source_names + self.odd.source_names

    def rows(self, start: int, stop: int) -> FloatArray:
        first, last = start // 2, (stop + 1) // 2
        pairs = np.stack([self.even.rows(first, last), self.odd.rows(first, last)], axis=1)
        both = pairs.reshape(-1, *self.even.shape[1:])
        return both[start - 2 * first : stop - 2 * first]


@dataclass(frozen=True, slots=True)
class SlicedData:
    """Rows `[start, stop)` of a tensor."""

    base: WeightData
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.base.shape[1:])

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.base.source_names

    def rows(self, start: int, stop: int) -> FloatArray:
        return self.base.rows(self.start + start, self.start + stop)


@dataclass(frozen=True, slots=True)
class TransposedData:
    """The transpose of a matrix. Any rows of it take the whole matrix to read."""

    base: WeightData

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.base.shape[1], self.base.shape[0])

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.base.source_names

    def rows(self, start: int, stop: int) -> FloatArray:
        return self.base.rows(0, self.base.shape[0])[:, start:stop].T


@dataclass(frozen=True, slots=True)
class ShiftedData:
    """A tensor plus a number, rounded to fp32 once."""

    base: WeightData
    amount: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.base.source_names

    def rows(self, start: int, stop: int) -> FloatArray:
        return self.base.rows(start, stop) + np.float32(self.amount)


def stack(parts: Sequence[WeightData]) -> WeightData:
    """The parts stacked along their first axis."""
    return StackedData(tuple(parts))


def iter_bytes(
    data: WeightData, convert: Callable[[FloatArray], npt.NDArray[np.generic]]
) -> Iterator[memoryview]:
    """The tensor's bytes, row block by row block, after `convert`."""
    row_elements = max(1, int(np.prod(data.shape[1:], dtype=np.int64)))
    step = max(1, BLOCK_ELEMENTS // row_elements)
    for start in range(0, data.shape[0], step):
        block = convert(data.rows(start, min(start + step, data.shape[0])))
        yield np.ascontiguousarray(block).data.cast("B")


def load_all(data: WeightData) -> FloatArray:
    """The whole tensor as fp32."""
    return data.rows(0, data.shape[0])
