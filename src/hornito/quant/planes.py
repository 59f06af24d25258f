"""Between GGUF's blocks, planes and numbers, exactly.

`from_blocks` brings blocks into the planes of `hornito.quant.formats`; `to_floats` gives the
numbers that planes stand for, with ggml's operations in ggml's order, and `unpack` those of a
stored weight of any format.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hornito.quant.formats import Bytes, Floats, WeightFormat
from hornito.quant.ggml import k_scales, nibbles

_BITS8 = np.arange(8, dtype=np.uint8)
_BITS_PAIRS = np.array([0, 2, 4, 6], dtype=np.uint8)


def pack_nibbles(quants: Bytes) -> Bytes:
    """4-bit numbers `[n, 2 m]` as bytes `[n, m]`: the even one of each pair in the low half."""
    pairs = np.ascontiguousarray(quants).view("<u2")
    packed: Bytes = (pairs | (pairs >> np.uint16(4))).astype(np.uint8)
    return packed


def unpack_nibbles(packed: Bytes) -> Bytes:
    """The inverse of `pack_nibbles`."""
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return pairs.reshape(len(packed), -1)


def _pack_bits(bits: Bytes) -> Bytes:
    return np.packbits(bits, axis=1, bitorder="little")


def _unpack_bits(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=1, bitorder="little")


def _pack_pairs(pairs: Bytes) -> Bytes:
    """2-bit numbers `[n, 4 m]` as bytes `[n, m]`, the first in the lowest bits."""
    shifted = pairs.reshape(len(pairs), -1, 4) << _BITS_PAIRS
    packed: Bytes = np.bitwise_or.reduce(shifted, axis=2)
    return packed


def _unpack_pairs(packed: Bytes) -> Bytes:
    return ((packed[:, :, None] >> _BITS_PAIRS) & np.uint8(3)).reshape(len(packed), -1)


# -- blocks to planes -----------------------------------------------------------------------


def _q8_0(blocks: Bytes) -> list[Bytes]:
    return [blocks[:, 2:], blocks[:, :2]]


def _q4_0(blocks: Bytes) -> list[Bytes]:
    return [pack_nibbles(nibbles(blocks[:, 2:], 16)), blocks[:, :2]]


def _q4_1(blocks: Bytes) -> list[Bytes]:
    return [pack_nibbles(nibbles(blocks[:, 4:], 16)), blocks[:, :4]]


def _q5_0(blocks: Bytes) -> list[Bytes]:
    return [pack_nibbles(nibbles(blocks[:, 6:], 16)), blocks[:, 2:6], blocks[:, :2]]


def _q5_1(blocks: Bytes) -> list[Bytes]:
    return [pack_nibbles(nibbles(blocks[:, 8:], 16)), blocks[:, 4:8], blocks[:, :4]]


def _q4_k(blocks: Bytes) -> list[Bytes]:
    return [pack_nibbles(nibbles(blocks[:, 16:], 32)), blocks[:, :16]]


def _q5_k(blocks: Bytes) -> list[Bytes]:
    # Bit j of byte i belongs to weight 32 j + i.
    high = (blocks[:, 16:48].reshape(-1, 1, 32) >> _BITS8.reshape(1, 8, 1)) & np.uint8(1)
    return [
        pack_nibbles(nibbles(blocks[:, 48:], 32)),
        _pack_bits(high.reshape(-1, 256)),
        blocks[:, :16],
    ]


def _q6_k(blocks: Bytes) -> list[Bytes]:
    # Bits 2 j and 2 j + 1 of byte i of each half belong to weight 32 j + i of that half.
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _BITS_PAIRS.reshape(1, 1, 4, 1)
    return [
        pack_nibbles(nibbles(blocks[:, :128], 64)),
        _pack_pairs((high & np.uint8(3)).reshape(-1, 256)),
        blocks[:, 192:208],
        blocks[:, 208:210],
    ]


_FROM_BLOCKS: dict[str, Callable[[Bytes], list[Bytes]]] = {
    "int8": _q8_0,
    "int4": _q4_0,
    "int4m": _q4_1,
    "q5": _q5_0,
    "q5m": _q5_1,
    "q4k": _q4_k,
    "q5k": _q5_k,
    "q6k": _q6_k,
}


def from_blocks(fmt: WeightFormat, blocks: Bytes) -> list[Bytes]:
    """GGUF blocks of `fmt.ggml`, uint8 `[n, bytes]`, as one uint8 array `[n, bytes]` a plane."""
    return [np.ascontiguousarray(plane) for plane in _FROM_BLOCKS[fmt.name](blocks)]


# -- planes to numbers ----------------------------------------------------------------------


def _half(plane: Bytes, index: int = 0) -> Floats:
    """The fp16 number `index` of each block, as float32 `[n, 1]`."""
    field = np.ascontiguousarray(plane[:, 2 * index : 2 * index + 2])
    return field.view("<f2").astype(np.float32)


def _signed(quants: Bytes, offset: int) -> Floats:
    return (quants.astype(np.int8) - np.int8(offset)).astype(np.float32)


def _int8(planes: list[Bytes]) -> Floats:
    return planes[0].view(np.int8).astype(np.float32) * _half(planes[1])


def _int4(planes: list[Bytes]) -> Floats:
    return _half(planes[1]) * _signed(unpack_nibbles(planes[0]), 8)


def _int4m(planes: list[Bytes]) -> Floats:
    quants = unpack_nibbles(planes[0]).astype(np.float32)
    return _half(planes[1]) * quants + _half(planes[1], 1)


def _five(planes: list[Bytes]) -> Bytes:
    return unpack_nibbles(planes[0]) | (_unpack_bits(planes[1]) << np.uint8(4))


def _q5(planes: list[Bytes]) -> Floats:
    return _half(planes[2]) * _signed(_five(planes), 16)


def _q5m(planes: list[Bytes]) -> Floats:
    return _half(planes[2]) * _five(planes).astype(np.float32) + _half(planes[2], 1)


def _k_affine(quants: Bytes, meta: Bytes) -> Floats:
    scales, minima = k_scales(meta[:, 4:16])
    step = (_half(meta) * scales.astype(np.float32))[:, :, None]
    low = (_half(meta, 1) * minima.astype(np.float32))[:, :, None]
    return (step * quants.reshape(-1, 8, 32).astype(np.float32) - low).reshape(-1, 256)


def _q4k(planes: list[Bytes]) -> Floats:
    return _k_affine(unpack_nibbles(planes[0]), planes[1])


def _q5k(planes: list[Bytes]) -> Floats:
    return _k_affine(_five(planes), planes[2])


def _q6k(planes: list[Bytes]) -> Floats:
    quants = unpack_nibbles(planes[0]) | (_unpack_pairs(planes[1]) << np.uint8(4))
    step = (_half(planes[3]) * planes[2].view(np.int8).astype(np.float32))[:, :, None]
    return (step * _signed(quants, 32).reshape(-1, 16, 16)).reshape(-1, 256)


_TO_FLOATS: dict[int, Callable[[list[Bytes]], Floats]] = {
    2: _int8,
    3: _int4,
    4: _int4m,
    5: _q5,
    6: _q5m,
    7: _q4k,
    8: _q5k,
    9: _q6k,
}


def to_floats(fmt: WeightFormat, planes: list[Bytes]) -> Floats:
    """The weights of blocks, float32 `[n, fmt.block]`; one uint8 array `[n, bytes]` a plane."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _TO_FLOATS[fmt.number](planes)


