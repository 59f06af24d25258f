"""Parses ONNX files without copying their weights.

Protobuf copies every byte of a message, and Python's copies them again when a field is read: a
file with its weights inline would be in memory twice over. So large `raw_data` fields are cut out
of the bytes first, and replaced by references to external data that lie in the file itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError
from hornito.importers.source import map_file

INLINE = "\0inline"
"""The location of data that lie in the model's own file; no path has such a name."""

#: Fields shorter than this are left to protobuf.
THRESHOLD = 4096
MAX_DEPTH = 64

_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _FUNCTION, _TENSOR = range(6)
#: Of onnx.proto: by message, the fields that may hold tensors, and which message each is.
_FIELDS = {
    _MODEL: {7: _GRAPH, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _TENSOR},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
}
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14

Bytes = npt.NDArray[np.uint8]


def parse_file(path: Path, proto: Any) -> None:
    """Parse a file into an empty ModelProto; large tensors refer to the file by `INLINE`.

    Raises:
        FormatError: it is no ONNX file.
    """
    data = map_file(path)
    try:
        proto.ParseFromString(b"".join(_message(data, 0, data.nbytes, _MODEL, 0)))
    except Exception as error:  # protobuf has several classes for this, by implementation
        raise FormatError(f"{path}: not an ONNX file: {str(error)[:200]}") from error


def _message(data: Bytes, start: int, stop: int, kind: int, depth: int) -> Iterator[bytes]:
    """A message's bytes, with its large tensors referred to."""
    if depth > MAX_DEPTH:
        raise ValueError(f"messages nest deeper than {MAX_DEPTH}")
    fields = _FIELDS[kind]
    copied = start
    for field, begin, body, end in _parts(data, start, stop):
        inner = fields.get(field)
        if inner is None or end - body < THRESHOLD:
            continue
        yield data[copied:begin].tobytes()
        copied = end
        if inner == _TENSOR:
            parts = [_tensor(data, body, end)]
        else:
            parts = list(_message(data, body, end, inner, depth + 1))
        yield _varint(field << 3 | 2) + _varint(sum(map(len, parts)))
        yield from parts
    yield data[copied:stop].tobytes()


def _tensor(data: Bytes, start: int, stop: int) -> bytes:
    """A TensorProto's bytes, with its data referred to."""
    raw: list[tuple[int, int, int]] = []
    for field, begin, body, end in _parts(data, start, stop):
        if field in (_EXTERNAL_DATA, _DATA_LOCATION):
            return data[start:stop].tobytes()
        if field == _RAW_DATA:
            raw.append((begin, body, end))
    # Of a field that is given twice, the last one counts.
    if not raw or raw[-1][2] - raw[-1][1] < THRESHOLD:
        return data[start:stop].tobytes()
    kept, copied = [], start
    for begin, _, end in raw:
        kept.append(data[copied:begin].tobytes())
        copied = end
    kept.append(data[copied:stop].tobytes())
    _, body, end = raw[-1]
    facts = {"location": INLINE, "offset": str(body), "length": str(end - body)}
    for key, value in facts.items():
        entry = _text(1, key) + _text(2, value)
        kept.append(_varint(_EXTERNAL_DATA << 3 | 2) + _varint(len(entry)) + entry)
    kept.append(_varint(_DATA_LOCATION << 3) + _varint(1))
    return b"".join(kept)


def _parts(data: Bytes, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Fields of a message that have a length: number, begin, begin of the content, end."""
    at = start
    while at < stop:
        begin = at
        tag, at = _read_varint(data, at, stop)
        wire = tag & 7
        if wire == 0:
            _, at = _read_varint(data, at, stop)
        elif wire == 2:
            size, at = _read_varint(data, at, stop)
            if size > stop - at:
                raise ValueError(f"a field of {size} bytes at byte {begin}, {stop - at} are left")
            yield tag >> 3, begin, at, at + size
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field of wire type {wire} at byte {begin}")
    if at > stop:
        raise ValueError(f"a field ends at byte {at}, its message at byte {stop}")


def _read_varint(data: Bytes, at: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while at < stop and shift < 70:
        byte = int(data[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError(f"a number without end at byte {at}")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _text(field: int, text: str) -> bytes:
    encoded = text.encode()
    return _varint(field << 3 | 2) + _varint(len(encoded)) + encoded
