"""Lazy weight data: read, transformed and converted in row blocks when they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

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


@runtime_checkable
class StoredData(Protocol):
    """A `WeightData` whose rows a source holds in blocks of one GGUF type, `stored` (`Q4_1`, ...;
    `""` where they differ). `stored_rows` gives them as uint8 `[rows, bytes of a row]`."""

    @property
    def stored(self) -> str: ...

    def stored_rows(self, start: int, stop: int) -> ByteArray: ...


def stored_as(data: WeightData) -> str:
    """The type of the blocks that hold a tensor, `""` when none do."""
    return data.stored if isinstance(data, StoredData) else ""


def stored_rows(data: WeightData, start: int, stop: int) -> ByteArray:
    """Rows of a tensor as its source's blocks; `stored_as` must name their type."""
    if not isinstance(data, StoredData):
        raise ValueError(f"{data.source_names} is not held in blocks")
    return data.stored_rows(start, stop)


def _common(parts: Sequence[WeightData]) -> str:
    """The one type of blocks that all parts have, or `""`."""
    kinds = {stored_as(part) for part in parts}
    return kinds.pop() if len(kinds) == 1 else ""


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

    @property
    def stored(self) -> str:
        return _common(self.parts)

    def rows(self, start: int, stop: int) -> FloatArray:
        pieces = [part.rows(lo, hi) for part, lo, hi in self._spans(start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def stored_rows(self, start: int, stop: int) -> ByteArray:
        return np.concatenate([stored_rows(p, lo, hi) for p, lo, hi in self._spans(start, stop)])

    def _spans(self, start: int, stop: int) -> Iterator[tuple[WeightData, int, int]]:
        """The parts that have some of the rows, and which of their own rows those are."""
        base = 0
        for part in self.parts:
            count = part.shape[0]
            lo, hi = max(start - base, 0), min(stop - base, count)
            if lo < hi:
                yield part, lo, hi
            base += count


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

    @property
    def stored(self) -> str:
        return _common((self.even, self.odd))

    def rows(self, start: int, stop: int) -> FloatArray:
        first, last = start // 2, (stop + 1) // 2
        pairs = np.stack([self.even.rows(first, last), self.odd.rows(first, last)], axis=1)
        both = pairs.reshape(-1, *self.even.shape[1:])
        return both[start - 2 * first : stop - 2 * first]

    def stored_rows(self, start: int, stop: int) -> ByteArray:
        first, last = start // 2, (stop + 1) // 2
        sides = [stored_rows(side, first, last) for side in (self.even, self.odd)]
        both = np.stack(sides, axis=1).reshape(2 * (last - first), -1)
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

    @property
    def stored(self) -> str:
        return stored_as(self.base)

    def stored_rows(self, start: int, stop: int) -> ByteArray:
        return stored_rows(self.base, self.start + start, self.start + stop)


@dataclass(frozen=True, slots=True)
class ReorderedData:
    """Rows in another order within runs of equal length: row i of a run is row `order[i]` of it."""

    base: WeightData
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.base.source_names

    @property
    def stored(self) -> str:
        return stored_as(self.base) if len(self.shape) == 2 else ""

    def rows(self, start: int, stop: int) -> FloatArray:
        first, last, wanted = self._wanted(start, stop)
        return self.base.rows(first, last)[wanted]

    def stored_rows(self, start: int, stop: int) -> ByteArray:
        first, last, wanted = self._wanted(start, stop)
        return stored_rows(self.base, first, last)[wanted]

    def _wanted(self, start: int, stop: int) -> tuple[int, int, npt.NDArray[np.int64]]:
        """Whole runs of the base that hold the rows, and where each row is in them."""
        run = len(self.order)
        first, last = start // run * run, -(-stop // run) * run
        rows = np.arange(start, stop)
        return first, last, rows // run * run + np.array(self.order)[rows % run] - first


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


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Row ranges that cover a tensor, each of about `BLOCK_ELEMENTS`."""
    row_elements = max(1, int(np.prod(shape[1:], dtype=np.int64)))
    step = max(1, BLOCK_ELEMENTS // row_elements)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def load_all(data: WeightData) -> FloatArray:
    """The whole tensor as fp32."""
    return data.rows(0, data.shape[0])