def unpack(
    fmt: WeightFormat,
    data: Bytes,
    shape: tuple[int, ...],
    start: int = 0,
    stop: int | None = None,
) -> Floats:
    """Rows of a weight as float32, from its bytes."""
    stop = shape[0] if stop is None else stop
    inner = int(np.prod(shape[1:], dtype=np.int64))
    result = (stop - start, *shape[1:])
    if not fmt.quantised:
        width = inner * fmt.planes[0]
        raw = np.ascontiguousarray(data[start * width : stop * width])
        if fmt.name == "bf16":
            return (
                (raw.view("<u2").astype(np.uint32) << np.uint32(16))
                .view(np.float32)
                .reshape(result)
            )
        return raw.view("<f4" if fmt.name == "fp32" else "<f2").astype(np.float32).reshape(result)
    blocks = inner // fmt.block
    bases = np.cumsum([0, *fmt.plane_sizes(shape)]).tolist()
    planes = []
    for size, base in zip(fmt.planes, bases, strict=False):
        plane = data[base + start * blocks * size : base + stop * blocks * size]
        planes.append(np.ascontiguousarray(plane).reshape(-1, size))
    values = to_floats(fmt, planes).reshape(result)
    if fmt.outliers:
        width = 2 * fmt.outliers
        more = data[bases[-3] + start * width : bases[-3] + stop * width].tobytes()
        columns = np.frombuffer(data[bases[-2] :][: 4 * fmt.outliers].tobytes(), "<u4")
        values[:, columns] += np.frombuffer(more, "<f2").reshape(-1, fmt.outliers)
    return values
