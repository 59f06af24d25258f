"""Hugging Face directories (config.json, safetensors, tokenizer.json) as a `Source`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hornito.errors import FormatError, HornitoError, UnsupportedError
from hornito.importers.families import checked_tensors, complete_config, is_ignorable
from hornito.importers.multimodal import text_config, text_tensor
from hornito.importers.safetensors_file import StoredTensor, parse_json, read_safetensors
from hornito.importers.source import LazyTensor, Source, mapped_tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: JSON files of a checkpoint are small, but for tokenizers; more is not a checkpoint.
MAX_JSON_BYTES = 256 << 20
#: Tokenizer classes of transformers that obey `add_bos_token` of tokenizer_config.json.
_OBEY_ADD_BOS = re.compile(r"^(Llama|CodeLlama|Gemma|Cohere)Tokenizer(Fast)?$")


def _bytes(path: Path) -> bytes | None:
    """Content of an optional small file; None when it is not there."""
    if not path.exists():
        return None
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise FormatError(f"{path}: {size} bytes, more than {MAX_JSON_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise HornitoError(f"{path}: can't be read: {error.strerror or error}") from error


def _object(path: Path) -> dict[str, Any]:
    """An optional JSON object file; empty when it is not there."""
    raw = _bytes(path)
    if raw is None:
        return {}
    value = parse_json(raw, str(path))
    if not isinstance(value, dict):
        raise FormatError(f"{path}: not a JSON object")
    return value


def _shards(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the directory, from one file or from the shards of its index."""
    if (folder / SINGLE).exists():
        return read_safetensors(folder / SINGLE)
    index = folder / INDEX
    if not index.exists():
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        found = f"; found {', '.join(others[:3])}, which is not supported" if others else ""
        raise UnsupportedError(
            f"{folder}: no {SINGLE} and no {INDEX}{found}. Supported: safetensors weights "
            "(save the model with transformers' save_pretrained to get them)"
        )
    where = _object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise FormatError(f"{index}: no weight_map")
    tensors: dict[str, StoredTensor] = {}
    opened: dict[str, dict[str, StoredTensor]] = {}
    for name, file in where.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.\-]+\.safetensors", file):
            raise FormatError(f"{index}: tensor '{name}' lies in {str(file)[:80]!r}, no plain name")
        if file not in opened:
            if not (folder / file).exists():
                raise FormatError(f"{folder / file}: missing; it holds tensor '{name}'")
            opened[file] = read_safetensors(folder / file)
        if name not in opened[file]:
            raise FormatError(f"{folder / file}: tensor '{name}' of the index is not in it")
        tensors[name] = opened[file][name]
    return tensors


def _model_name(name: str, model_type: str) -> str:
    """GPT-2 checkpoints come with and without their `transformer.` prefix."""
    if model_type == "gpt2" and re.match(r"(wte|wpe|ln_f|h)\.", name):
        return f"transformer.{name}"
    return name


def _template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The chat template: its own file first, then tokenizer_config.json, as transformers does."""
    raw = _bytes(folder / "chat_template.jinja")
    if raw is not None:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{folder / 'chat_template.jinja'}: not valid UTF-8") from error
    stored = tokenizer_config.get("chat_template")
    if stored is None:
        stored = _object(folder / "chat_template.json").get("chat_template")
    if isinstance(stored, list):
        named = {
            entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)
        }
        stored = named.get("default")
    return stored if isinstance(stored, str) else None


def _special_text(value: Any) -> str | None:
    """Text of a token in tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Ids of added tokens by their text."""
    added = tokenizer.get("added_tokens")
    return {
        entry["content"]: entry["id"]
        for entry in (added if isinstance(added, list) else [])
        if isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        and isinstance(entry.get("id"), int)
    }


def _post_processor_adds(tokenizer: Mapping[str, Any], text: str) -> bool:
    """Whether the tokenizer's post-processor puts the token `text` first."""

    def first_of(processor: Any) -> bool:
        if not isinstance(processor, dict):
            return False
        if processor.get("type") == "Sequence":
            return any(first_of(inner) for inner in processor.get("processors") or [])
        single = processor.get("single")
        if processor.get("type") != "TemplateProcessing" or not isinstance(single, list):
            return False
        start = single[0] if single else None
        special = start.get("SpecialToken") if isinstance(start, dict) else None
        return isinstance(special, dict) and special.get("id") == text

    return first_of(tokenizer.get("post_processor"))


def _start_rule(
    config: Mapping[str, Any], tokenizer: Mapping[str, Any], tokenizer_config: Mapping[str, Any]
) -> tuple[int | None, bool, dict[str, str]]:
    """`(bos_id, add_bos, token_strings)` from the tokenizer's files."""
    strings = {
        key: text
        for key in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
        if (text := _special_text(tokenizer_config.get(key))) is not None
    }
    bos = strings.get("bos_token")
    ids = _ids(config.get("bos_token_id"))
    known = _token_ids(tokenizer).get(bos) if bos is not None else None
    bos_id = known if known is not None else (ids[0] if ids else None)
    add = False
    if bos is not None:
        add = _post_processor_adds(tokenizer, bos)
        kind = str(tokenizer_config.get("tokenizer_class", ""))
        if _OBEY_ADD_BOS.match(kind) and isinstance(tokenizer_config.get("add_bos_token"), bool):
            add = tokenizer_config["add_bos_token"]
    return bos_id, add and bos_id is not None, strings


