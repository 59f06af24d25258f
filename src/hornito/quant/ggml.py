"""The tensor types of GGUF files and their exact conversion to float32.

A quantised row is a run of blocks; each block holds `block` values in `nbytes` bytes. Every
dequantiser here takes blocks as uint8 `[n, nbytes]` and returns float32 `[n, block]`, with the
operations and their order as in ggml, so that results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_SHIFT_NIBBLES = np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)
_SHIFT_PAIRS = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
_SHIFT_BITS = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)
_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One tensor type of GGUF.

    Attributes:
        name: ggml's name, such as `Q4_K`.
        type_id: the number that stands for it in a file.
        block: values in a block (1 for plain types).
        nbytes: bytes of a block.
        dequantise: blocks uint8 `[n, nbytes]` -> float32 `[n, block]`.
    """

    name: str
    type_id: int
    block: int
    nbytes: int
    dequantise: Callable[[Bytes], Floats]

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values, which must be a multiple of `block`."""
        if columns % self.block:
            raise ValueError(f"{columns} columns are no multiple of {self.name}'s {self.block}")
        return columns // self.block * self.nbytes


def _half(blocks: Bytes, start: int) -> Floats:
    """The fp16 number at byte `start` of each block, as float32 `[n, 1]`."""
    field = np.ascontiguousarray(blocks[:, start : start + 2])
    return field.view("<f2").astype(np.float32)


def nibbles(packed: Bytes, group: int) -> Bytes:
    """Low nibbles of each run of `group` bytes, then its high ones: uint8 `[n, 2 * bytes]`."""
    n = packed.shape[0]
    out = (packed.reshape(n, -1, 1, group) >> _SHIFT_NIBBLES) & np.uint8(15)
    return out.reshape(n, -1)


def fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """The 32 bits at byte `start`, lowest first, each as 0 or 16: uint8 `[n, 32]`."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32, copy=False)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    words = np.ascontiguousarray(blocks).view("<u2").astype(np.uint32)
    return (words << np.uint32(16)).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    quants = nibbles(blocks[:, 2:], 16).astype(np.int8) - np.int8(8)
    return _half(blocks, 0) * quants.astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    quants = nibbles(blocks[:, 4:], 16).astype(np.float32)
    return (_half(blocks, 0) * quants) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    quants = nibbles(blocks[:, 6:], 16) | fifth_bits(blocks, 2)
    return _half(blocks, 0) * (quants.astype(np.int8) - np.int8(16)).astype(np.float32)


def _q5_1(blocks: Bytes) -> Floats:
    quants = nibbles(blocks[:, 8:], 16) | fifth_bits(blocks, 4)
    return (_half(blocks, 0) * quants.astype(np.float32)) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    quants = np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)
    return quants * _half(blocks, 0)


def _q8_1(blocks: Bytes) -> Floats:
    # Bytes 2 and 3 hold d * sum(q), which only ggml's dot products use.
    quants = np.ascontiguousarray(blocks[:, 4:]).view(np.int8).astype(np.float32)
    return quants * _half(blocks, 0)


def _q2_k(blocks: Bytes) -> Floats:
    n = blocks.shape[0]
    scales = blocks[:, :16]
    step = (_half(blocks, 80) * (scales & np.uint8(15)).astype(np.float32)).reshape(n, 16, 1)
    low = (_half(blocks, 82) * (scales >> np.uint8(4)).astype(np.float32)).reshape(n, 16, 1)
    quants = (blocks[:, 16:80].reshape(n, 2, 1, 32) >> _SHIFT_PAIRS) & np.uint8(3)
    return (step * quants.reshape(n, 16, 16).astype(np.float32) - low).reshape(n, 256)


def _q3_k(blocks: Bytes) -> Floats:
    n = blocks.shape[0]
    low_scales = blocks[:, 96:104].reshape(n, 1, 8) >> _SHIFT_NIBBLES.reshape(1, 2, 1)
    high_scales = blocks[:, 104:108].reshape(n, 1, 4) >> _SHIFT_PAIRS.reshape(1, 4, 1)
    scales = (low_scales.reshape(n, 16) & np.uint8(15)) | (
        (high_scales.reshape(n, 16) & np.uint8(3)) << np.uint8(4)
    )
    signed_scales = (scales.astype(np.int8) - np.int8(32)).astype(np.float32)
    step = (_half(blocks, 108) * signed_scales).reshape(n, 16, 1)
    low = (blocks[:, 32:96].reshape(n, 2, 1, 32) >> _SHIFT_PAIRS) & np.uint8(3)
    mask = (blocks[:, :32].reshape(n, 1, 1, 32) >> _SHIFT_BITS) & np.uint8(1)
    # A set mask bit means that nothing is subtracted.
    offset = (mask ^ np.uint8(1)) << np.uint8(2)
    quants = low.reshape(n, 16, 16).astype(np.int8) - offset.reshape(n, 16, 16).astype(np.int8)
    return (step * quants.astype(np.float32)).reshape(n, 256)


