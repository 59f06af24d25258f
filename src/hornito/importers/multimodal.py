"""Checkpoints in which the text model is one part: its config, and its tensors by their own names.

Gemma 3 from 4B on is published so (`gemma3`, with `text_config`), beside a vision tower.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hornito.errors import FormatError

#: Sizes of transformers' Gemma3TextConfig; published files leave out what equals them.
_GEMMA3_SIZES: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}
#: By the whole's model type: the part's model type and the sizes that its config may leave out.
_WHOLES = {"gemma3": ("gemma3_text", _GEMMA3_SIZES)}
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."))


def text_config(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The config of the text model, or None for a checkpoint that is nothing else.

    Token ids that only the whole states are kept.

    Raises:
        FormatError: there should be a text_config, and there is none.
    """
    whole = config.get("model_type")
    if not isinstance(whole, str) or whole not in _WHOLES:
        return None
    part, sizes = _WHOLES[whole]
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise FormatError(f"{where}: a {whole} model without text_config")
    outer = {key: config[key] for key in ("eos_token_id", "bos_token_id") if key in config}
    ties = {"tie_word_embeddings": config.get("tie_word_embeddings", True)}
    return {**sizes, **ties, **text, **outer, "model_type": part}


def text_tensor(name: str) -> str | None:
    """The name that the text model's tensor has in a checkpoint of its own; None for the tensor of
    another part."""
    if _OTHER_PARTS.match(name):
        return None
    for prefix, own in _PREFIXES:
        if name.startswith(prefix):
            return own + name[len(prefix) :]
    return "lm_head.weight" if name == "language_model.lm_head.weight" else name
