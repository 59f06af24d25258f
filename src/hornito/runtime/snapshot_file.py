"""Snapshots on disk: a safetensors file with the KV blocks and everything that must match.

Metadata: `{"hornito.snapshot": JSON}` with the format version, the engine's identity (package hash,
weights, precision, KV type, RoPE and window settings), token ids, the pending token and what drew
it (sampling parameters and seed), the messages that the tokens come from, which blocks of each kind
are there (the phase of a sliding window), and the sha256 of every tensor. A second entry,
`hornito.snapshot.sha256`, is the hash of that JSON. One tensor per kind, `kv.<kind>`: `[blocks,
block bytes]` of U8; and, where positions were given as embeddings, `embeddings`, their fp32 rows in
order.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError, HornitoError, SessionError, UsageError
from hornito.ops.base import BLOCK_POSITIONS, ceil_div
from hornito.plan.plan import KvKind
from hornito.runtime.engine import Engine
from hornito.runtime.kv_cache import Blocks, release_blocks
from hornito.runtime.sampler import Sampler, SamplingParams
from hornito.runtime.snapshot import EMBEDDED, Snapshot

Array = npt.NDArray[Any]

FORMAT_VERSION = 1
KEY = "hornito.snapshot"
HASH_KEY = "hornito.snapshot.sha256"
_SHAPES = ("rope_theta", "rope_scaling", "windows", "kinds")
"""Fields of an identity that every package of one model has alike."""


def save_snapshot(snapshot: Snapshot, path: str | os.PathLike[str]) -> int:
    """Write a snapshot; the file appears only when it is complete. Returns its size in bytes."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    engine, pools_blocks = snapshot.engine, snapshot.blocks
    engine.flush()
    tensors: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
    present: list[list[int]] = []
    for kind, (pool, blocks) in enumerate(zip(engine.pools, pools_blocks, strict=True)):
        indices = [i for i, block in enumerate(blocks) if block is not None]
        data = np.empty((len(indices), pool.kind.block_bytes), np.uint8)
        for row, index in enumerate(indices):
            block = blocks[index]
            assert block is not None
            buffer, offset = pool.place(block)
            content = engine.device.download(buffer, offset, pool.kind.block_bytes)
            data[row] = np.frombuffer(content, np.uint8)
        tensors[f"kv.{kind}"] = data
        present.append(indices)
    if snapshot.vectors:
        tensors["embeddings"] = np.stack([snapshot.vectors[at] for at in sorted(snapshot.vectors)])
    facts = {
        "format_version": FORMAT_VERSION,
        "identity": engine.identity,
        "ids": snapshot.ids,
        "pending": snapshot.pending,
        "sampler": None if snapshot.sampler is None else _sampler_json(snapshot.sampler),
        "messages": list(snapshot.messages),
        "present": present,
        "sha256": {name: _hash(data) for name, data in tensors.items()},
    }
    target = Path(path)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        text = json.dumps(facts)
        save_file(tensors, partial, {KEY: text, HASH_KEY: _digest(text)})
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        raise HornitoError(f"can't write the snapshot {target}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return target.stat().st_size


def read_facts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a snapshot file says about itself; its tensors are not read.

    Raises:
        FormatError: it is no snapshot file.
    """
    return _open(path)[1]


def load_snapshot(engine: Engine, path: str | os.PathLike[str]) -> Snapshot:
    """Read a snapshot onto an engine. Nothing of the engine changes unless all of it is right.

    Raises:
        SessionError: made with another model or other settings; names the field.
        FormatError: truncated, damaged or of another version.
        DeviceMemoryError: the pools have too few free blocks.
    """
    tensors, facts = _open(path)
    _check_identity(engine.identity, facts["identity"], str(path))
    _check_ids(engine, facts, str(path))
    sampler = _sampler_of(facts["sampler"], str(path))
    data = _check_blocks(engine, tensors, facts, str(path))
    vectors = _check_vectors(engine, tensors, facts, str(path))
    engine.flush()
    blocks: Blocks = [[] for _ in engine.pools]
    try:
        uploads = []
        for kind, (pool, indices) in enumerate(zip(engine.pools, facts["present"], strict=True)):
            own = blocks[kind]
            own += [None] * (max(indices, default=-1) + 1)
            for row, index in enumerate(indices):
                block = own[index] = pool.take()
                uploads.append((*pool.place(block), data[kind][row]))
        engine.device.upload(uploads)
    except BaseException:
        release_blocks(engine.pools, blocks, engine.last_ticket)
        raise
    made = Snapshot(engine, blocks, list(facts["ids"]), facts["pending"], vectors, sampler)
    made.messages = tuple(facts["messages"])
    return made


def _open(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="numpy")
        metadata: dict[str, str] = file.metadata() or {}  # type: ignore[no-untyped-call]
        if KEY not in metadata:
            raise FormatError(f"{path}: a safetensors file, but no snapshot of Hornito")
        text = metadata[KEY]
        facts = json.loads(text)
        version = facts["format_version"]
    except FileNotFoundError as error:
        raise FormatError(f"{path}: no such snapshot file") from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: no readable snapshot file: {error}") from error
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path}: snapshot format version {version}; this Hornito reads {FORMAT_VERSION}. Make "
            "the snapshot again"
        )
    if metadata.get(HASH_KEY) != _digest(text):
        raise FormatError(f"{path}: the snapshot's description is damaged (its sha256 differs)")
    _check_facts(facts, str(path))
    return file, facts


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_facts(facts: dict[str, Any], path: str) -> None:
    ids, pending = facts.get("ids"), facts.get("pending")
    present, messages = facts.get("present"), facts.get("messages")
    right = (
        isinstance(facts.get("identity"), dict)
        and isinstance(facts.get("sha256"), dict)
        and isinstance(ids, list)
        and all(type(token) is int for token in ids)
        and (pending is None or type(pending) is int)
        and isinstance(present, list)
        and all(
            isinstance(own, list)
            and all(type(i) is int and 0 <= i < ceil_div(len(ids), BLOCK_POSITIONS) for i in own)
            and own == sorted(set(own))
            for own in present
        )
        and (facts.get("sampler") is None or isinstance(facts["sampler"], dict))
        and isinstance(messages, list)
        and all(
            isinstance(message, dict)
            and set(message) == {"role", "content"}
            and all(isinstance(text, str) for text in message.values())
            for message in messages
        )
    )
    if not right:
        raise FormatError(f"{path}: the snapshot's description is malformed")


def _check_identity(mine: dict[str, Any], other: dict[str, Any], path: str) -> None:
    for field in [*mine, *sorted(set(other) - set(mine))]:
        if mine.get(field) != other.get(field):
            raise SessionError(
                f"{path}: {_whose(mine, other)} was made with {field} = {other.get(field)!r}; this "
                f"session has {mine.get(field)!r}"
            )


def _whose(mine: dict[str, Any], other: dict[str, Any]) -> str:
    """How a message about a snapshot begins, which is with what matters most to people."""
    if mine.get("package") == other.get("package"):
        return "the snapshot"
    if any(mine.get(field) != other.get(field) for field in _SHAPES):
        return "this is a snapshot of another model, which"
    return "this is a snapshot of another model, or of another package of this one, which"


def _check_ids(engine: Engine, facts: dict[str, Any], path: str) -> None:
    pending = [] if facts["pending"] is None else [facts["pending"]]
    for token in [*(token for token in facts["ids"] if token != EMBEDDED), *pending]:
        if not 0 <= token < engine.vocabulary:
            raise FormatError(f"{path}: token id {token} is outside the model's vocabulary")


def _sampler_json(sampler: Sampler) -> dict[str, Any]:
    params = asdict(sampler.params)
    params["logit_bias"] = sorted(params["logit_bias"].items())
    return {"params": params, "seed": sampler.seed, "prompt_tokens": sampler.prompt_tokens}


def _sampler_of(data: dict[str, Any] | None, path: str) -> Sampler | None:
    if data is None:
        return None
    try:
        params = {**data["params"], "logit_bias": dict(data["params"]["logit_bias"])}
        return Sampler(
            SamplingParams(**params),
            operator.index(data["seed"]),
            operator.index(data["prompt_tokens"]),
        )
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise FormatError(
            f"{path}: the snapshot's sampling parameters are wrong: {error}"
        ) from error


def _needed(kind: KvKind, position: int) -> set[int]:
    """Block indices that the next token at `position` reads."""
    first = max(0, position - kind.window + 1) if kind.window else 0
    return set(range(first // BLOCK_POSITIONS, ceil_div(position, BLOCK_POSITIONS)))


def _hash(data: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(data).data).hexdigest()


def _tensor(
    file: Any, facts: dict[str, Any], name: str, dtype: type, shape: tuple[int, ...], path: str
) -> Array:
    """A tensor of the file, when it is what it must be."""
    from safetensors import SafetensorError

    try:
        data: Array = file.get_tensor(name)
    except SafetensorError as error:
        raise FormatError(f"{path}: tensor {name} can't be read: {error}") from error
    if data.dtype != dtype or data.shape != shape:
        raise FormatError(f"{path}: tensor {name} is {data.dtype} {data.shape}, not {shape}")
    if _hash(data) != facts["sha256"].get(name):
        raise FormatError(f"{path}: tensor {name} is damaged (its sha256 differs)")
    return data


def _check_vectors(
    engine: Engine, file: Any, facts: dict[str, Any], path: str
) -> dict[int, npt.NDArray[np.float32]]:
    given = [at for at, token in enumerate(facts["ids"]) if token == EMBEDDED]
    if not given:
        return {}
    shape = (len(given), engine.plan.width)
    return dict(
        zip(given, _tensor(file, facts, "embeddings", np.float32, shape, path), strict=True)
    )


def _check_blocks(engine: Engine, file: Any, facts: dict[str, Any], path: str) -> list[Array]:
    if len(facts["present"]) != len(engine.pools) or len(facts["ids"]) > engine.context:
        raise SessionError(
            f"{path}: the snapshot has {len(facts['ids'])} positions in {len(facts['present'])} "
            f"kinds of block; this session holds {engine.context} in {len(engine.pools)}"
        )
    found = []
    for kind, (pool, indices) in enumerate(zip(engine.pools, facts["present"], strict=True)):
        missing = _needed(pool.kind, len(facts["ids"])) - set(indices)
        if missing:
            raise FormatError(f"{path}: blocks {sorted(missing)} of kind {kind} are missing")
        shape = (len(indices), pool.kind.block_bytes)
        found.append(_tensor(file, facts, f"kv.{kind}", np.uint8, shape, path))
    return found
