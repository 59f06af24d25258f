"""Matrices that a source holds in GGUF's blocks, of random bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hornito.quant.ggml import dequantise_rows, format_by_name

HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where a block has fp16 numbers."""


class Blocks:
    """A matrix of random blocks whose fp16 numbers are finite."""

    def __init__(
        self, kind: str, shape: tuple[int, int], *, name: str = "w", seed: int = 0
    ) -> None:
        self.stored = kind
        self.shape = shape
        self.source_names = (name,)
        self._kind = format_by_name(kind)
        size = (shape[0], self._kind.row_bytes(shape[1]))
        self.raw = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        for at in HALVES[kind]:  # the byte with most of the exponent
            self.raw[:, at + 1 :: self._kind.nbytes] &= 0xBF

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        return dequantise_rows(self.raw[start:stop], self._kind, self.shape[1])

    def stored_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return self.raw[start:stop]

    def spoil(self, row: int, block: int, at: int) -> None:
        """Make a number of a block infinite."""
        first = block * self._kind.nbytes + at
        self.raw[row, first : first + 2] = (0x00, 0x7C)
