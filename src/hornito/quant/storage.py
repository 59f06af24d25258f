"""Writing weights in their storage type, and reading them back, in blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError
from hornito.graph.finite import finite_rows, not_finite
from hornito.graph.weights import WeightData, row_blocks, stored_as, stored_rows
from hornito.parallel import Workers
from hornito.quant.formats import Bytes, Floats, WeightFormat
from hornito.quant.ggml import format_by_name
from hornito.quant.matrix import quantised_bytes
from hornito.quant.planes import from_blocks, unpack
from hornito.quant.rounding import to_half

CONVERTED_AT_ONCE = 3
"""Blocks of rows: three threads convert to fp16 as fast as one hashes."""

__all__ = ["PackedData", "holds_exactly", "pack", "plain", "unpack"]


def pack(
    fmt: WeightFormat, data: WeightData, workers: Workers | None = None
) -> Iterator[memoryview]:
    """The bytes of a weight, piece by piece.

    A matrix that the source holds in the format's own blocks is repacked, others are rounded by
    their weights alone. The body of a repacked matrix leaves as it is made; its smaller planes are
    held until the end. A piece does not change afterwards.

    Args:
        workers: whose threads round and convert; None for some of the matrix' own, and to convert
            in this thread.

    Raises:
        FormatError: a number, or a scale of a block, is not finite.
    """
    if isinstance(data, PackedData) and data.fmt == fmt:
        yield data.read()
    elif not fmt.quantised:
        convert = partial(_plain_rows, fmt, data)
        blocks = row_blocks(data.shape)
        yield from (
            map(convert, blocks)
            if workers is None
            else workers.in_order(convert, blocks, CONVERTED_AT_ONCE)
        )
    elif holds_exactly(fmt, data):
        yield from _repacked(fmt, data)
    else:
        yield quantised_bytes(fmt, data, workers).data


def _plain_rows(fmt: WeightFormat, data: WeightData, rows: tuple[int, int]) -> memoryview:
    return np.ascontiguousarray(plain(fmt, finite_rows(data, *rows))).data.cast("B")


def holds_exactly(fmt: WeightFormat, data: WeightData) -> bool:
    """Whether a format takes a matrix as its source holds it."""
    if isinstance(data, PackedData):
        return data.fmt == fmt
    return bool(fmt.ggml) and stored_as(data) == fmt.ggml


def _repacked(fmt: WeightFormat, data: WeightData) -> Iterator[memoryview]:
    sizes = fmt.plane_sizes(data.shape)
    written = 0
    later: list[list[Bytes]] = []
    for start, stop in row_blocks(data.shape):
        rows = stored_rows(data, start, stop).reshape(-1, format_by_name(fmt.ggml).nbytes)
        body, *rest = from_blocks(fmt, rows)
        if not _finite_scales(rest[-1]):
            raise not_finite(data)
        written += body.nbytes
        later.append(rest)
        yield body.data.cast("B")
    yield memoryview(bytes(sizes[0] - written))
    for index, size in enumerate(sizes[1:]):
        plane = np.concatenate([rest[index].reshape(-1) for rest in later])
        yield plane.data.cast("B")
        yield memoryview(bytes(size - plane.nbytes))


def _finite_scales(plane: Bytes) -> bool:
    """Whether the fp16 numbers of GGUF's blocks are finite, which their last plane, uint8
    `[n, bytes]`, begins with: one, or two in four bytes or more."""
    halves = np.ascontiguousarray(plane[:, :4]).view("<u2")
    return bool(((halves & np.uint16(0x7C00)) != 0x7C00).all())


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
        sources: the tensors of the source that it was made of, when it is not one itself.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        fmt: WeightFormat,
        read: Callable[[], memoryview],
        *,
        sources: tuple[str, ...] | None = None,
    ) -> None:
        self.shape = shape
        self.source_names = (name,) if sources is None else sources
        self.fmt = fmt
        self._name = name
        self._read = read

    def read(self) -> memoryview:
        """Its bytes."""
        data = self._read()
        if len(data) != self.fmt.nbytes(self.shape):
            raise FormatError(
                f"weight {self._name}: {len(data)} bytes, but {self.fmt.name} {self.shape} takes "
                f"{self.fmt.nbytes(self.shape)}"
            )
        return data

    def rows(self, start: int, stop: int) -> Floats:
        """Rows `start` to `stop` (exclusive), of a vector its elements."""
        data = np.frombuffer(self.read(), np.uint8)
        return unpack(self.fmt, data, self.shape, start, stop)
