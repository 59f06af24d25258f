"""The safetensors container, mapped: names, types and places of the tensors of one file.

Read here rather than through the library so that tensors stay views of the mapping, in every
dtype, and so that a damaged header ends in an error that names the tensor.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError, UnsupportedError
from hornito.importers.source import map_file
from hornito.quant.ggml import BlockFormat, format_by_name

#: The format's own limit on the header.
MAX_HEADER_BYTES = 100_000_000
FLOAT_TYPES = ("F32", "F16", "BF16")
_ITEM_BYTES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
    **{"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4},
    **{"F64": 8, "I64": 8, "U64": 8, "C64": 8},
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """An entry of a safetensors file; `data` is a view of its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    data: npt.NDArray[np.uint8]

    def float_format(self) -> BlockFormat:
        """The storage format of a weight; UnsupportedError when it is no float type we read."""
        if self.dtype not in FLOAT_TYPES:
            raise UnsupportedError(
                f"{self.file}: tensor '{self.name}' has the type {self.dtype}, which is not "
                f"supported for weights. Supported: {' '.join(FLOAT_TYPES)}"
            )
        return format_by_name(self.dtype)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"'{double}' stands there twice")
    return table


def parse_json(raw: bytes, what: str) -> Any:
    """Parse JSON from outside; FormatError names `what`. Duplicate keys are an error."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not valid JSON: {error}") from error


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(
    path: Path, name: str, raw: Any, body: npt.NDArray[np.uint8]
) -> tuple[int, int, StoredTensor]:
    where = f"{path}: tensor '{name}'"
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: its header entry must hold dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise FormatError(f"{where}: bad shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise FormatError(f"{where}: bad data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    if not begin <= end <= body.nbytes:
        raise FormatError(
            f"{where}: truncated or inconsistent: it lies at bytes {begin} to {end} of the data, "
            f"which has {body.nbytes}"
        )
    item = _ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item is None:
        raise UnsupportedError(f"{where}: unknown dtype {str(dtype)[:40]}")
    if math.prod(shape) * item != end - begin:
        raise FormatError(
            f"{where}: shape {tuple(shape)} {dtype} takes {math.prod(shape) * item} bytes, "
            f"its data has {end - begin}"
        )
    stored = StoredTensor(name, tuple(shape), dtype, str(path), body[begin:end])
    return begin, end, stored


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Parse the header of a safetensors file and map its tensors; nothing of them is read.

    Raises:
        FormatError: truncated or inconsistent; names the file and the tensor.
        UnsupportedError: a dtype that the format does not know.
    """
    data = map_file(path)
    if data.nbytes < 8:
        raise FormatError(f"{path}: truncated: {data.nbytes} bytes hold no safetensors header")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(MAX_HEADER_BYTES, data.nbytes - 8):
        raise FormatError(
            f"{path}: truncated or not safetensors: its header claims {length} bytes, "
            f"{data.nbytes - 8} follow"
        )
    header = parse_json(data[8 : 8 + length].tobytes(), f"{path}: header")
    if not isinstance(header, dict):
        raise FormatError(f"{path}: header: not a JSON object")
    header.pop("__metadata__", None)
    body = data[8 + length :]
    placed = [_entry(path, name, raw, body) for name, raw in header.items()]
    at, previous = 0, "the header"
    for begin, end, stored in sorted(placed, key=lambda item: item[:2]):
        if begin != at:
            kind = "overlaps" if begin < at else "leaves a hole after"
            raise FormatError(f"{path}: tensor '{stored.name}' {kind} {previous}")
        at, previous = end, f"tensor '{stored.name}'"
    if at != body.nbytes:
        raise FormatError(f"{path}: {body.nbytes - at} bytes follow the last tensor")
    return {stored.name: stored for _, _, stored in placed}
