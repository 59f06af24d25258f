"""Llama: pre-norm decoder with grouped-query attention, RoPE and a SiLU-gated MLP.

Source: `LlamaForCausalLM` of transformers.
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
HANDLED = ("attention_bias", "mlp_bias", "rope_scaling")


def build(config: Mapping[str, Any], tensors: Mapping[str, SourceTensor], dtype: str) -> Graph:
    """The graph of a llama checkpoint, before passes.

    Args:
        config: Hugging Face config keys, defaults filled in.
        tensors: by Hugging Face name; projections are `[out, in]`.
        dtype: storage type of matrices, `fp32` or `fp16`.
    """
    check_settings(config, HANDLED)
    b = Builder(config, tensors, dtype)
    heads, eps = Heads.of(config), config["rms_norm_eps"]
    bias, mlp_bias = bool(config["attention_bias"]), bool(config["mlp_bias"])
    act = activation(config)
    rope = rotary(b, dim=heads.dim, theta=config["rope_theta"], scaling=config.get("rope_scaling"))

    x = b.embedding(EMBEDDING)  # [T, H]
    for i in range(config["num_hidden_layers"]):
        layer, name = f"model.layers.{i}", f"layer{i}"
        h = b.rms_norm(f"{name}.attention_norm", x, f"{layer}.input_layernorm.weight", eps)
        qkv = b.qkv(name, h, f"{layer}.self_attn", bias=bias)
        h = b.attention(name, qkv, i, heads, rope=rope)  # [T, heads * D]
        h = b.linear(f"{name}.o", h, f"{layer}.self_attn.o_proj", bias=bias)
        x = b.add(f"{name}.attention_sum", x, h)
        h = b.rms_norm(f"{name}.mlp_norm", x, f"{layer}.post_attention_layernorm.weight", eps)
        h = b.gated_mlp(f"{name}.mlp", h, f"{layer}.mlp", act, bias=mlp_bias)
        x = b.add(f"{name}.mlp_sum", x, h)

    x = b.rms_norm("final_norm", b.selected(x), "model.norm.weight", eps)  # [S, H]
    return b.finish(x, head_table(config, EMBEDDING))
