"""Qwen 2 and 2.5: Llama with biases on q, k and v, and sliding windows in some layers.

Source: `Qwen2ForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hornito.graph.graph import Graph
from hornito.models._builder import (
    Builder,
    Heads,
    SourceTensor,
    activation,
    check_settings,
    head_table,
    windows,
)
from hornito.models._rope import rotary

EMBEDDING = "model.embed_tokens.weight"
HANDLED = ("layer_types", "rope_scaling", "sliding_window")


def build(config: Mapping[str, Any], tensors: Mapping[str, SourceTensor], dtype: str) -> Graph:
    """The graph of a qwen2 checkpoint, before passes; see `llama.build` for the arguments."""
    check_settings(config, HANDLED)
    b = Builder(config, tensors, dtype)
    heads, eps = Heads.of(config), config["rms_norm_eps"]
    act = activation(config)
    rope = rotary(b, dim=heads.dim, theta=config["rope_theta"], scaling=config["rope_scaling"])

    x = b.embedding(EMBEDDING)  # [T, H]
    for i, window in enumerate(windows(config)):
        layer, name = f"model.layers.{i}", f"layer{i}"
        h = b.rms_norm(f"{name}.attention_norm", x, f"{layer}.input_layernorm.weight", eps)
        qkv = b.qkv(name, h, f"{layer}.self_attn", bias=True)
        h = b.attention(name, qkv, i, heads, rope=rope, window=window)  # [T, heads * D]
        h = b.linear(f"{name}.o", h, f"{layer}.self_attn.o_proj")
        x = b.add(f"{name}.attention_sum", x, h)
        h = b.rms_norm(f"{name}.mlp_norm", x, f"{layer}.post_attention_layernorm.weight", eps)
        h = b.gated_mlp(f"{name}.mlp", h, f"{layer}.mlp", act, bias=False)
        x = b.add(f"{name}.mlp_sum", x, h)

    x = b.rms_norm("final_norm", b.selected(x), "model.norm.weight", eps)  # [S, H]
    return b.finish(x, head_table(config, EMBEDDING))
