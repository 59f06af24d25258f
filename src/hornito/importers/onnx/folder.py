"""Which ONNX file of a directory is the decoder, and the files beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hornito.errors import FormatError, UnsupportedError
from hornito.importers.safetensors_file import parse_json

WITH_PAST = "decoder_with_past_model.onnx"
WITHOUT_PAST = "decoder_model.onnx"
#: Names of exporters, the best first.
PREFERRED = ("model.onnx", "decoder_model_merged.onnx", WITH_PAST, WITHOUT_PAST)
MAX_JSON = 64 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Files to import: the decoder, its twin without a past (of a pair), and where configs lie."""

    model: Path
    twin: Path | None
    folder: Path


def has_onnx(folder: Path) -> bool:
    """Whether a directory (or its `onnx` subdirectory) holds an ONNX file."""
    return any(folder.glob("*.onnx")) or any((folder / "onnx").glob("*.onnx"))


def find_model(path: Path) -> Place:
    """The decoder of a directory, or the file itself.

    Raises:
        UnsupportedError: there is none, or several and no way to choose.
    """
    if path.is_file():
        folder = path.parent
        above = folder.parent
        if not (folder / "config.json").exists() and folder.name == "onnx":
            folder = above if (above / "config.json").exists() else folder
        return Place(path, _twin(path), folder)
    for folder in (path, path / "onnx"):
        named = _genai_file(folder)
        if named is not None:
            return Place(named, None, path)
        for name in PREFERRED:
            if (folder / name).is_file():
                return Place(folder / name, _twin(folder / name), path)
        files = sorted(folder.glob("*.onnx"))
        if len(files) == 1:
            return Place(files[0], None, path)
        if files:
            raise UnsupportedError(
                f"{folder}: several ONNX files ({', '.join(f.name for f in files[:6])}) and no "
                "model.onnx: name the file"
            )
    raise UnsupportedError(f"{path}: no ONNX file in it")


def _twin(model: Path) -> Path | None:
    twin = model.with_name(WITHOUT_PAST)
    return twin if model.name == WITH_PAST and twin.is_file() else None


def genai_embedding(folder: Path) -> Path | None:
    """The file of the embedding that genai_config.json names, if it names one that is there."""
    return _genai_file(folder, "embedding")


def _genai_file(folder: Path, part: str = "decoder") -> Path | None:
    facts = genai_config(folder).get(part)
    name = facts.get("filename") if isinstance(facts, dict) else None
    if not isinstance(name, str) or "/" in name or "\\" in name or name.startswith("."):
        return None
    return folder / name if (folder / name).is_file() else None


def json_object(path: Path) -> dict[str, Any]:
    """An optional JSON object; empty when the file is not there."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_JSON:
        raise FormatError(f"{path}: more than {MAX_JSON} bytes")
    value = parse_json(path.read_bytes(), str(path))
    if not isinstance(value, dict):
        raise FormatError(f"{path}: not a JSON object")
    return value


def genai_config(folder: Path) -> dict[str, Any]:
    """The `model` part of ONNX Runtime GenAI's genai_config.json; empty when it is not there."""
    model = json_object(folder / "genai_config.json").get("model")
    return model if isinstance(model, dict) else {}


def with_genai(config: dict[str, Any], genai: dict[str, Any]) -> dict[str, Any]:
    """Keys of a config.json that genai_config.json also knows, where the config lacks them."""
    out = dict(config)
    for theirs, ours in (
        ("context_length", "max_position_embeddings"),
        ("eos_token_id", "eos_token_id"),
        ("bos_token_id", "bos_token_id"),
        ("vocab_size", "vocab_size"),
    ):
        if theirs in genai:
            out.setdefault(ours, genai[theirs])
    return out
