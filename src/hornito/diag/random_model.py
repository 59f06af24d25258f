"""Models with random weights: a tiny one to test kernels with, and the shapes of known ones.

Speed does not depend on the weights, and a device that computes right gives the same tokens as the
numpy evaluator whatever they are.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.compiler import build_graph, write_graph
from hornito.errors import UsageError
from hornito.importers import Source

# hidden, intermediate, layers, heads, kv_heads, vocabulary, tied head
SHAPES = {
    "tiny": (256, 640, 2, 8, 2, 3000, False),
    "layer": (896, 4864, 1, 14, 2, 4096, True),
    "0.1b": (576, 1536, 30, 9, 3, 49152, True),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}
"""`layer` is one layer of the 0.5b model, with a small vocabulary."""


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """Normal values from a fixed pool from another place on in every block."""

    shape: tuple[int, ...]
    pool: npt.NDArray[np.float32]

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows as fp32, or values of a vector."""
        count = (stop - start) * math.prod(self.shape[1:])
        first = (start * 7919 + self.shape[0]) % (len(self.pool) // 2)
        values = self.pool[first : first + count]
        if len(values) < count:
            values = np.resize(values, count)
        return values.reshape(stop - start, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class Ones:
    """The weight of a norm."""

    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Values of a vector."""
        return np.ones(stop - start, np.float32)


def random_source(shape: str, context: int, deviation: float = 0.02) -> Source:
    """A qwen2 source of the named shape.

    Args:
        deviation: standard deviation of the weights; a larger one tells tokens further apart.

    Raises:
        UsageError: there is no such shape.
    """
    if shape not in SHAPES:
        raise UsageError(f"no shape {shape!r}; there are: {', '.join(SHAPES)}")
    hidden, inner, layers, heads, kv_heads, vocabulary, tied = SHAPES[shape]
    head_dim = hidden // heads
    config: dict[str, Any] = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "sliding_window": None,
        "layer_types": ["full_attention"] * layers,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    norms = ["model.norm.weight"]
    for i in range(layers):
        p = f"model.layers.{i}."
        shapes |= {
            f"{p}self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{p}self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{p}self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{p}self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{p}mlp.gate_proj.weight": (inner, hidden),
            f"{p}mlp.up_proj.weight": (inner, hidden),
            f"{p}mlp.down_proj.weight": (hidden, inner),
            f"{p}self_attn.q_proj.bias": (heads * head_dim,),
            f"{p}self_attn.k_proj.bias": (kv_heads * head_dim,),
            f"{p}self_attn.v_proj.bias": (kv_heads * head_dim,),
        }
        norms += [f"{p}input_layernorm.weight", f"{p}post_attention_layernorm.weight"]
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    size = min(1 << 23, 2 * max(math.prod(sizes) for sizes in shapes.values()))
    pool = np.random.default_rng(0).normal(0.0, deviation, size).astype(np.float32)
    tensors: dict[str, Any] = {name: RandomTensor(s, pool) for name, s in shapes.items()}
    tensors |= {name: Ones((hidden,)) for name in norms}
    return Source(
        model_type="qwen2",
        config=config,
        tensors=tensors,
        tokenizer_json=None,
        chat_template=None,
        generation_config={},
        eos_ids=(),
        bos_id=None,
        add_bos=False,
        format="random",
        path=f"random {shape}",
        file_tensor_names=tuple(tensors),
    )


def write_random_model(
    shape: str,
    out: str | os.PathLike[str],
    *,
    weights: str,
    context: int = 8192,
    deviation: float = 0.02,
) -> int:
    """Write a package of the named shape; returns its bytes."""
    source = random_source(shape, context, deviation)
    graph, before, passes = build_graph(source, weights)
    return write_graph(out, source, graph, weights, before, passes)
