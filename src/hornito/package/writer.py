"""Writes a `.vxm` package in one pass over the weights, with bounded memory, all or nothing."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

import hornito
from hornito.errors import HornitoError, PackageError, size_text
from hornito.package.format import (
    ALIGNMENT,
    BLOB_PREFIX,
    DTYPE_BYTES,
    FORMAT_VERSION,
    PAD_PREFIX,
    RANK_LIMIT,
    ZERO_HASH,
    Manifest,
    encode_header,
)
from hornito.package.partial import partial_path
from hornito.package.reader import open_package
from hornito.progress import NullProgress, Progress

log = logging.getLogger("hornito")

_COPY_PIECE = 8 << 20  # bytes
_BEHIND = 64 << 20
"""Bytes that wait to be hashed and written while the next are made."""

BytesLike = bytes | bytearray | memoryview | npt.NDArray[Any]
TensorData = Callable[[], BytesLike | Iterable[BytesLike]]
TensorSpec = tuple[str, str, tuple[int, ...], TensorData]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor with its place; offsets count from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    data: TensorData | None  # None for padding

    def entry(self) -> dict[str, Any]:
        """The tensor's entry in the safetensors header."""
        offsets = [self.begin, self.end]
        return {"dtype": self.dtype, "shape": list(self.shape), "data_offsets": offsets}


def write_package(
    path: str | os.PathLike[str],
    graph_json: dict[str, Any],
    facts: dict[str, Any],
    tensors: Iterable[TensorSpec],
    blobs: Mapping[str, BytesLike],
    generation: dict[str, Any],
    quant: dict[str, Any],
    support: dict[str, Any],
    source: dict[str, Any],
    progress: Progress | None = None,
) -> int:
    """Writes a package and returns its size in bytes.

    The file appears under its name only when it is complete and on disk; on any failure nothing is
    left, and a package that was there before stays.

    Args:
        path: the package's name.
        graph_json: `Graph.to_json()`.
        facts, generation, quant, support, source: the manifest's fields, JSON objects.
        tensors: (name, dtype such as 'F16', shape, data). `data` is called once, when its turn
            comes, and returns the little-endian bytes, whole or as an iterable of pieces, which
            must not change afterwards: other threads hash and write them.
        blobs: files to carry along, by name ('tokenizer.json').
        progress: is told about bytes written.

    Raises:
        PackageError: a name, dtype or shape is not allowed, or data has another size than its
            shape says.
        HornitoError: the disk is full or the file can't be written.
    """
    target = Path(path)
    placed = _place([*tensors, *(_blob(name, data) for name, data in blobs.items())])
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        hornito_version=hornito.__version__,
        graph=graph_json,
        facts=facts,
        generation=generation,
        quant=quant,
        support=support,
        source=source,
        sha256={tensor.name: ZERO_HASH for tensor in placed if tensor.data is not None},
    )
    entries = {tensor.name: tensor.entry() for tensor in placed}
    header = encode_header(entries, manifest)
    total = len(header) + (placed[-1].end if placed else 0)
    progress = progress or NullProgress()
    try:
        with _replaced(target, total) as file:
            file.write(header)
            progress.start(f"writing {target.name}", total)
            progress.advance(len(header))
            hashes = _write_tensors(file, placed, progress)
            final = encode_header(entries, replace(manifest, sha256=hashes), data_start=len(header))
            file.seek(0)
            file.write(final)
    finally:
        progress.finish()
    return total


def store_quality(path: str | os.PathLike[str], quality: dict[str, Any]) -> None:
    """Write the `quality` of a package's manifest; everything else stays, byte by byte.

    The file is replaced by a new one as a whole, so whoever has it open keeps what they opened.

    Raises:
        PackageError: it is no package, or damaged.
        HornitoError: the disk is full or the file can't be written; the package is as it was.
    """
    target = Path(path).resolve()
    with open_package(target) as package:
        start = package.data_start
        header = encode_header(package.entries(), replace(package.manifest, quality=quality))
        with _replaced(target, len(header) + package.size - start) as file:
            shutil.copymode(target, file.name)
            file.write(header)
            with open(target, "rb") as old:
                old.seek(start)
                shutil.copyfileobj(old, file, _COPY_PIECE)


@contextmanager
def _replaced(target: Path, total: int) -> Iterator[BinaryIO]:
    """A new file of `total` bytes that becomes `target` when the block ends without an error."""
    partial = partial_path(target)
    try:
        check_space(target, total)
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise HornitoError(
            f"can't write {target} ({size_text(total)}): {error.strerror or error}"
        ) from error
    finally:
        _discard(partial)


def _discard(partial: Path) -> None:
    """Delete what a failed write left; a folder that refuses must not hide why the write failed."""
    try:
        partial.unlink(missing_ok=True)
    except OSError as error:
        log.debug("can't delete %s: %s", partial, error)


