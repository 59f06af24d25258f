"""Gemma 3 (text): Gemma 2 with an RMS norm of each head of q and k instead of the cap on scores,
five sliding layers to one full one, and a RoPE base of its own for the sliding ones. A checkpoint
with a vision part (`gemma3`) gives its text model.

Source: `Gemma3ForCausalLM` of transformers.
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
HANDLED = (
    "attention_bias",
    "final_logit_softcapping",
    "layer_types",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "rope_scaling",
    "sliding_window",
)


def build(config: Mapping[str, Any], tensors: Mapping[str, SourceTensor], dtype: str) -> Graph:
    """The graph of a gemma3_text checkpoint, before passes; see `llama.build` for the arguments."""
    check_settings(config, HANDLED)
    b = Builder(config, tensors, dtype)
    eps, act = config["rms_norm_eps"], activation(config, "hidden_activation")
    bias = bool(config["attention_bias"])
    heads = Heads(
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        scale=float(config["query_pre_attn_scalar"] ** -0.5),
    )
    local = rotary(
        b,
        dim=heads.dim,
        theta=config["rope_local_base_freq"],
        scaling=None,
        name="rope.local_inv_freq",
    )
    whole = rotary(b, dim=heads.dim, theta=config["rope_theta"], scaling=config["rope_scaling"])

    def norm(name: str, x: str, weight: str) -> str:
        return b.rms_norm(name, x, f"{weight}.weight", eps, shift=1.0)

    def head_norm(name: str, x: str, weight: str, count: int) -> str:
        return b.head_norm(name, x, f"{weight}.weight", count, eps, shift=1.0)

    x = b.embedding(EMBEDDING, scale=float(config["hidden_size"] ** 0.5))  # [T, H]
    for i, window in enumerate(windows(config)):
        layer, name = f"model.layers.{i}", f"layer{i}"
        h = norm(f"{name}.attention_norm", x, f"{layer}.input_layernorm")
        q, k, v = b.qkv(name, h, f"{layer}.self_attn", bias=bias)
        q = head_norm(f"{name}.q_norm", q, f"{layer}.self_attn.q_norm", heads.count)
        k = head_norm(f"{name}.k_norm", k, f"{layer}.self_attn.k_norm", heads.kv)
        rope = local if window else whole
        h = b.attention(name, (q, k, v), i, heads, rope=rope, window=window)  # [T, heads * D]
        h = b.linear(f"{name}.o", h, f"{layer}.self_attn.o_proj", bias=bias)
        h = norm(f"{name}.attention_post_norm", h, f"{layer}.post_attention_layernorm")
        x = b.add(f"{name}.attention_sum", x, h)
        h = norm(f"{name}.mlp_norm", x, f"{layer}.pre_feedforward_layernorm")
        h = b.gated_mlp(f"{name}.mlp", h, f"{layer}.mlp", act, bias=False)
        h = norm(f"{name}.mlp_post_norm", h, f"{layer}.post_feedforward_layernorm")
        x = b.add(f"{name}.mlp_sum", x, h)

    x = norm("final_norm", b.selected(x), "model.norm")  # [S, H]
    softcap = float(config["final_logit_softcapping"] or 0.0)
    return b.finish(x, head_table(config, EMBEDDING), softcap=softcap)