def _eos_ids(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    strings: Mapping[str, str],
) -> tuple[int, ...]:
    """The union of every place that names an end: all of them must stop an answer."""
    found = _ids(config.get("eos_token_id")) + _ids(generation.get("eos_token_id"))
    eos = strings.get("eos_token")
    known = _token_ids(tokenizer).get(eos) if eos is not None else None
    if known is not None:
        found.append(known)
    return tuple(dict.fromkeys(found))


def _model_config(folder: Path, supported: Collection[str]) -> tuple[dict[str, Any], bool]:
    """The text model's config, and whether it is one part of the checkpoint."""
    config = _object(folder / "config.json")
    text = text_config(config, str(folder / "config.json"))
    model_type = config.get("model_type")
    if (text or config).get("model_type") not in supported:
        names = ", ".join(str(n) for n in config.get("architectures") or []) or "no architecture"
        raise UnsupportedError(
            f"{folder}: model type {model_type!r} ({names}) is not supported. "
            f"Supported: {', '.join(sorted(supported)) or 'none'}"
        )
    if config.get("is_encoder_decoder"):
        raise UnsupportedError(f"{folder}: encoder-decoder models are not supported")
    if config.get("quantization_config"):
        method = config["quantization_config"]
        kind = method.get("quant_method") if isinstance(method, dict) else method
        raise UnsupportedError(
            f"{folder}: weights quantised by {str(kind)[:40]!r} are not supported. Supported: "
            "F32, F16 and BF16 safetensors, and GGUF files"
        )
    if text is not None:
        return {**text, "_name_or_path": config.get("_name_or_path")}, True
    return config, False


@dataclass(frozen=True, slots=True)
class FolderTexts:
    """The tokenizer and what else a directory says about text; fields as in `Source`."""

    tokenizer_json: bytes | None
    chat_template: str | None
    generation_config: dict[str, Any]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    token_strings: dict[str, str]
    warnings: list[str]


def folder_texts(folder: Path, config: Mapping[str, Any]) -> FolderTexts:
    """Read the tokenizer's files of a directory, whatever format its weights have.

    Raises:
        FormatError: a file is malformed.
    """
    generation = _object(folder / "generation_config.json")
    # special_tokens_map.json is the older place of the token strings.
    tokenizer_config = {
        **_object(folder / "special_tokens_map.json"),
        **_object(folder / "tokenizer_config.json"),
    }
    tokenizer_json = _bytes(folder / "tokenizer.json")
    warnings: list[str] = []
    tokenizer: Any = {}
    if tokenizer_json is not None:
        tokenizer = parse_json(tokenizer_json, str(folder / "tokenizer.json"))
        if not isinstance(tokenizer, dict):
            raise FormatError(f"{folder / 'tokenizer.json'}: not a JSON object")
    else:
        warnings.append(
            f"{folder}: no tokenizer.json: the model takes and gives token ids only. With "
            "transformers, AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one."
        )
    bos_id, add_bos, strings = _start_rule(config, tokenizer, tokenizer_config)
    return FolderTexts(
        tokenizer_json=tokenizer_json,
        chat_template=_template(folder, tokenizer_config),
        generation_config=generation,
        eos_ids=_eos_ids(config, generation, tokenizer, strings),
        bos_id=bos_id,
        add_bos=add_bos,
        token_strings=strings,
        warnings=warnings,
    )


def open_directory(folder: Path, supported: Collection[str]) -> Source:
    """Open a Hugging Face directory; no weight is read.

    Args:
        folder: the directory with config.json.
        supported: model types that Hornito can build.

    Raises:
        FormatError: a file is truncated or inconsistent; names the file and tensor.
        UnsupportedError: a model type, dtype or weight format that is not supported.
    """
    raw_config, is_part = _model_config(folder, supported)
    stored = _shards(folder)
    config = complete_config(raw_config, str(folder / "config.json"), len(stored))
    texts = folder_texts(folder, config)
    warnings = texts.warnings
    tensors: dict[str, LazyTensor] = {}
    left_out = 0
    for name, entry in stored.items():
        own = text_tensor(name) if is_part else name
        if own is None:
            left_out += 1
            continue
        mapped = _model_name(own, config["model_type"])
        if is_ignorable(mapped):
            continue  # a buffer, of whatever type
        tensors[mapped] = mapped_tensor(
            name=mapped,
            file_name=name,
            shape=entry.shape,
            fmt=entry.float_format(),
            file=entry.file,
            data=entry.data,
        )
    if left_out:
        warnings.append(
            f"{folder}: {left_out} tensors of the vision part are left out: text goes in, no images"
        )
    tensors = checked_tensors(config, tensors, str(folder))
    licence = config.get("license")
    title = raw_config.get("_name_or_path") or folder.resolve().name
    return Source(
        model_type=config["model_type"],
        config=config,
        tensors=tensors,
        tokenizer_json=texts.tokenizer_json,
        chat_template=texts.chat_template,
        generation_config=texts.generation_config,
        eos_ids=texts.eos_ids,
        bos_id=texts.bos_id,
        add_bos=texts.add_bos,
        format="safetensors",
        path=str(folder),
        name=title if isinstance(title, str) else None,
        licence=licence if isinstance(licence, str) else None,
        file_tensor_names=tuple(stored),
        warnings=warnings,
        token_strings=texts.token_strings,
    )