def k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The eight 6-bit scales and minima packed into 12 bytes of Q4_K and Q5_K."""
    n = packed.shape[0]
    parts = packed.reshape(n, 3, 4)
    first, second, high = parts[:, 0], parts[:, 1], parts[:, 2]
    scales = np.concatenate(
        [first & np.uint8(63), (high & np.uint8(15)) | ((first >> np.uint8(2)) & np.uint8(48))], 1
    )
    minima = np.concatenate(
        [
            second & np.uint8(63),
            (high >> np.uint8(4)) | ((second >> np.uint8(2)) & np.uint8(48)),
        ],
        1,
    )
    return scales, minima


def _k_affine(blocks: Bytes, quants: Bytes) -> Floats:
    """`d * scale * q - dmin * minimum` for Q4_K and Q5_K, quants `[n, 256]`."""
    n = blocks.shape[0]
    scales, minima = k_scales(blocks[:, 4:16])
    step = (_half(blocks, 0) * scales.astype(np.float32)).reshape(n, 8, 1)
    low = (_half(blocks, 2) * minima.astype(np.float32)).reshape(n, 8, 1)
    return (step * quants.reshape(n, 8, 32).astype(np.float32) - low).reshape(n, 256)


def _q4_k(blocks: Bytes) -> Floats:
    return _k_affine(blocks, nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Bytes) -> Floats:
    n = blocks.shape[0]
    high = (blocks[:, 16:48].reshape(n, 1, 1, 32) >> _SHIFT_BITS) & np.uint8(1)
    return _k_affine(blocks, nibbles(blocks[:, 48:], 32) | (high.reshape(n, 256) << np.uint8(4)))


def _q6_k(blocks: Bytes) -> Floats:
    n = blocks.shape[0]
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    step = (_half(blocks, 208) * scales).reshape(n, 16, 1)
    low = nibbles(blocks[:, :128], 64)
    high = (blocks[:, 128:192].reshape(n, 2, 1, 32) >> _SHIFT_PAIRS) & np.uint8(3)
    quants = (low | (high.reshape(n, 256) << np.uint8(4))).astype(np.int8) - np.int8(32)
    return (step * quants.reshape(n, 16, 16).astype(np.float32)).reshape(n, 256)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _IQ4_VALUES[nibbles(blocks[:, 2:], 16)]


#: Types that can be read, by their number in a file.
GGML_TYPES: dict[int, BlockFormat] = {
    fmt.type_id: fmt
    for fmt in (
        BlockFormat("F32", 0, 1, 4, _f32),
        BlockFormat("F16", 1, 1, 2, _f16),
        BlockFormat("Q4_0", 2, 32, 18, _q4_0),
        BlockFormat("Q4_1", 3, 32, 20, _q4_1),
        BlockFormat("Q5_0", 6, 32, 22, _q5_0),
        BlockFormat("Q5_1", 7, 32, 24, _q5_1),
        BlockFormat("Q8_0", 8, 32, 34, _q8_0),
        BlockFormat("Q8_1", 9, 32, 36, _q8_1),
        BlockFormat("Q2_K", 10, 256, 84, _q2_k),
        BlockFormat("Q3_K", 11, 256, 110, _q3_k),
        BlockFormat("Q4_K", 12, 256, 144, _q4_k),
        BlockFormat("Q5_K", 13, 256, 176, _q5_k),
        BlockFormat("Q6_K", 14, 256, 210, _q6_k),
        BlockFormat("IQ4_NL", 20, 32, 18, _iq4_nl),
        BlockFormat("BF16", 30, 1, 2, _bf16),
    )
}

#: Names of all types that ggml has given a number, read or not: for error messages.
GGML_TYPE_NAMES: dict[int, str] = {
    **{type_id: fmt.name for type_id, fmt in GGML_TYPES.items()},
    **{4: "Q4_2", 5: "Q4_3", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"},
    **{28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}

_BY_NAME = {fmt.name: fmt for fmt in GGML_TYPES.values()}


def format_by_name(name: str) -> BlockFormat:
    """The format called `name` (`F32`, `BF16`, `Q4_K`, ...); KeyError when it can't be read."""
    return _BY_NAME[name]


def is_quantised(name: str) -> bool:
    """Whether `name` is a type of blocks that hold several values each."""
    return name in _BY_NAME and _BY_NAME[name].block > 1


def dequantise_rows(raw: Bytes, fmt: BlockFormat, columns: int) -> Floats:
    """Convert whole rows.

    Args:
        raw: uint8 `[rows, fmt.row_bytes(columns)]`.
        fmt: the format of the rows.
        columns: values in a row, a multiple of `fmt.block`.

    Returns:
        float32 `[rows, columns]`, equal bit for bit to ggml's own conversion.
    """
    rows = raw.shape[0]
    # NaN and infinite scales are data of the file, not faults of the arithmetic.
    with np.errstate(invalid="ignore", over="ignore"):
        return fmt.dequantise(raw.reshape(-1, fmt.nbytes)).reshape(rows, columns)