def _blob(name: str, data: BytesLike) -> TensorSpec:
    content = _bytes(data)
    return BLOB_PREFIX + name, "U8", (content.nbytes,), lambda: content


def _place(tensors: list[TensorSpec]) -> list[_Placed]:
    """Gives each tensor an aligned place, with padding tensors between, in the order given."""
    placed: list[_Placed] = []
    names: set[str] = set()
    position = pads = 0
    for name, dtype, shape, data in tensors:
        if not name or name == "__metadata__" or name.startswith(PAD_PREFIX) or name in names:
            raise PackageError(f"tensor name '{name}' is reserved, empty or used twice")
        names.add(name)
        if dtype not in DTYPE_BYTES:
            raise PackageError(f"tensor '{name}': dtype {dtype} is none of {sorted(DTYPE_BYTES)}")
        if len(shape) > RANK_LIMIT or any(dim < 1 for dim in shape):
            raise PackageError(f"tensor '{name}': shape {shape} is not allowed")
        gap = -position % ALIGNMENT
        if gap:
            pad = f"{PAD_PREFIX}{pads}"
            placed.append(_Placed(pad, "U8", (gap,), position, position + gap, None))
            pads += 1
            position += gap
        end = position + math.prod(shape) * DTYPE_BYTES[dtype]
        placed.append(_Placed(name, dtype, tuple(shape), position, end, data))
        position = end
    return placed


class _Sink:
    """Hashes bytes and writes them, each on a thread of its own, while the caller makes the next.

    A context; what fails is raised by a later `add`, or by `flush`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hasher, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._waiting: deque[tuple[int, list[Future[Any]]]] = deque()
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pool in (self._hasher, self._writer):
            pool.shutdown(wait=True, cancel_futures=True)

    def add(self, content: memoryview, digest: hashlib._Hash | None) -> None:
        """Write bytes behind the others, and add them to a hash."""
        for start in range(0, content.nbytes, _COPY_PIECE):
            piece = content[start : start + _COPY_PIECE]
            futures: list[Future[Any]] = [self._writer.submit(self._file.write, piece)]
            if digest is not None:
                futures.append(self._hasher.submit(digest.update, piece))
            self._waiting.append((piece.nbytes, futures))
            self._bytes += piece.nbytes
            self._settle(_BEHIND)

    def flush(self) -> None:
        """Wait until everything is hashed and with the operating system."""
        self._settle(0)

    def _settle(self, limit: int) -> None:
        while self._bytes > limit:
            size, futures = self._waiting.popleft()
            for future in futures:
                future.result()
            self._bytes -= size


def _write_tensors(file: BinaryIO, placed: list[_Placed], progress: Progress) -> dict[str, str]:
    """Streams all data to the file; returns the hash of each tensor that isn't padding."""
    digests = {}
    with _Sink(file) as sink:
        for tensor in placed:
            size = tensor.end - tensor.begin
            if tensor.data is None:
                sink.add(memoryview(bytes(size)), None)
                progress.advance(size)
                continue
            digest = digests[tensor.name] = hashlib.sha256()
            written = 0
            for piece in _pieces(tensor.data()):
                written += piece.nbytes
                if written > size:
                    break
                sink.add(piece, digest)
                progress.advance(piece.nbytes)
            if written != size:
                count = f"over {size}" if written > size else str(written)
                raise PackageError(
                    f"tensor '{tensor.name}': {count} bytes of data, but {tensor.dtype}"
                    f" {list(tensor.shape)} takes {size}"
                )
        sink.flush()
    return {name: digest.hexdigest() for name, digest in digests.items()}


def _pieces(data: BytesLike | Iterable[BytesLike]) -> Iterator[memoryview]:
    if isinstance(data, bytes | bytearray | memoryview | np.ndarray):
        yield _bytes(data)
        return
    for piece in data:
        yield _bytes(piece)


def _bytes(data: BytesLike) -> memoryview:
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).data.cast("B")
    return memoryview(data).cast("B")


def check_space(target: Path, total: int, beside: int = 0) -> None:
    """Refuse to begin what the disk has no room for.

    Args:
        total: bytes of the package `target`.
        beside: bytes of temporary files in the same folder while it is made.

    Raises:
        HornitoError: says what it takes and what is free.
    """
    free = shutil.disk_usage(target.parent).free
    if free < total + beside:
        more = f", and {size_text(beside)} beside it while it is made," if beside else ""
        raise HornitoError(
            f"can't write {target}: it takes {size_text(total)}{more} and "
            f"{target.parent.resolve()} has {size_text(free)} free"
        )


def _sync_folder(folder: Path) -> None:
    """Makes the new name durable; only POSIX systems let a folder be synced."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
