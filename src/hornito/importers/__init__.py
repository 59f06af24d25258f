"""Importers: published checkpoints as a `Source`, whatever their format. They touch no GPU."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Collection
from pathlib import Path

from hornito.errors import UnsupportedError, UsageError
from hornito.importers.source import LazyTensor, Source
from hornito.progress import Progress

__all__ = ["LazyTensor", "Source", "open_source", "supported_model_types"]

_FORMATS = (
    "a Hornito package (.vxm), a GGUF file, a Hugging Face directory with config.json, safetensors "
    "and tokenizer.json, or an ONNX decoder (a file, or the directory of an export)"
)


def supported_model_types() -> tuple[str, ...]:
    """Model types that Hornito can build: the modules of `hornito.models`, sorted."""
    import hornito.models

    found = pkgutil.iter_modules(hornito.models.__path__)
    return tuple(sorted(m.name for m in found if not m.name.startswith("_")))


def open_source(
    path: str | os.PathLike[str],
    supported: Collection[str] | None = None,
    progress: Progress | None = None,
) -> Source:
    """Open a checkpoint by its content; no weight is read.

    Args:
        path: a GGUF file, a Hugging Face directory (or its config.json or weights file), or an ONNX
            file or directory.
        supported: model types to accept; all that Hornito can build when None.
        progress: told about the nodes of an ONNX file.

    Raises:
        UsageError: there is nothing at `path`.
        UnsupportedError: neither format, or a model that Hornito can't build.
        FormatError: truncated or inconsistent; names the file and tensor.
    """
    where = Path(path)
    accepted = supported_model_types() if supported is None else supported
    if not where.exists():
        raise UsageError(f"{where}: no such file or directory. Supported: {_FORMATS}")
    if where.is_file() and where.name in ("config.json", "model.safetensors"):
        where = where.parent
    if where.is_dir():
        if _is_onnx_folder(where):
            from hornito.importers.onnx import open_onnx

            return open_onnx(where, progress)
        if not (where / "config.json").exists():
            files = sorted(p.name for p in where.glob("*.gguf"))
            hint = f" Did you mean {where / files[0]}?" if files else ""
            raise UnsupportedError(
                f"{where}: a directory without config.json. Supported: {_FORMATS}.{hint}"
            )
        from hornito.importers.safetensors import open_directory

        return open_directory(where, accepted)
    with where.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        from hornito.importers.gguf import open_gguf

        return open_gguf(where, accepted)
    # Protobuf has no magic number; an ONNX file begins with field 1, its IR version.
    if where.suffix == ".onnx" or (len(magic) > 2 and magic[0] == 8 and magic[2] in (0x12, 0x3A)):
        from hornito.importers.onnx import open_onnx

        return open_onnx(where, progress)
    raise UnsupportedError(
        f"{where}: of no known format (it starts with {magic.hex()}). Supported: {_FORMATS}"
    )


def _is_onnx_folder(folder: Path) -> bool:
    """Whether a directory holds an ONNX export and no safetensors, which are the first choice."""
    if any(folder.glob("*.safetensors")):
        return False
    return any(folder.glob("*.onnx")) or any((folder / "onnx").glob("*.onnx"))
