"""How the weights of a matrix lie in memory: one `WeightFormat` for each storage type.

A plain format (`fp32`, `fp16`, `bf16`) is the numbers, row by row. A quantised one cuts each row
into blocks of `block` weights and stores a matrix as planes, one behind the other, each a whole
number of 16-byte words: the first plane holds the low bits of every block of every row in order,
the next ones higher bits, scales and minima. docs/format.md gives each plane; the kernels read them
in `kernels/include/quants.glsl`. K must be a multiple of `block`.

A name such as `int4g64o16` is `int4g64` with 16 outliers: two more planes hold what 16 input
columns of every row need besides their integers, as fp16 `[N, 16]`, and which columns those are.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError, UnsupportedError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

PLANE_ALIGNMENT = 16
"""Bytes; kernels read planes as 16-byte words."""


OUTLIER_STEP = 8
"""Outliers come in eights: kernels take eight weights at a time."""

OUTLIER_NUMBERS = (2, 3, 4)
"""Numbers of the formats that may have outliers: `int8`, `int4` and `int4m`."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One storage type.

    Attributes:
        name: in graphs and packages.
        variant: of the kernels that read it.
        number: by which those kernels tell quantised formats apart; 0 for `fp32` and `fp16`.
        group: weights that share a scale.
        block: weights of a block.
        planes: bytes of a block in each plane.
        ggml: GGUF's name of the blocks that hold the same numbers, or `""`.
        outliers: input columns that have an fp16 number besides; a multiple of 8.
    """

    name: str
    variant: str
    number: int
    group: int
    block: int
    planes: tuple[int, ...]
    ggml: str = ""
    outliers: int = 0

    @property
    def quantised(self) -> bool:
        """Whether a matrix is stored as planes."""
        return self.block > 1

    @property
    def bits(self) -> float:
        """Bits of a weight, scales included but not outliers."""
        return 8 * sum(self.planes) / self.block

    def plane_sizes(self, shape: tuple[int, ...]) -> list[int]:
        """Bytes of each plane of a matrix `[N, K]`, padding included.

        Raises:
            FormatError: K is no multiple of the format's block.
        """
        if not self.quantised:
            return [math.prod(shape) * self.planes[0]]
        if len(shape) != 2 or shape[1] % self.block:
            raise FormatError(
                f"a matrix of shape {shape} can't be stored as {self.name}: its rows must be a "
                f"multiple of {self.block} long"
            )
        blocks = shape[0] * (shape[1] // self.block)
        sizes = [aligned(blocks * size) for size in self.planes]
        if self.outliers:
            sizes += [aligned(2 * shape[0] * self.outliers), aligned(4 * self.outliers)]
        return sizes

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a weight of that shape."""
        return sum(self.plane_sizes(shape))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of that shape can be stored so."""
        if not self.quantised:
            return True
        return len(shape) == 2 and shape[1] % self.block == 0 and self.outliers <= shape[1]

    def with_outliers(self, count: int) -> WeightFormat:
        """The same format with `count` outliers, a multiple of 8.

        Raises:
            FormatError: it is no multiple of 8, or the format has none.
        """
        if count == self.outliers:
            return self
        if self.number not in OUTLIER_NUMBERS or count % OUTLIER_STEP or count < 0:
            raise FormatError(f"{self.name} can't have {count} outliers")
        base = FORMATS[self.name.partition("o")[0]]
        return (
            replace(base, name=f"{base.name}o{count}", ggml="", outliers=count) if count else base
        )


def aligned(size: int) -> int:
    """`size` rounded up to whole 16-byte words."""
    return -(-size // PLANE_ALIGNMENT) * PLANE_ALIGNMENT


def _grouped(name: str, number: int, body: int, scales: int, ggml: str) -> list[WeightFormat]:
    """A format in its three group sizes; GGUF's blocks have groups of 32."""
    return [
        WeightFormat(
            name if group == 32 else f"{name}g{group}",
            "q",
            number,
            group,
            group,
            (group * body // 8, scales),
            ggml if group == 32 else "",
        )
        for group in (32, 64, 128)
    ]


FORMATS: dict[str, WeightFormat] = {
    f.name: f
    for f in (
        WeightFormat("fp32", "f32", 0, 1, 1, (4,), "F32"),
        WeightFormat("fp16", "f16", 0, 1, 1, (2,), "F16"),
        WeightFormat("bf16", "q", 1, 1, 1, (2,), "BF16"),
        *_grouped("int8", 2, 8, 2, "Q8_0"),
        *_grouped("int4", 3, 4, 2, "Q4_0"),
        *_grouped("int4m", 4, 4, 4, "Q4_1"),
        WeightFormat("q5", "q", 5, 32, 32, (16, 4, 2), "Q5_0"),
        WeightFormat("q5m", "q", 6, 32, 32, (16, 4, 4), "Q5_1"),
        WeightFormat("q4k", "q", 7, 32, 256, (128, 16), "Q4_K"),
        WeightFormat("q5k", "q", 8, 32, 256, (128, 32, 16), "Q5_K"),
        WeightFormat("q6k", "q", 9, 16, 256, (128, 64, 16, 2), "Q6_K"),
    )
}
"""Every storage type by its name."""

_WITH_OUTLIERS = re.compile(r"(int[48]m?(?:g64|g128)?)o([1-9][0-9]{0,4})")

_BY_GGML = {f.ggml: f for f in FORMATS.values() if f.ggml}


def weight_format(name: str) -> WeightFormat:
    """The storage type called `name`.

    Raises:
        UnsupportedError: there is none.
    """
    if name in FORMATS:
        return FORMATS[name]
    match = _WITH_OUTLIERS.fullmatch(name) if isinstance(name, str) else None
    if match is None or match[1] not in FORMATS:
        raise UnsupportedError(
            f"weight format {str(name)[:40]!r} is unknown; known: {', '.join(FORMATS)}"
        )
    return FORMATS[match[1]].with_outliers(int(match[2]))


def format_of_blocks(ggml: str) -> WeightFormat | None:
    """The storage type that holds GGUF's blocks of that name exactly; None where there is none."""
    return _BY_GGML.get(ggml)
