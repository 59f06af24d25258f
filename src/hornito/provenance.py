"""Which source a package was made of: its hash in the package, its place in the cache.

A package never holds a path: it would be another package in another folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hornito.vk.pipeline import cache_directory

log = logging.getLogger("hornito")

_PARTS = (".gguf", ".safetensors", ".json", ".onnx", ".onnx_data", ".data", ".bin", ".jinja")


def source_files(path: Path) -> list[Path]:
    """The files that a source is made of. Weights and config of an ONNX file lie beside it."""
    if path.suffix == ".onnx":
        folders = [path.parent]
    elif path.is_dir():
        folders = [path, path / "onnx"]
    else:
        return [path]
    found = [file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir())]
    return [file for file in found if file.is_file() and not file.name.startswith(".")]


def source_hash(path: Path) -> str:
    """sha256, in hex, of a file; of a source of several files, of their names and hashes."""
    files = source_files(path)
    if files == [path]:
        return _file_hash(path)
    digest = hashlib.sha256()
    for file in files:
        if file.suffix in _PARTS or file == path:
            digest.update(f"{file.name} {_file_hash(file)}\n".encode())
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remember_source(sha256: str, path: Path) -> None:
    """Note in the cache where a source lies; a cache that can't be written has no note."""
    note = _note(sha256)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"source": str(path.resolve())}) + "\n", encoding="utf-8")
    except OSError as error:
        log.debug("no note of the source %s: %s", path, error)


def find_source(source: dict[str, Any], beside: Sequence[Path]) -> Path | None:
    """Where the source of a package lies on this machine, when it is still the same.

    Args:
        source: the manifest's field.
        beside: folders in which a file of its name may be it.
    """
    sha256, name = source.get("sha256"), source.get("file")
    if not isinstance(sha256, str) or not isinstance(name, str):
        return None
    places = [folder / name for folder in beside]
    noted = _noted(sha256)
    for path in [noted, *places] if noted else places:
        if path.exists() and source_hash(path) == sha256:
            return path
    return None


def _noted(sha256: str) -> Path | None:
    try:
        return Path(json.loads(_note(sha256).read_text(encoding="utf-8"))["source"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("the note of a source is damaged: %s", error)
        return None


def _note(sha256: str) -> Path:
    # A damaged package may hold any text as its hash.
    return cache_directory() / "sources" / f"{hashlib.sha256(sha256.encode()).hexdigest()}.json"
