"""Llama: pre-norm decoder with grouped-query attention, RoPE and a SiLU-gated MLP.

Source: `LlamaForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hornito.graph.graph import Graph
from hornito.models._builder import Builder, SourceTensor, activation, refuse
from hornito.models._rope import inverse_frequencies


def build(config: Mapping[str, Any], tensors: Mapping[str, SourceTensor], dtype: str) -> Graph:
    """The graph of a llama checkpoint, before passes.

    Args:
        config: Hugging Face config keys, defaults filled in.
        tensors: by Hugging Face name; projections are `[out, in]`.
        dtype: storage type of matrices, `fp32` or `fp16`.
    """
    refuse(config, ["sliding_window"])
    b = Builder(config, tensors, dtype)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, eps = config["head_dim"], config["rms_norm_eps"]
    bias, mlp_bias = bool(config["attention_bias"]), bool(config["mlp_bias"])
    act = activation(config)
    frequencies = inverse_frequencies(config, tensors, head_dim, config["rope_theta"])
    inv_freq = b.constant("rope.inv_freq", frequencies)  # [D / 2]
    g = b.graph

    x = b.embedding("model.embed_tokens.weight")  # [T, H]
    for i in range(config["num_hidden_layers"]):
        layer, name = f"model.layers.{i}", f"layer{i}"
        h = b.rms_norm(f"{name}.attention_norm", x, f"{layer}.input_layernorm.weight", eps)
        q = b.linear(f"{name}.q", h, f"{layer}.self_attn.q_proj", bias=bias)  # [T, heads * D]
        k = b.linear(f"{name}.k", h, f"{layer}.self_attn.k_proj", bias=bias)
        v = b.linear(f"{name}.v", h, f"{layer}.self_attn.v_proj", bias=bias)
        q = b.rope(f"{name}.q_rope", q, heads, head_dim, inv_freq)
        k = b.rope(f"{name}.k_rope", k, kv_heads, head_dim, inv_freq)
        shape = {"layer": i, "kv_heads": kv_heads, "head_dim": head_dim}
        cache = g.add("kv_append", f"{name}.cache", [k, v], shape)
        attrs = {
            **shape,
            "heads": heads,
            "scale": head_dim**-0.5,
            "window": 0,
            "softcap": 0.0,
        }
        h = g.add("attention", f"{name}.attention", [q, cache], attrs)
        h = b.linear(f"{name}.o", h, f"{layer}.self_attn.o_proj", bias=bias)
        x = b.add(f"{name}.attention_sum", x, h)
        h = b.rms_norm(f"{name}.mlp_norm", x, f"{layer}.post_attention_layernorm.weight", eps)
        h = b.gated_mlp(f"{name}.mlp", h, f"{layer}.mlp", act, bias=mlp_bias)
        x = b.add(f"{name}.mlp_sum", x, h)

    tied = config["tie_word_embeddings"]
    table = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return b.finish(x, "model.norm.weight", eps, table)
