"""The GGUF container (versions 2 and 3): metadata and where each tensor lies.

Every count, length, dimension and offset comes from the file and is checked against the file's
size before it is used, so a damaged or hostile file ends in a FormatError and never in a large
allocation or a read outside the mapping.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError, UnsupportedError
from hornito.importers.source import map_file
from hornito.quant.ggml import GGML_TYPE_NAMES, GGML_TYPES, BlockFormat

MAGIC = b"GGUF"
MAX_DIMS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, tuple[str, int]] = {
    0: ("<B", 1),
    1: ("<b", 1),
    2: ("<H", 2),
    3: ("<h", 2),
    4: ("<I", 4),
    5: ("<i", 4),
    6: ("<f", 4),
    7: ("<?", 1),
    10: ("<Q", 8),
    11: ("<q", 8),
    12: ("<d", 8),
}
_ARRAY_DTYPES = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor entry: `shape` is in numpy order, `data` a view of its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    fmt: BlockFormat
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed GGUF file.

    Attributes:
        path: where it lies.
        version: 2 or 3.
        metadata: keys to values; number arrays are numpy arrays, string arrays lists of str.
        tensors: in the file's order.
    """

    path: str
    version: int
    metadata: Mapping[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """A reading position in the mapped file; every step is checked against the end."""

    def __init__(self, data: npt.NDArray[np.uint8], path: str) -> None:
        self.view = memoryview(data.data)
        self.path = path
        self.size = len(self.view)
        self.at = 0

    def fail(self, what: str) -> FormatError:
        return FormatError(f"{self.path}: {what} (at byte {self.at} of {self.size})")

    def take(self, count: int, what: str) -> memoryview:
        if count > self.size - self.at:
            raise self.fail(
                f"truncated or inconsistent: {what} needs {count} bytes, "
                f"{self.size - self.at} are left"
            )
        piece = self.view[self.at : self.at + count]
        self.at += count
        return piece

    def number(self, code: str, size: int, what: str) -> Any:
        return struct.unpack(code, self.take(size, what))[0]

    def u32(self, what: str) -> int:
        return int(self.number("<I", 4, what))

    def u64(self, what: str) -> int:
        return int(self.number("<Q", 8, what))

    def count(self, what: str, unit_bytes: int) -> int:
        """A number of things of at least `unit_bytes` each that must still fit the file."""
        value = self.u64(what)
        if value * unit_bytes > self.size - self.at:
            raise self.fail(
                f"truncated or inconsistent: {what} is {value}, which can't fit the "
                f"{self.size - self.at} bytes that are left"
            )
        return value

    def text(self, what: str, errors: str = "strict") -> str:
        length = self.count(f"length of {what}", 1)
        raw = bytes(self.take(length, what))
        try:
            return raw.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not valid UTF-8") from error


def _read_array(cursor: _Cursor, key: str) -> Any:
    element = cursor.u32(f"element type of {key}")
    if element == _STRING:
        total = cursor.count(f"length of {key}", 8)
        return [cursor.text(f"{key}[{i}]") for i in range(total)]
    dtype = _ARRAY_DTYPES.get(element)
    if dtype is None:
        raise cursor.fail(f"{key} is an array of unknown element type {element}")
    item = np.dtype(dtype).itemsize
    total = cursor.count(f"length of {key}", item)
    values = np.frombuffer(cursor.take(total * item, key), dtype=dtype)
    return values.astype(np.bool_) if element == _BOOL else values


def _read_value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.u32(f"type of {key}")
    if kind == _STRING:
        # Tokenizer data must be exact; a broken author's name is no reason to refuse a model.
        return cursor.text(key, "strict" if key.startswith("tokenizer.") else "replace")
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.fail(f"{key} has the unknown type {kind}")
    code, size = _SCALARS[kind]
    return cursor.number(code, size, key)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


def _read_entry(cursor: _Cursor) -> _Entry:
    name = cursor.text("a tensor's name")
    what = f"tensor '{name}'"
    n_dims = cursor.u32(f"number of dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fail(f"{what} has {n_dims} dimensions; GGUF allows 1 to {MAX_DIMS}")
    dims = [cursor.u64(f"dimension {i} of {what}") for i in range(n_dims)]
    type_id = cursor.u32(f"type of {what}")
    offset = cursor.u64(f"offset of {what}")
    return _Entry(name, tuple(reversed(dims)), type_id, offset)


def _place(cursor: _Cursor, entry: _Entry, start: int, data: npt.NDArray[np.uint8]) -> GGUFTensor:
    """Check an entry against the file and cut its bytes out of the mapping."""
    what = f"tensor '{entry.name}'"
    fmt = GGML_TYPES.get(entry.type_id)
    if fmt is None:
        found = GGML_TYPE_NAMES.get(entry.type_id, f"number {entry.type_id}, unknown to ggml")
        known = " ".join(f.name for f in GGML_TYPES.values())
        raise UnsupportedError(
            f"{cursor.path}: {what} has the type {found}, which is not supported. "
            f"Supported types: {known}"
        )
    if min(entry.shape) < 1:
        raise cursor.fail(f"{what} has an empty shape {entry.shape}")
    if entry.shape[-1] % fmt.block:
        raise cursor.fail(
            f"{what} of type {fmt.name} has rows of {entry.shape[-1]} values, "
            f"no multiple of its block of {fmt.block}"
        )
    nbytes = math.prod(entry.shape) // fmt.block * fmt.nbytes
    if entry.offset + nbytes > cursor.size - start:
        raise cursor.fail(
            f"truncated or inconsistent: {what} {entry.shape} {fmt.name} needs bytes "
            f"{start + entry.offset} to {start + entry.offset + nbytes}"
        )
    begin = start + entry.offset
    return GGUFTensor(entry.name, entry.shape, fmt, data[begin : begin + nbytes])


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
        raise cursor.fail(f"general.alignment is {value!r}, not a power of two")
    return value


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file and map its tensors; nothing of them is read.

    Raises:
        FormatError: not a GGUF file, truncated, or inconsistent; names the key or tensor.
        UnsupportedError: a version, byte order or tensor type that Hornito does not read.
    """
    data = map_file(path)
    cursor = _Cursor(data, str(path))
    if bytes(cursor.take(4, "the magic number")) != MAGIC:
        raise cursor.fail("not a GGUF file: it does not start with 'GGUF'")
    version = cursor.u32("the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        note = " (big-endian file)" if swapped in (2, 3) else ""
        raise UnsupportedError(
            f"{path}: GGUF version {version}{note} is not supported; supported: 2 and 3, "
            "little-endian. Convert the checkpoint again with a current converter."
        )
    tensor_count = cursor.count("the number of tensors", _MIN_TENSOR_BYTES)
    key_count = cursor.count("the number of metadata keys", _MIN_KEY_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise cursor.fail(f"the key {key} stands there twice")
        metadata[key] = _read_value(cursor, key)
    entries = [_read_entry(cursor) for _ in range(tensor_count)]
    alignment = _alignment(cursor, metadata)
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    end, previous = 0, ""
    for entry in sorted(entries, key=lambda e: e.offset):
        if entry.name in tensors:
            raise cursor.fail(f"tensor '{entry.name}' stands there twice")
        if entry.offset % alignment:
            raise cursor.fail(
                f"tensor '{entry.name}' starts at offset {entry.offset}, "
                f"no multiple of the alignment {alignment}"
            )
        if entry.offset < end:
            raise cursor.fail(f"tensor '{entry.name}' overlaps tensor '{previous}'")
        tensor = _place(cursor, entry, start, data)
        tensors[entry.name] = tensor
        end, previous = entry.offset + int(tensor.data.nbytes), entry.name
    ordered = {entry.name: tensors[entry.name] for entry in entries}
    return GGUFFile(str(path), version, metadata, ordered)
