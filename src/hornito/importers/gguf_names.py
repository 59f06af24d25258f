"""Names and keys of GGUF for each architecture, turned into Hugging Face's.

This is the only place that knows them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hornito.errors import FormatError, UnsupportedError
from hornito.importers.families import decimal

_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_LAYER = {
    **_LLAMA_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GPT2_MODEL = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
#: Tensors that are settings rather than weights; `rope_settings` reads them.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYER_NAME = re.compile(r"blk\.(\d{1,6})\.([a-z0-9_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Keys:
    """Typed access to the metadata of a GGUF file, under the prefix of its architecture."""

    path: str
    architecture: str
    metadata: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """The value of `<architecture>.<key>`, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def fail(self, key: str, what: str) -> FormatError:
        """An error about a key."""
        return FormatError(f"{self.path}: key {self.architecture}.{key} {what}")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero; a per-layer array must hold one value throughout."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size:
            if not np.all(value == value[0]):
                raise UnsupportedError(
                    f"{self.path}: {self.architecture}.{key} differs from layer to layer, "
                    "which is not supported"
                )
            value = int(value[0])
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(key, f"is {str(value)[:40]}; a whole number above zero is needed")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number above zero, in the decimal form that the float32 stands for."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"is {str(value)[:40]}, not a number")
        if not math.isfinite(value) or value <= 0 or value > 1e30:
            raise self.fail(key, f"is {value}; a finite number above zero is needed")
        return decimal(value)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a GGUF architecture maps to a Hugging Face family.

    Attributes:
        model_type: Hugging Face's name of the family.
        model: names outside the layers.
        layer: names inside a layer.
        layer_prefix: Hugging Face's prefix of layer names.
        permuted: whether rows of q and k are stored for adjacent-pair RoPE.
        norm_shift: what to add to norm weights to get Hugging Face's.
        transpose: layer tensors whose matrix is stored transposed.
        extra: further config keys, from the metadata.
    """

    model_type: str
    layer: Mapping[str, str]
    model: Mapping[str, str] = field(default_factory=lambda: _MODEL)
    layer_prefix: str = "model.layers"
    permuted: bool = False
    norm_shift: float = 0.0
    transpose: frozenset[str] = frozenset()
    extra: Callable[[Keys, dict[str, Any]], None] | None = None

    def name(self, file_name: str) -> str | None:
        """Hugging Face's name of a tensor, or None when the family has no such tensor."""
        match = _LAYER_NAME.fullmatch(file_name)
        if match:
            inner = self.layer.get(match[2])
            return f"{self.layer_prefix}.{int(match[1])}.{inner}.{match[3]}" if inner else None
        stem, _, kind = file_name.rpartition(".")
        outer = self.model.get(stem)
        return f"{outer}.{kind}" if outer and kind in ("weight", "bias") else None


def _window(keys: Keys, config: dict[str, Any]) -> None:
    # Mistral's files come under Llama's name; without a window the two are one model.
    if keys.get("attention.sliding_window"):
        config["model_type"] = "mistral"
        config["sliding_window"] = keys.count("attention.sliding_window")


def _phi3(keys: Keys, config: dict[str, Any]) -> None:
    config["sliding_window"] = None
    if keys.get("attention.sliding_window"):
        config["sliding_window"] = keys.count("attention.sliding_window")
    config["original_max_position_embeddings"] = keys.count(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )


def _smollm3(keys: Keys, config: dict[str, Any]) -> None:
    config["no_rope_layer_interval"] = 4


def _gemma_scale(keys: Keys, config: dict[str, Any], largest: int) -> None:
    """The 27B models scale queries by hidden / heads, all others by the head's size."""
    config["query_pre_attn_scalar"] = config["head_dim"]
    if config["num_hidden_layers"] == largest:
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["sliding_window"] = keys.count("attention.sliding_window", 4096)


