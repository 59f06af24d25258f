"""GPT-2: learned positions, layer norms with bias, a plain MLP, weights stored `[in, out]`.

Source: `GPT2LMHeadModel` of transformers.
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

EMBEDDING = "transformer.wte.weight"
HANDLED = ("scale_attn_by_inverse_layer_idx",)


def build(config: Mapping[str, Any], tensors: Mapping[str, SourceTensor], dtype: str) -> Graph:
    """The graph of a gpt2 checkpoint, before passes.

    Args:
        config: Hugging Face config keys, defaults filled in.
        tensors: by Hugging Face name; matrices of layers are `[in, out]`.
        dtype: storage type of matrices, `fp32` or `fp16`.
    """
    check_settings(config, HANDLED)
    b = Builder(config, tensors, dtype)
    hidden, count = config["n_embd"], config["n_head"]
    eps, act = config["layer_norm_epsilon"], activation(config, "activation_function")
    scale = (hidden // count) ** -0.5 if config["scale_attn_weights"] else 1.0
    by_layer = config["scale_attn_by_inverse_layer_idx"]
    spans = {part: (i * hidden, (i + 1) * hidden) for i, part in enumerate("qkv")}
    g = b.graph

    x = b.embedding(EMBEDDING)  # [T, H]
    places = "transformer.wpe.weight"  # [P, H]
    inputs = [x, b.positions, b.weight(places)]
    x = g.add("position_embedding", "positioned", inputs, covers=[places])
    for i in range(config["n_layer"]):
        layer, name = f"transformer.h.{i}", f"layer{i}"
        layer_scale = scale / (i + 1) if by_layer else scale
        heads = Heads(count, count, hidden // count, layer_scale)
        h = b.layer_norm(f"{name}.attention_norm", x, f"{layer}.ln_1", eps)
        joined = f"{layer}.attn.c_attn"  # [H, 3 * H]
        q, k, v = (b.conv1d(f"{name}.{p}", h, joined, columns=s) for p, s in spans.items())
        h = b.attention(name, (q, k, v), i, heads, rope=None)  # [T, H]
        h = b.conv1d(f"{name}.o", h, f"{layer}.attn.c_proj")
        x = b.add(f"{name}.attention_sum", x, h)
        h = b.layer_norm(f"{name}.mlp_norm", x, f"{layer}.ln_2", eps)
        h = b.conv1d(f"{name}.mlp.up", h, f"{layer}.mlp.c_fc")  # [T, I]
        h = g.add("activation", f"{name}.mlp.activation", [h], {"activation": act})
        h = b.conv1d(f"{name}.mlp.down", h, f"{layer}.mlp.c_proj")
        x = b.add(f"{name}.mlp_sum", x, h)

    x = b.layer_norm("final_norm", b.selected(x), "transformer.ln_f", eps)  # [S, H]
    return b.finish(x, head_table(config, EMBEDDING))
