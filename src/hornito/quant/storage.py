"""Writing weights in their storage type, and reading them back, in blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError
from hornito.graph.weights import WeightData, row_blocks, stored_as, stored_rows
from hornito.quant.formats import Bytes, Floats, WeightFormat, aligned
from hornito.quant.ggml import format_by_name
from hornito.quant.planes import from_blocks, to_floats
from hornito.quant.rounding import quantise, to_half


def pack(fmt: WeightFormat, data: WeightData) -> Iterator[memoryview]:
    """The bytes of a weight, piece by piece.

    Rows that the source holds in the format's own blocks are repacked, others are rounded. The
    body of a quantised matrix leaves as it is made; its smaller planes are held until the end.
    """
    if not fmt.quantised:
        for start, stop in row_blocks(data.shape):
            yield np.ascontiguousarray(plain(fmt, data.rows(start, stop))).data.cast("B")
        return
    sizes = fmt.plane_sizes(data.shape)
    written = 0
    later: list[list[Bytes]] = []
    for start, stop in row_blocks(data.shape):
        body, *rest = _planes(fmt, data, start, stop)
        written += body.nbytes
        later.append(rest)
        yield body.data.cast("B")
    yield memoryview(bytes(sizes[0] - written))
    for index, size in enumerate(sizes[1:]):
        plane = np.concatenate([rest[index].reshape(-1) for rest in later])
        yield plane.data.cast("B")
        yield memoryview(bytes(size - plane.nbytes))


def _planes(fmt: WeightFormat, data: WeightData, start: int, stop: int) -> list[Bytes]:
    if fmt.ggml and stored_as(data) == fmt.ggml:
        blocks = stored_rows(data, start, stop).reshape(-1, format_by_name(fmt.ggml).nbytes)
        return from_blocks(fmt, blocks)
    return quantise(fmt, data.rows(start, stop))


def plain(fmt: WeightFormat, values: Floats) -> npt.NDArray[Any]:
    """fp32 values as `fp32`, `fp16` or `bf16` (its bits as uint16): rounded to nearest even, and
    fp16 saturates."""
    if fmt.name == "fp32":
        return values.astype("<f4", copy=False)
    if fmt.name == "fp16":
        return to_half(values)
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(
        16
    )
    quiet = (words >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype("<u2")


class PackedData:
    """A stored weight as `WeightData`: rows are converted to fp32 when they are asked for.

    Args:
        name: of the weight.
        shape: of the weight.
        fmt: how `read` gives it.
        read: its bytes.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], fmt: WeightFormat, read: Callable[[], memoryview]
    ) -> None:
        self.shape = shape
        self.source_names = (name,)
        self._name = name
        self._fmt = fmt
        self._read = read

    def rows(self, start: int, stop: int) -> Floats:
        """Rows `start` to `stop` (exclusive), of a vector its elements."""
        data = np.frombuffer(self._read(), np.uint8)
        if len(data) != self._fmt.nbytes(self.shape):
            raise FormatError(
                f"weight {self._name}: {len(data)} bytes, but {self._fmt.name} {self.shape} takes "
                f"{self._fmt.nbytes(self.shape)}"
            )
        return unpack(self._fmt, data, self.shape, start, stop)


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
    planes, base = [], 0
    for size in fmt.planes:
        plane = data[base + start * blocks * size : base + stop * blocks * size]
        planes.append(np.ascontiguousarray(plane).reshape(-1, size))
        base += aligned(shape[0] * blocks * size)
    return to_floats(fmt, planes).reshape(result)
