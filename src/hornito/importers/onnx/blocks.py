"""Quantised matrices of ONNX files: numbers, and where they are such exactly, GGUF's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hornito.graph.weights import (
    ByteArray,
    FloatArray,
    ReorderedData,
    SlicedData,
    TransposedData,
    WeightData,
    row_blocks,
    stored_as,
)
from hornito.importers.onnx.values import Array

#: Weights that share a scale in the blocks below.
GROUP = 32
#: Blocks of GGUF that are `scale * integer`, the smallest first, and which integers they hold.
_KINDS = (("Q4_0", -8, 7), ("Q5_0", -16, 15), ("Q8_0", -128, 127))


@dataclass(frozen=True, slots=True, eq=False)
class BlockData:
    """A matrix `[rows, columns]` of integers in blocks along its columns, each with a scale and
    perhaps a zero point; dequantised when rows are read, as `(q - zero) * scale`.

    `quants(start, stop)`, `scales(...)` and `zeros(...)` give `[rows, columns]` (integers) and
    `[rows, blocks]`; `span` is the least and the largest integer that quants may hold; `turned`
    makes the transpose where one scale holds for all.
    """

    shape: tuple[int, int]
    block: int
    source_names: tuple[str, ...]
    quants: Callable[[int, int], Array]
    scales: Callable[[int, int], FloatArray]
    zeros: Callable[[int, int], Array]
    span: tuple[int, int]
    turned: Callable[[], BlockData] | None = None
    _known: dict[str, str] = field(default_factory=dict)

    def rows(self, start: int, stop: int) -> FloatArray:
        count, width = stop - start, self.shape[1]
        blocks = -(-width // self.block)
        padded = np.zeros((count, blocks * self.block), np.float32)
        padded[:, :width] = self.quants(start, stop)[:, :width]
        cut = padded.reshape(count, blocks, self.block)
        cut -= self.zeros(start, stop)[:, :, None].astype(np.float32)
        cut *= self.scales(start, stop)[:, :, None]
        return np.ascontiguousarray(padded[:, :width])

    @property
    def stored(self) -> str:
        """GGUF's blocks that hold exactly these numbers, the smallest ones; `""` where none do.

        Scales must be fp16 numbers and zero points integers, in runs of a multiple of 32.
        """
        if "kind" not in self._known:
            self._known["kind"] = self._kind()
        return self._known["kind"]

    def _kind(self) -> str:
        if self.block % GROUP or self.shape[1] % GROUP:
            return ""
        low = high = 0
        for start, stop in self._pieces():
            scales, zeros = self.scales(start, stop), np.asarray(self.zeros(start, stop))
            with np.errstate(over="ignore"):
                half = scales.astype(np.float16).astype(np.float32)
            if not (np.isfinite(half).all() and np.array_equal(half, scales)):
                return ""
            whole = zeros.astype(np.int64)
            if not np.array_equal(whole, zeros):
                return ""
            low = min(low, self.span[0] - int(whole.max(initial=0)))
            high = max(high, self.span[1] - int(whole.min(initial=self.span[1])))
        if high > 127 or low < -128:
            low, high = self._range()
        return next((name for name, a, b in _KINDS if a <= low and high <= b), "")

    def _range(self) -> tuple[int, int]:
        """The least and the largest `q - zero` that there are."""
        found = [self._integers(start, stop) for start, stop in self._pieces()]
        return min(int(f.min()) for f in found), max(int(f.max()) for f in found)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        yield from row_blocks(self.shape)

    def _integers(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """`q - zero`, `[rows, columns]`."""
        width = self.shape[1]
        quants = self.quants(start, stop)[:, :width].astype(np.int32)
        zeros = np.asarray(self.zeros(start, stop)).astype(np.int32)
        spread: npt.NDArray[np.int32] = quants - np.repeat(zeros, self.block, axis=1)[:, :width]
        return spread

    def stored_rows(self, start: int, stop: int) -> ByteArray:
        """Rows as those blocks, uint8 `[rows, bytes of a row]`."""
        kind = self.stored
        if not kind:
            raise ValueError(f"{self.source_names} is not held in blocks")
        offset = -next(low for name, low, _ in _KINDS if name == kind)
        numbers = self._integers(start, stop).reshape(-1, GROUP)
        spread = np.repeat(self.scales(start, stop), self.block // GROUP, axis=1)
        scales = spread[:, : self.shape[1] // GROUP].astype("<f2").reshape(-1, 1).view(np.uint8)
        if kind == "Q8_0":
            parts = [scales, numbers.astype(np.int8).view(np.uint8)]
        else:
            codes = (numbers + offset).astype(np.uint8)
            low = codes & np.uint8(15)
            parts = [low[:, : GROUP // 2] | (low[:, GROUP // 2 :] << np.uint8(4))]
            if kind == "Q5_0":
                parts.insert(0, np.packbits(codes >> np.uint8(4), axis=1, bitorder="little"))
            parts.insert(0, scales)
        return np.concatenate(parts, axis=1).reshape(stop - start, -1)


def transposed(data: WeightData) -> WeightData:
    """The transpose of a matrix, as blocks along its rows where it can be had so."""
    if isinstance(data, TransposedData):
        return data.base
    if isinstance(data, BlockData) and data.turned is not None:
        return data.turned()
    return TransposedData(data)


def kept_and_lost(weights: dict[str, WeightData]) -> tuple[frozenset[str], list[str]]:
    """The kinds of blocks that quantised matrices are in, and the names of those in none."""
    held = {name: stored_as(data) for name, data in weights.items() if _quantised(data)}
    return frozenset(held.values()) - {""}, [name for name, kind in held.items() if not kind]


def _quantised(data: WeightData) -> bool:
    while isinstance(data, TransposedData | SlicedData | ReorderedData):
        data = data.base
    return isinstance(data, BlockData)
