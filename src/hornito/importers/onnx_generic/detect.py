"""Which ONNX models are decoders with a cache, and which take the generic way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hornito.importers.onnx.folder import find_model, has_onnx
from hornito.importers.onnx.reader import import_onnx
from hornito.importers.onnx.wire import parse_file

_CACHE_INPUTS = ("past", "cache")
_CACHE_OUTPUTS = ("present", "past")


def generic_file(path: Path) -> tuple[Path, Any] | None:
    """The ONNX file of a path and its parsed proto, unless it is no ONNX or a decoder.

    A decoder names a cache among its inputs or outputs, or has the file name of one; those are for
    `hornito.importers.onnx`, which knows what a cache means, or says that it is missing.

    Raises:
        UsageError: the `onnx` package is missing.
        FormatError: the file is no ONNX file.
    """
    if path.is_dir():
        if any(path.glob("*.safetensors")) or not has_onnx(path):
            return None
        path = find_model(path).model
    elif path.suffix != ".onnx" or not path.is_file():
        return None
    if path.name.startswith("decoder"):
        return None
    proto = import_onnx().ModelProto()
    parse_file(path, proto)
    graph = proto.graph
    cached = any(word in i.name for i in graph.input for word in _CACHE_INPUTS)
    cached = cached or any(word in o.name for o in graph.output for word in _CACHE_OUTPUTS)
    return None if cached else (path, proto)
