"""Initialisers of ONNX files as views: inline or in external files, in every type that is used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError, UnsupportedError
from hornito.graph.weights import FloatArray
from hornito.importers.onnx.values import Array, Const, widen
from hornito.importers.onnx.wire import INLINE
from hornito.importers.source import map_file

#: Data types of TensorProto: numpy's type, and the bits of an element.
_TYPES: dict[int, tuple[str, int]] = {
    1: ("<f4", 32),
    2: ("u1", 8),
    3: ("i1", 8),
    4: ("<u2", 16),
    5: ("<i2", 16),
    6: ("<i4", 32),
    7: ("<i8", 64),
    9: ("?", 8),
    10: ("<f2", 16),
    11: ("<f8", 64),
    12: ("<u4", 32),
    13: ("<u8", 64),
    16: ("<u2", 16),
    21: ("u1", 4),
    22: ("i1", 4),
}
BF16 = 16
_NAMES = {8: "STRING", 14: "COMPLEX64", 15: "COMPLEX128", 17: "FLOAT8", 18: "FLOAT8", 23: "FLOAT4"}
#: Field of TensorProto that holds the values when they are not raw bytes.
_FIELDS = {
    1: "float_data",
    7: "int64_data",
    11: "double_data",
    12: "uint64_data",
    13: "uint64_data",
}
MAX_RANK = 16


class TensorReader:
    """Reads the tensors of one model; `files` lists the external files that it mapped."""

    def __init__(self, path: Path, onnx: Any) -> None:
        self.path = path
        self.folder = path.parent
        self.files: set[str] = set()
        self._external = onnx.TensorProto.EXTERNAL
        self._maps: dict[str, npt.NDArray[np.uint8]] = {}

    def const(self, tensor: Any, name: str = "") -> Const:
        """The tensor as a constant; data in files stay mapped.

        Raises:
            FormatError: its data are missing, short or do not fit its shape.
            UnsupportedError: a type that no decoder uses.
        """
        label = tensor.name or name
        shape = tuple(int(d) for d in tensor.dims)
        where = f"{self.path}: tensor {label!r}"
        if len(shape) > MAX_RANK or any(d < 0 for d in shape):
            raise FormatError(f"{where}: bad shape {shape[:MAX_RANK]}")
        if tensor.data_type not in _TYPES:
            kind = _NAMES.get(tensor.data_type, str(tensor.data_type))
            raise UnsupportedError(f"{where}: type {kind} is not supported")
        dtype, bits = _TYPES[tensor.data_type]
        size = math.prod(shape)
        nbytes = -(-size * bits // 8)
        if tensor.data_location == self._external:
            data: Array = self._external_bytes(tensor, label, nbytes)
        elif tensor.HasField("raw_data") or size == 0:
            data = np.frombuffer(tensor.raw_data, np.uint8)
        else:
            return self._typed(tensor, where, shape, dtype, bits, label)
        if data.nbytes != nbytes:
            raise FormatError(
                f"{where}: shape {shape} takes {nbytes} bytes, its data has {data.nbytes}"
            )
        array = _unpacked(data, dtype, size) if bits == 4 else data.view(dtype)
        sources = (tensor.name,) if tensor.name else ()
        return Const(array.reshape(shape), sources, tensor.data_type == BF16)

    def _typed(
        self, tensor: Any, where: str, shape: tuple[int, ...], dtype: str, bits: int, label: str
    ) -> Const:
        """Values in a repeated field of the message; small types are stored as int32."""
        values = getattr(tensor, _FIELDS.get(tensor.data_type, "int32_data"))
        size = math.prod(shape)
        count = -(-size * bits // 8) if bits == 4 else size
        if len(values) != count:
            raise FormatError(
                f"{where}: shape {shape} asks for {count} values, {len(values)} there"
            )
        if tensor.data_type == 10:
            array: Array = np.asarray(values, np.uint16).view(np.float16)
        elif bits == 4:
            array = _unpacked(np.asarray(values, np.uint8), dtype, size)
        else:
            array = np.asarray(values).astype(dtype)
        sources = (tensor.name,) if tensor.name else ()
        return Const(array.reshape(shape), sources, tensor.data_type == BF16)

    def _external_bytes(self, tensor: Any, label: str, nbytes: int) -> npt.NDArray[np.uint8]:
        facts = {entry.key: entry.value for entry in tensor.external_data}
        location = facts.get("location", "")
        inline = location == INLINE
        where = f"{self.path}: tensor {label!r}: external data"
        parts = PurePosixPath(location.replace("\\", "/"))
        outside = parts.is_absolute() or ".." in parts.parts or ":" in location
        if (outside and not inline) or not location:
            raise FormatError(f"{where}: location {location[:120]!r} leaves the model's directory")
        try:
            offset, length = int(facts.get("offset", 0)), int(facts.get("length", nbytes))
        except ValueError as error:
            raise FormatError(f"{where}: bad offset or length: {error}") from error
        data = self._mapped(location, where)
        if length != nbytes and not inline:  # of inline data, the caller says it
            raise FormatError(f"{where}: {length} bytes are stated, its shape takes {nbytes}")
        if offset < 0 or length < 0 or offset + length > data.nbytes:
            raise FormatError(
                f"{where}: it lies at bytes {offset} to {offset + length} of {location}, which is "
                f"truncated: it has {data.nbytes}"
            )
        return data[offset : offset + length]

    def _mapped(self, location: str, where: str) -> npt.NDArray[np.uint8]:
        if location == INLINE and location not in self._maps:
            self._maps[location] = map_file(self.path)
        elif location not in self._maps:
            file = self.folder / location
            try:
                there = file.is_file()
            except OSError as error:  # a name that no file can have
                raise FormatError(f"{where}: {location[:120]!r}: {error.strerror}") from error
            if not there:
                raise FormatError(f"{where}: the file {file} is missing")
            self._maps[location] = map_file(file)
            self.files.add(location)
        return self._maps[location]


def _unpacked(data: npt.NDArray[np.uint8], dtype: str, size: int) -> Array:
    """Two 4-bit numbers a byte, the low one first."""
    low, high = data & 15, data >> 4
    both = np.stack([low, high], axis=-1).reshape(-1)[:size]
    if dtype == "i1":
        return (both.astype(np.int8) ^ 8) - 8
    return both


@dataclass(frozen=True, slots=True, eq=False)
class ViewData:
    """Weight data that are a view of the file (or a small computed array)."""

    array: Array
    source_names: tuple[str, ...]
    bf16: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def rows(self, start: int, stop: int) -> FloatArray:
        part = self.array[start:stop]
        return widen(part) if self.bf16 else part.astype(np.float32)


def as_weight(value: Const) -> ViewData:
    """A constant as weight data."""
    return ViewData(value.array, value.sources, value.bf16)
