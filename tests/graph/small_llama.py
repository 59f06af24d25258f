"""A small llama with random weights, its inputs, and its evaluation in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hornito.graph.graph import Graph
from hornito.graph.reference import ReferenceState, evaluate
from hornito.graph.weights import FloatArray, load_all
from hornito.models import llama
from hornito.ops.base import Array

VOCABULARY = 71


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """An importer's tensor with numbers of its own, made on demand."""

    shape: tuple[int, ...]
    seed: int

    def rows(self, start: int, stop: int) -> FloatArray:
        rng = np.random.default_rng(self.seed)
        whole = rng.standard_normal(self.shape, np.float32)
        fan_in = self.shape[-1] if len(self.shape) == 2 else 1
        return np.asarray(whole[start:stop] / np.sqrt(fan_in), np.float32)


def config(**changes: Any) -> dict[str, Any]:
    """A two-layer llama with grouped heads whose width is not heads times head_dim."""
    return {
        "num_hidden_layers": 2,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
    } | changes


def tensors(settings: dict[str, Any]) -> dict[str, RandomTensor]:
    """All tensors of a config, by Hugging Face name."""
    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    q = settings["num_attention_heads"] * settings["head_dim"]
    kv = settings["num_key_value_heads"] * settings["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (settings["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not settings["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (settings["vocab_size"], hidden)
    for i in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        attention = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        for part, shape in attention.items():
            shapes[f"{layer}.self_attn.{part}_proj.weight"] = shape
            if settings["attention_bias"]:
                shapes[f"{layer}.self_attn.{part}_proj.bias"] = shape[:1]
        mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        for part, shape in mlp.items():
            shapes[f"{layer}.mlp.{part}_proj.weight"] = shape
            if settings["mlp_bias"]:
                shapes[f"{layer}.mlp.{part}_proj.bias"] = shape[:1]
    return {name: RandomTensor(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}


def build(dtype: str = "fp32", **changes: Any) -> Graph:
    """The graph before passes."""
    settings = config(**changes)
    return llama.build(settings, tensors(settings), dtype)


def weights(graph: Graph) -> dict[str, Array]:
    """Every weight's numbers."""
    found: dict[str, Array] = {}
    for name, weight in graph.weights.items():
        assert weight.data is not None
        found[name] = load_all(weight.data)
        assert found[name].shape == weight.shape
    return found


def logits(graph: Graph, context: int = 0) -> list[Array]:
    """Prefill of 7 ids with 3 selected rows, then two steps: logits in float64."""
    state, numbers = ReferenceState(context=context), weights(graph)
    calls = (
        ([5, 70, 0, 33, 5, 1, 2], range(7), [0, 3, 6]),
        ([11], [7], [0]),
        ([5], [8], [0]),
    )
    results = []
    for ids, positions, selection in calls:
        inputs: dict[str, Array] = {
            "ids": np.array(ids),
            "positions": np.array(positions),
            "selection": np.array(selection),
        }
        results.append(evaluate(graph, inputs, numbers, state)[graph.outputs[0]])
    return results
