"""Opens a `.vxm` package by memory map; no number of the file is used before it is checked."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from hornito.errors import PackageError
from hornito.package.format import (
    ALIGNMENT,
    BLOB_PREFIX,
    DTYPE_BYTES,
    HEADER_HASH_KEY,
    HEADER_LIMIT,
    MANIFEST_KEY,
    PAD_PREFIX,
    RANK_LIMIT,
    SUFFIX,
    Manifest,
    TensorInfo,
    check_header_hash,
    load_json,
)
from hornito.progress import NullProgress, Progress

_BEGINNING = 4096  # bytes, in which the header's hash begins
_HASH_PIECE = 8 * 1024 * 1024  # bytes hashed between two reports of progress


class Package:
    """An open package. Views that it hands out stay valid after `close` until they are dropped.

    Attributes:
        path: the file.
        size: its size in bytes.
        manifest: what the package says about itself.
        tensors: the weights by name, in file order.
        blobs: carried files by name ('tokenizer.json'), in file order.
    """

    def __init__(
        self,
        path: Path,
        data: mmap.mmap,
        manifest: Manifest,
        tensors: dict[str, TensorInfo],
        blobs: dict[str, TensorInfo],
        padding: dict[str, TensorInfo],
    ) -> None:
        self.path = path
        self.size = len(data)
        self.manifest = manifest
        self.tensors = tensors
        self.blobs = blobs
        self._padding = padding
        self._map: mmap.mmap | None = data

    def __enter__(self) -> Package:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def tensor(self, name: str) -> memoryview:
        """The bytes of a weight, read-only, without a copy; `tensors[name]` has dtype and shape.

        Raises:
            PackageError: there is no such weight.
        """
        info = self.tensors.get(name)
        if info is None:
            raise PackageError(f"{self.path}: no tensor '{name}'")
        return self._view(info)

    @property
    def data_start(self) -> int:
        """Where the data of the tensors begins in the file."""
        infos = (*self.tensors.values(), *self.blobs.values(), *self._padding.values())
        return min((info.offset for info in infos), default=self.size)

    def entries(self) -> dict[str, dict[str, Any]]:
        """The safetensors entry of every tensor, padding included, in file order."""
        start = self.data_start
        blobs = {BLOB_PREFIX + name: info for name, info in self.blobs.items()}
        named = {**self.tensors, **blobs, **self._padding}
        return {
            name: {
                "dtype": info.dtype,
                "shape": list(info.shape),
                "data_offsets": [info.offset - start, info.offset - start + info.nbytes],
            }
            for name, info in sorted(named.items(), key=lambda item: item[1].offset)
        }

    def blob(self, name: str) -> bytes:
        """The content of a carried file.

        Raises:
            PackageError: there is no such blob.
        """
        info = self.blobs.get(name)
        if info is None:
            raise PackageError(f"{self.path}: no blob '{name}', only {sorted(self.blobs)}")
        return bytes(self._view(info))

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Reads the whole file and returns the names of tensors whose content is damaged."""
        progress = progress or NullProgress()
        named = {**self.tensors, **{BLOB_PREFIX + k: v for k, v in self.blobs.items()}}
        bad: list[str] = []
        progress.start(f"verifying {self.path.name}", sum(t.nbytes for t in named.values()))
        try:
            for name, info in named.items():
                view = self._view(info)
                digest = hashlib.sha256()
                for start in range(0, info.nbytes, _HASH_PIECE):
                    piece = view[start : start + _HASH_PIECE]
                    digest.update(piece)
                    progress.advance(piece.nbytes)
                if digest.hexdigest() != info.sha256:
                    bad.append(name)
        finally:
            progress.finish()
        # Padding carries nothing, but it is defined as zero, so a change in it is damage too.
        bad += [n for n, info in self._padding.items() if any(self._view(info))]
        return bad

    def check(self, progress: Progress | None = None) -> None:
        """Raise PackageError when a tensor or blob is damaged; see `verify`."""
        bad = self.verify(progress)
        if bad:
            raise PackageError(
                f"{self.path}: {len(bad)} damaged: {', '.join(bad)}. Copy or download the file "
                "again, or compile its source again"
            )

    def close(self) -> None:
        """Closes the map, at once or, where views of it are still held, with the last of them."""
        data, self._map = self._map, None
        if data is None:
            return
        try:
            data.close()
        except BufferError:
            # A view is alive; the map is freed when it goes, since we hold no reference any more.
            return

    def _view(self, info: TensorInfo) -> memoryview:
        if self._map is None:
            raise PackageError(f"{self.path}: the package is closed")
        return memoryview(self._map)[info.offset : info.offset + info.nbytes]


def is_package(path: str | os.PathLike[str]) -> bool:
    """Whether a path stands for a package: by what the file begins with, whatever its name.

    What is named `.vxm` is meant as one even where it is damaged or absent; `open_package` says so.
    """
    return os.fspath(path).endswith(SUFFIX) or holds_package(path)