def _gemma2(keys: Keys, config: dict[str, Any]) -> None:
    _gemma_scale(keys, config, 46)
    config["attn_logit_softcapping"] = keys.real("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = keys.real("final_logit_softcapping", 30.0)


def _gemma3(keys: Keys, config: dict[str, Any]) -> None:
    _gemma_scale(keys, config, 62)
    config["rope_local_base_freq"] = keys.real("rope.freq_base_swa", 1e4)
    config["rope_theta"] = keys.real("rope.freq_base", 1e6)
    config["attn_logit_softcapping"] = None
    config["final_logit_softcapping"] = None
    if keys.get("final_logit_softcapping"):
        config["final_logit_softcapping"] = keys.real("final_logit_softcapping")


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA_LAYER, permuted=True, extra=_window),
    "qwen2": Architecture("qwen2", _LLAMA_LAYER),
    "qwen3": Architecture("qwen3", {**_LLAMA_LAYER, **_HEAD_NORMS}),
    "phi3": Architecture("phi3", _PHI3_LAYER, extra=_phi3),
    "smollm3": Architecture("smollm3", _LLAMA_LAYER, permuted=True, extra=_smollm3),
    "gpt2": Architecture(
        "gpt2",
        _GPT2_LAYER,
        model=_GPT2_MODEL,
        layer_prefix="transformer.h",
        transpose=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
    "gemma2": Architecture("gemma2", _GEMMA_LAYER, norm_shift=-1.0, extra=_gemma2),
    "gemma3": Architecture(
        "gemma3_text", {**_GEMMA_LAYER, **_HEAD_NORMS}, norm_shift=-1.0, extra=_gemma3
    ),
}


_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def generation_of(path: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json that the keys `general.sampling.*` stand for."""
    found: dict[str, Any] = {}
    for theirs, ours in _SAMPLING.items():
        key = f"general.sampling.{theirs}"
        value = metadata.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FormatError(f"{path}: key {key} is {str(value)[:40]}, not a number")
        if not math.isfinite(value):
            raise FormatError(f"{path}: key {key} is {value}")
        found[ours] = value if isinstance(value, int) else decimal(value)
    return found


def layer_part(file_name: str) -> tuple[str, str] | None:
    """`('attn_q', 'weight')` of a layer tensor's name, else None."""
    match = _LAYER_NAME.fullmatch(file_name)
    return (match[2], match[3]) if match else None


def _gpt2_config(keys: Keys) -> dict[str, Any]:
    hidden = keys.count("embedding_length")
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": keys.count("block_count"),
        "n_head": keys.count("attention.head_count"),
        "n_positions": keys.count("context_length"),
        "n_inner": keys.count("feed_forward_length", 4 * hidden),
        "layer_norm_epsilon": keys.real("attention.layer_norm_epsilon", 1e-5),
        "activation_function": "gelu_new",
    }


def config_of(keys: Keys, names: frozenset[str]) -> dict[str, Any]:
    """The config.json that the metadata stands for, without vocabulary and RoPE scaling.

    Args:
        keys: the file's metadata.
        names: the file's tensor names (biases and a head show there, not in the keys).

    Raises:
        FormatError: a key is missing or no usable number.
        UnsupportedError: experts, or sizes that the family can't express.
    """
    arch = ARCHITECTURES[keys.architecture]
    if keys.get("expert_count"):
        raise UnsupportedError(
            f"{keys.path}: a mixture of {keys.get('expert_count')} experts is not supported; "
            "supported are dense models"
        )
    if arch.model_type == "gpt2":
        config = _gpt2_config(keys)
    else:
        hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
        head_dim = keys.count("attention.key_length", max(1, hidden // heads))
        value_dim = keys.count("attention.value_length", max(1, hidden // heads))
        if value_dim != head_dim:
            raise UnsupportedError(
                f"{keys.path}: keys of {head_dim} and values of {value_dim} dimensions a head: "
                "different sizes are not supported"
            )
        config = {
            "model_type": arch.model_type,
            "hidden_size": hidden,
            "intermediate_size": keys.count("feed_forward_length"),
            "num_hidden_layers": keys.count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": keys.count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": keys.count("context_length"),
            "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
            "rope_theta": keys.real("rope.freq_base", 1e4),
            "hidden_act": "silu",
            "attention_bias": "blk.0.attn_output.bias" in names,
            "mlp_bias": "blk.0.ffn_down.bias" in names,
        }
        rotary = keys.count("rope.dimension_count", head_dim)
        if arch.model_type == "phi3":
            config["partial_rotary_factor"] = rotary / head_dim
        elif rotary != head_dim:
            raise UnsupportedError(
                f"{keys.path}: RoPE over {rotary} of {head_dim} dimensions is not supported for "
                f"{keys.architecture}"
            )
    config["tie_word_embeddings"] = "output.weight" not in names
    if arch.extra is not None:
        arch.extra(keys, config)
    return config
