"""Phi 3 and 4: Llama with q, k and v in one tensor, gate and up in another, RoPE on a part of each
head, long contexts by longrope, and a sliding window in every layer.

The joined tensors are cut into rows here and joined again by the passes, in the order that the
kernels want.

Source: `Phi3ForCausalLM` of transformers.
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
)
from hornito.models._rope import rotary

EMBEDDING = "model.embed_tokens.weight"
HANDLED = ("partial_rotary_factor", "rope_scaling", "sliding_window")


def build(config: Mapping[str, Any], tensors: Mapping[str, SourceTensor], dtype: str) -> Graph:
    """The graph of a phi3 checkpoint, before passes; see `llama.build` for the arguments."""
    check_settings(config, HANDLED)
    b = Builder(config, tensors, dtype)
    heads, eps = Heads.of(config), config["rms_norm_eps"]
    act, window, inner = (
        activation(config),
        config["sliding_window"] or 0,
        config["intermediate_size"],
    )
    rotary_dim = int(heads.dim * config["partial_rotary_factor"])
    rope = rotary(b, dim=rotary_dim, theta=config["rope_theta"], scaling=config["rope_scaling"])
    first_k = heads.count * heads.dim
    first_v = first_k + heads.kv * heads.dim
    spans = {"q": (0, first_k), "k": (first_k, first_v), "v": (first_v, 2 * first_v - first_k)}

    x = b.embedding(EMBEDDING)  # [T, H]
    for i in range(config["num_hidden_layers"]):
        layer, name = f"model.layers.{i}", f"layer{i}"
        h = b.rms_norm(f"{name}.attention_norm", x, f"{layer}.input_layernorm.weight", eps)
        joined = f"{layer}.self_attn.qkv_proj"  # [(heads + 2 kv_heads) * D, H]
        q, k, v = (b.linear(f"{name}.{p}", h, joined, rows=span) for p, span in spans.items())
        h = b.attention(name, (q, k, v), i, heads, rope=rope, window=window)  # [T, heads * D]
        h = b.linear(f"{name}.o", h, f"{layer}.self_attn.o_proj")
        x = b.add(f"{name}.attention_sum", x, h)
        h = b.rms_norm(f"{name}.mlp_norm", x, f"{layer}.post_attention_layernorm.weight", eps)
        joined = f"{layer}.mlp.gate_up_proj"  # [2 * I, H]
        gate = b.linear(f"{name}.mlp.gate", h, joined, rows=(0, inner))
        up = b.linear(f"{name}.mlp.up", h, joined, rows=(inner, 2 * inner))
        h = b.gated(f"{name}.mlp.gated", gate, up, act)  # [T, I]
        h = b.linear(f"{name}.mlp.down", h, f"{layer}.mlp.down_proj")
        x = b.add(f"{name}.mlp_sum", x, h)

    x = b.rms_norm("final_norm", b.selected(x), "model.norm.weight", eps)  # [S, H]
    return b.finish(x, head_table(config, EMBEDDING))
