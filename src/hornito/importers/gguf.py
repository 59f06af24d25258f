"""GGUF files as a `Source`: Hugging Face's config keys, tensor names, tokenizer and template."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from hornito.errors import FormatError, UnsupportedError
from hornito.importers.families import checked_tensors, complete_config
from hornito.importers.gguf_file import GGUFFile, read_gguf
from hornito.importers.gguf_names import (
    ARCHITECTURES,
    ROPE_TENSORS,
    Architecture,
    Keys,
    config_of,
    generation_of,
    layer_part,
)
from hornito.importers.gguf_rope import FREQ_FACTORS, rope_settings
from hornito.importers.source import (
    LazyTensor,
    Source,
    mapped_tensor,
    shifted,
    transposed,
    unpermuted,
)
from hornito.importers.tokenizer import Vocabulary, read_vocabulary


def _architecture(file: GGUFFile, supported: Collection[str]) -> tuple[str, Architecture]:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise FormatError(f"{file.path}: key general.architecture is missing or no text")
    usable = sorted(key for key, arch in ARCHITECTURES.items() if arch.model_type in supported)
    arch = ARCHITECTURES.get(name)
    if arch is None or name not in usable:
        raise UnsupportedError(
            f"{file.path}: GGUF architecture '{name[:60]}' is not supported. "
            f"Supported: {', '.join(usable) or 'none'}"
        )
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedError(
            f"{file.path}: holds a '{str(kind)[:40]}', not a model; give the model's own file"
        )
    parts = file.metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedError(
            f"{file.path}: one of {parts} parts of a split model, which is not supported. "
            "Join them first: llama-gguf-split --merge FIRST_PART OUT.gguf"
        )
    return name, arch


def _config_from_rows(keys: Keys, file: GGUFFile, vocabulary: Vocabulary | None) -> int:
    """The vocabulary's size: of the tokens if there are any, else of the embedding table."""
    if vocabulary is not None:
        return vocabulary.size
    if keys.get("vocab_size") is not None:
        return keys.count("vocab_size")
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise FormatError(f"{file.path}: missing tensor 'token_embd.weight'")
    return table.shape[0]


def _tensor(
    file: GGUFFile, arch: Architecture, file_name: str, name: str, config: dict[str, Any]
) -> LazyTensor:
    """One tensor under its Hugging Face name, with what the converter did to it undone."""
    entry = file.tensors[file_name]
    tensor = mapped_tensor(
        name=name,
        file_name=file_name,
        shape=entry.shape,
        fmt=entry.fmt,
        file=file.path,
        data=entry.data,
    )
    part = layer_part(file_name)
    if arch.permuted and part and part[0] in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part[0] == "attn_q" else "num_key_value_heads"]
        # A tensor whose rows do not fit the heads is refused by its shape later.
        if entry.shape[0] == heads * config["head_dim"]:
            tensor = unpermuted(tensor, heads)
    if part and part[0] in arch.transpose and part[1] == "weight" and len(entry.shape) == 2:
        tensor = transposed(tensor)
    if arch.norm_shift and name.endswith("norm.weight"):
        tensor = shifted(tensor, arch.norm_shift)
    return tensor


def _same_table(file: GGUFFile) -> bool:
    """Whether the head is a byte-for-byte copy of the embedding table."""
    head, table = file.tensors["output.weight"], file.tensors.get("token_embd.weight")
    return (
        table is not None
        and head.fmt is table.fmt
        and head.shape == table.shape
        and bool(np.array_equal(head.data, table.data))
    )


def open_gguf(path: Path, supported: Collection[str]) -> Source:
    """Open a GGUF file; no weight is read.

    Args:
        path: the file.
        supported: model types that Hornito can build.

    Raises:
        FormatError: truncated or inconsistent; names the key or tensor.
        UnsupportedError: an architecture, tensor type or layout that is not supported.
    """
    file = read_gguf(path)
    name, arch = _architecture(file, supported)
    keys = Keys(file.path, name, file.metadata)
    names = frozenset(file.tensors)
    warnings: list[str] = []
    vocabulary = read_vocabulary(file.path, file.metadata, warnings)
    config = config_of(keys, names)
    if config["model_type"] not in supported:
        raise UnsupportedError(
            f"{file.path}: it holds a {config['model_type']} model, which is not supported. "
            f"Supported: {', '.join(sorted(supported))}"
        )
    config["vocab_size"] = _config_from_rows(keys, file, vocabulary)
    # GPT-2's converter writes the tied table twice.
    if arch.model_type == "gpt2" and "output.weight" in names:
        config["tie_word_embeddings"] = _same_table(file)
    config = complete_config(config, file.path, len(names))
    tensors: dict[str, LazyTensor] = {}
    for file_name in file.tensors:
        mapped = arch.name(file_name) or file_name
        tensors[mapped] = _tensor(file, arch, file_name, mapped, config)
    rope = {key: tensors.pop(key) for key in ROPE_TENSORS if key in tensors}
    if arch.model_type != "gpt2":
        config["rope_scaling"] = rope_settings(keys, config, rope)
    scaling = config.get("rope_scaling")
    extra: frozenset[str] = frozenset()
    if scaling is not None and scaling["rope_type"] == FREQ_FACTORS:
        extra = frozenset({scaling["tensor"]})
        tensors.update((key, rope[key]) for key in extra)
    tensors = checked_tensors(config, tensors, file.path, extra)
    if vocabulary is not None:
        config["bos_token_id"] = vocabulary.bos_id
        config["eos_token_id"] = list(vocabulary.eos_ids) or None
    title, licence = file.metadata.get("general.name"), file.metadata.get("general.license")
    return Source(
        model_type=config["model_type"],
        config=config,
        tensors=tensors,
        tokenizer_json=vocabulary.to_json() if vocabulary else None,
        chat_template=vocabulary.chat_template if vocabulary else None,
        generation_config=generation_of(file.path, file.metadata),
        eos_ids=vocabulary.eos_ids if vocabulary else (),
        bos_id=vocabulary.bos_id if vocabulary else None,
        add_bos=vocabulary.add_bos if vocabulary else False,
        format="gguf",
        path=file.path,
        name=title if isinstance(title, str) else None,
        licence=licence if isinstance(licence, str) else None,
        file_tensor_names=tuple(file.tensors),
        warnings=warnings,
        token_strings=vocabulary.token_strings() if vocabulary else {},
    )
