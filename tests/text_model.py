"""Tiny models with vocabularies and chat templates, as GGUF or directories, of random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_samples import HF, TEMPLATE, tiny_vocabulary, write_checkpoint
from hornito.importers.tokenizer import read_vocabulary

DEFAULT_SYSTEM = "You are the default."

#: Like Qwen's: a system message of its own where the conversation has none.
SYSTEM_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\n" + DEFAULT_SYSTEM + "<|im_end|>\\n' }}{% endif %}" + TEMPLATE
)

#: Like Gemma's: no system role, turns must alternate.
STRICT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_text_model(
    path: Path, *, template: str | None = TEMPLATE, name: str = "llama-tiny"
) -> Path:
    """A byte-level BPE model; template None: without one."""
    pytest.importorskip("gguf")
    keys = tiny_vocabulary()
    if template is None:
        del keys["tokenizer.chat_template"]
    else:
        keys["tokenizer.chat_template"] = template
    return write_checkpoint(path, name, vocabulary=keys)


def tokenizer_json(keys: dict[str, Any] | None = None) -> bytes:
    """The byte-level vocabulary as a tokenizer.json; `keys` as of `tiny_vocabulary`."""
    keys = dict(keys or tiny_vocabulary())
    keys["tokenizer.ggml.token_type"] = np.array(keys["tokenizer.ggml.token_type"], np.int32)
    found = read_vocabulary("m.gguf", keys, [])
    assert found is not None
    return found.to_json()


def write_text_directory(folder: Path, name: str, *, template: str = TEMPLATE) -> Path:
    """A checkpoint of tests/data/hf with that vocabulary, as a Hugging Face directory."""
    shutil.copytree(HF / name, folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_sentencepiece_model(path: Path) -> Path:
    """A SentencePiece model in whose vocabulary every piece but the bytes begins with a space.

    Ids: 0 <unk>, 1 <s>, 2 </s>, 3 to 258 the bytes, then pieces.
    """
    pytest.importorskip("gguf")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [2, 3, 3] + [6] * 256
    pieces = [f"\u2581w{i}" for i in range(512 - len(tokens))]
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + pieces,
        "tokenizer.ggml.token_type": types + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0 - i for i in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]"
        "{{ m['content'] }}{% endfor %}[assistant]",
    }
    return write_checkpoint(path, "llama-tiny", vocabulary=keys)
