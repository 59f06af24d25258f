"""Weights must be finite: a NaN or an infinity in a checkpoint is damage, which is told by name."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hornito.errors import FormatError
from hornito.graph.weights import (
    FloatArray,
    InterleavedData,
    ReorderedData,
    ShiftedData,
    SlicedData,
    StackedData,
    TransposedData,
    WeightData,
    row_blocks,
)


def finite_rows(data: WeightData, start: int, stop: int) -> FloatArray:
    """Rows `[start, stop)` of a weight, of a vector its elements.

    Raises:
        FormatError: one of their numbers is not finite; see `not_finite`.
    """
    with np.errstate(all="ignore"):  # what a source makes of such numbers needs no warning
        x = data.rows(start, stop)
    if not np.isfinite(x).all():
        raise not_finite(data)
    return x


def not_finite(data: WeightData) -> FormatError:
    """What is wrong with a weight that is not finite: the first such tensor of its source, with the
    first row and the number. Reads the weight again from its beginning."""
    for tensor in (*_tensors(data), data):
        for start, stop in row_blocks(tensor.shape):
            with np.errstate(all="ignore"):
                x = tensor.rows(start, stop)
            finite = np.isfinite(x)
            if not finite.all():
                row, *column = np.argwhere(~finite)[0].tolist()
                place = f"row {start + row}, column {column[0]}" if column else f"[{start + row}]"
                return FormatError(
                    f"tensor {_name(tensor)} holds {x[row, *column]} at {place}: the checkpoint is "
                    "damaged, or its training had diverged. Weights must be finite; get the file "
                    "again, or repair the tensor"
                )
    return FormatError(f"tensor {_name(data)} holds numbers that are not finite")


def _tensors(data: WeightData) -> Iterator[WeightData]:
    """What a weight is made of, as the source has it."""
    match data:
        case StackedData():
            for part in data.parts:
                yield from _tensors(part)
        case InterleavedData():
            yield from _tensors(data.even)
            yield from _tensors(data.odd)
        case SlicedData() | ReorderedData() | TransposedData() | ShiftedData():
            yield from _tensors(data.base)
        case _:
            yield data


def _name(data: WeightData) -> str:
    return " + ".join(data.source_names) or f"of shape {list(data.shape)}"