def holds_package(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a package does; it may be damaged behind that."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            start = file.read(_BEGINNING)
    except OSError:  # its reader says why
        return False
    return start[8:9] == b"{" and f'"{HEADER_HASH_KEY}":"'.encode() in start


def open_package(path: str | os.PathLike[str]) -> Package:
    """Opens a package and checks its whole header (not the data: that is `Package.verify`).

    Raises:
        PackageError: no package, damaged, or of a format version that can't be read.
    """
    file_path = Path(path)
    try:
        with open(file_path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8 + 2:
                raise PackageError(f"{file_path}: {size} bytes are too few for a package")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise PackageError(f"can't open {file_path}: {error.strerror or error}") from error
    try:
        return _read(file_path, data)
    except BaseException:
        data.close()
        raise


def _read(path: Path, data: mmap.mmap) -> Package:
    where = str(path)
    length = int.from_bytes(data[:8], "little")
    if data[8:9] != b"{" or length > HEADER_LIMIT:
        raise PackageError(f"{where}: not a Hornito package (no safetensors header)")
    if 8 + length > len(data):
        raise PackageError(
            f"{where}: truncated: the header takes {length} bytes, the file has {len(data) - 8}"
        )
    raw = data[8 : 8 + length]
    header = load_json(raw, f"{where}: header")
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(metadata, dict):
        raise PackageError(f"{where}: a safetensors file, but not a Hornito package")
    text = metadata.get(MANIFEST_KEY)
    if not isinstance(text, str):
        raise PackageError(f"{where}: a safetensors file, but not a Hornito package")
    # The version comes before the hash: a newer format may well hash in another way.
    manifest = Manifest.from_json(load_json(text, f"{where}: manifest"), where)
    check_header_hash(raw, metadata.get(HEADER_HASH_KEY), where)
    if (8 + length) % ALIGNMENT:
        raise PackageError(f"{where}: the data starts at byte {8 + length}, not aligned")
    groups = _check_tensors(header, manifest, 8 + length, len(data), where)
    return Package(path, data, manifest, *groups)


def _check_tensors(
    header: dict[str, Any], manifest: Manifest, data_start: int, file_size: int, where: str
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo], dict[str, TensorInfo]]:
    """Checks each entry and that together they cover the data exactly.

    Returns weights, blobs and padding, in file order.
    """
    infos = {
        name: _check_entry(entry, data_start, manifest.sha256.get(name, ""), f"{where}: '{name}'")
        for name, entry in header.items()
    }
    for name, info in infos.items():
        end = info.offset + info.nbytes
        if end > file_size:
            raise PackageError(
                f"{where}: truncated: tensor '{name}' ends at byte {end}, the file at {file_size}"
            )
    groups: tuple[dict[str, TensorInfo], ...] = ({}, {}, {})
    position = data_start
    for name, info in sorted(infos.items(), key=lambda item: item[1].offset):
        if info.offset != position:
            kind = "overlaps the tensor before it" if info.offset < position else "leaves a hole"
            raise PackageError(
                f"{where}: tensor '{name}' at byte {info.offset} {kind}, expected {position}"
            )
        position += info.nbytes
        if name.startswith(PAD_PREFIX):
            groups[2][name] = info
            continue
        if not info.sha256:
            raise PackageError(f"{where}: tensor '{name}' has no sha256 in the manifest")
        if info.offset % ALIGNMENT:
            raise PackageError(f"{where}: tensor '{name}' at byte {info.offset} is not aligned")
        if name.startswith(BLOB_PREFIX):
            groups[1][name.removeprefix(BLOB_PREFIX)] = info
        else:
            groups[0][name] = info
    if position != file_size:
        raise PackageError(
            f"{where}: the tensors end at byte {position}, but the file at {file_size}"
        )
    missing = set(manifest.sha256) - set(infos)
    if missing:
        raise PackageError(f"{where}: the manifest names a tensor '{min(missing)}' that is absent")
    return groups[0], groups[1], groups[2]


def _check_entry(entry: object, data_start: int, sha256: str, where: str) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise PackageError(f"{where}: wants dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise PackageError(f"{where}: unknown dtype {dtype!r:.40}")
    if not isinstance(shape, list) or len(shape) > RANK_LIMIT:
        raise PackageError(f"{where}: the shape is no list of at most {RANK_LIMIT} numbers")
    if any(type(dim) is not int or dim < 1 for dim in shape):
        raise PackageError(f"{where}: the shape has a dimension that is no positive number")
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise PackageError(f"{where}: data_offsets are no pair")
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise PackageError(f"{where}: data_offsets are no range")
    size = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != size:
        raise PackageError(f"{where}: {end - begin} bytes, but its dtype and shape take {size}")
    return TensorInfo(dtype, tuple(shape), data_start + begin, size, sha256)
