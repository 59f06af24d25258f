"""Qwen 3: Llama with an RMS norm of each head of q and k before RoPE; heads times their size need
not be the hidden size.

Source: `Qwen3ForCausalLM` of transformers.
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
HANDLED = ("attention_bias", "layer_types", "rope_scaling", "sliding_window")


def build(config: Mapping[str, Any], tensors: Mapping[str, SourceTensor], dtype: str) -> Graph:
    """The graph of a qwen3 checkpoint, before passes; see `llama.build` for the arguments."""
    check_settings(config, HANDLED)
    b = Builder(config, tensors, dtype)
    heads, eps = Heads.of(config), config["rms_norm_eps"]
    act, bias = activation(config), bool(config["attention_bias"])
    rope = rotary(b, dim=heads.dim, theta=config["rope_theta"], scaling=config["rope_scaling"])

    x = b.embedding(EMBEDDING)  # [T, H]
    for i, window in enumerate(windows(config)):
        layer, name = f"model.layers.{i}", f"layer{i}"
        h = b.rms_norm(f"{name}.attention_norm", x, f"{layer}.input_layernorm.weight", eps)
        q, k, v = b.qkv(name, h, f"{layer}.self_attn", bias=bias)
        norms = f"{layer}.self_attn"  # [D] each
        q = b.head_norm(f"{name}.q_norm", q, f"{norms}.q_norm.weight", heads.count, eps)
        k = b.head_norm(f"{name}.k_norm", k, f"{norms}.k_norm.weight", heads.kv, eps)
        h = b.attention(name, (q, k, v), i, heads, rope=rope, window=window)  # [T, heads * D]
        h = b.linear(f"{name}.o", h, f"{layer}.self_attn.o_proj", bias=bias)
        x = b.add(f"{name}.attention_sum", x, h)
        h = b.rms_norm(f"{name}.mlp_norm", x, f"{layer}.post_attention_layernorm.weight", eps)
        h = b.gated_mlp(f"{name}.mlp", h, f"{layer}.mlp", act, bias=False)
        x = b.add(f"{name}.mlp_sum", x, h)

    x = b.rms_norm("final_norm", b.selected(x), "model.norm.weight", eps)  # [S, H]
    return b.finish(x, head_table(config, EMBEDDING))
