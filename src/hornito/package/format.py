"""The `.vxm` package format: constants, the manifest, and the checks on its header.

docs/format.md is the specification; this file and the specification change together.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hornito.errors import PackageError

FORMAT_VERSION = 1
OLDEST_READABLE_VERSION = 1
ALIGNMENT = 256  # bytes; largest minStorageBufferOffsetAlignment that Vulkan allows
HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors library
RANK_LIMIT = 8
SUFFIX = ".vxm"
MANIFEST_KEY = "hornito"
HEADER_HASH_KEY = "hornito.sha256"
BLOB_PREFIX = "blob:"
PAD_PREFIX = "pad:"
ZERO_HASH = "0" * 64
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "I8": 1, "U8": 1}

_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `offset` counts from the start of the file, sizes are in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a package says about itself.

    Attributes:
        format_version: version of the format that the file was written in.
        hornito_version: version of the program that wrote it.
        graph: the graph as JSON, for `Graph.from_json`.
        facts: model facts (model_type, layers, heads, head_dim, rope, window, eos ids, ...).
        generation: the model's own generation settings.
        quant: how each weight was stored.
        support: the support report of the compilation.
        source: where the weights came from, with name and licence as far as known.
        sha256: hash of every weight and blob by tensor name.
        quality: how close the package comes to the fp32 tier of its source (hornito.diag.quality);
            empty until it is measured.
    """

    format_version: int
    hornito_version: str
    graph: dict[str, Any]
    facts: dict[str, Any]
    generation: dict[str, Any]
    quant: dict[str, Any]
    support: dict[str, Any]
    source: dict[str, Any]
    sha256: dict[str, str]
    quality: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The manifest as a JSON object; without `quality` while that is empty."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if not self.quality:
            del found["quality"]
        return found

    def identity(self) -> str:
        """sha256, in hex, of all that the model is: the manifest but for its quality."""
        found = self.to_json()
        found.pop("quality", None)
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_json(cls, data: object, where: str) -> Manifest:
        """Checks and reads a manifest; `where` names the file in errors.

        Raises:
            PackageError: wrong version, a field is missing or has the wrong type.
        """
        if not isinstance(data, dict):
            raise PackageError(f"{where}: the manifest is not a JSON object")
        version = data.get("format_version")
        if type(version) is not int or version < 1:
            raise PackageError(f"{where}: the manifest has no valid format_version: {version!r}")
        if version > FORMAT_VERSION:
            raise PackageError(
                f"{where}: made by a newer Hornito ({data.get('hornito_version')!s:.40}): format"
                f" version {version}, this one reads up to {FORMAT_VERSION};"
                " run `pip install --upgrade hornito` or compile the model again"
            )
        if version < OLDEST_READABLE_VERSION:
            raise PackageError(
                f"{where}: format version {version} is too old, this Hornito reads"
                f" {OLDEST_READABLE_VERSION} to {FORMAT_VERSION}; compile the model again"
            )
        maps: dict[str, dict[str, Any]] = {}
        for name in ("graph", "facts", "generation", "quant", "support", "source", "sha256"):
            value = data.get(name)
            if not isinstance(value, dict):
                raise PackageError(f"{where}: manifest field '{name}' is missing or no object")
            maps[name] = value
        quality = data.get("quality", {})
        if not isinstance(quality, dict):
            raise PackageError(f"{where}: manifest field 'quality' is no object")
        program = data.get("hornito_version")
        if not isinstance(program, str):
            raise PackageError(f"{where}: manifest field 'hornito_version' is missing or no text")
        for name, value in maps["sha256"].items():
            if not isinstance(value, str) or not _HASH.fullmatch(value):
                raise PackageError(f"{where}: tensor '{name}' has no valid sha256")
        return cls(format_version=version, hornito_version=program, quality=quality, **maps)


def dump_json(data: object) -> str:
    """Compact ASCII JSON; NaN and infinities are refused with ValueError."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def load_json(text: str | bytes, where: str) -> object:
    """Parses JSON strictly: no duplicate keys, no NaN, no depth that breaks the parser.

    Raises:
        PackageError: it is not such JSON; `where` starts the message.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise PackageError(f"{where}: the name '{key}' occurs twice")
                seen.add(key)
        return result

    def refuse(constant: str) -> float:
        raise PackageError(f"{where}: {constant} is no JSON number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{where}: not valid JSON: {error}") from error


def encode_header(
    entries: Mapping[str, Mapping[str, Any]], manifest: Manifest, *, data_start: int | None = None
) -> bytes:
    """The file's first bytes: length, JSON with its own hash, spaces up to the data.

    Args:
        entries: safetensors entry of each tensor, padding included.
        manifest: goes into `__metadata__`.
        data_start: where the data must start, when that is fixed already.

    Raises:
        PackageError: the header passes the limit of 100 MB.
    """
    metadata = {HEADER_HASH_KEY: ZERO_HASH, MANIFEST_KEY: dump_json(manifest.to_json())}
    text = dump_json({"__metadata__": metadata, **entries}).encode("ascii")
    start = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    if data_start is not None and start != data_start:
        raise PackageError(f"the header changed its size: data at {start} instead of {data_start}")
    if start - 8 > HEADER_LIMIT:
        raise PackageError(
            f"the header would take {start - 8} bytes, safetensors allows {HEADER_LIMIT}"
        )
    text = text.ljust(start - 8)
    digest = hashlib.sha256(text).hexdigest()
    return len(text).to_bytes(8, "little") + text.replace(
        _hash_field(ZERO_HASH), _hash_field(digest), 1
    )


def check_header_hash(header: bytes, digest: object, where: str) -> None:
    """Raises PackageError unless `digest`, taken from the header, is the header's own hash."""
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise PackageError(f"{where}: the header has no valid {HEADER_HASH_KEY}")
    if header.count(_hash_field(digest)) != 1:
        raise PackageError(f"{where}: {HEADER_HASH_KEY} is not stored as the format wants it")
    zeroed = header.replace(_hash_field(digest), _hash_field(ZERO_HASH))
    if hashlib.sha256(zeroed).hexdigest() != digest:
        raise PackageError(f"{where}: the header is damaged (its sha256 differs)")


def _hash_field(digest: str) -> bytes:
    # Inside a JSON string its quotes would be escaped, so this text is found at one place only.
    return f'"{HEADER_HASH_KEY}":"{digest}"'.encode("ascii")
