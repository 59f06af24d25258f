"""One-node graphs of every op, for the tests of kernels, references and SPIR-V."""

from __future__ import annotations

import numpy as np

from hornito.graph.graph import CACHE, FLOAT, INT, Graph, Node, Weight
from hornito.graph.shapes import S, T


def _graph() -> Graph:
    graph = Graph()
    graph.add_input("ids", INT, (T,))
    graph.add_input("positions", INT, (T,))
    graph.add_input("selection", INT, (S,))
    return graph


def linear(
    n: int, k: int, dtype: str = "fp32", *, bias: bool = False, residual: bool = False
) -> Graph:
    """`y = x @ w.T (+ bias) (+ residual)`."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, k))
    graph.add_weight("w", Weight((n, k), dtype, matrix=True))
    if bias:
        graph.add_weight("b", Weight((n,), "fp32"))
    if residual:
        graph.add_input("r", FLOAT, (T, n))
    graph.add("linear", "y", ["x", "w", "b" if bias else "", "r" if residual else ""])
    return graph


def gated_linear(
    n: int, k: int, dtype: str = "fp32", *, activation: str = "silu", bias: bool = False
) -> Graph:
    """`y = activation(x @ gate.T) * (x @ up.T)`, `n` outputs; rows of w are gate and up in turn."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, k))
    graph.add_weight("w", Weight((2 * n, k), dtype, matrix=True))
    if bias:
        graph.add_weight("b", Weight((2 * n,), "fp32"))
    graph.add("gated_linear", "y", ["x", "w", "b" if bias else ""], {"activation": activation})
    return graph


def add(width: int) -> Graph:
    """`y = a + b`."""
    graph = _graph()
    graph.add_input("a", FLOAT, (T, width))
    graph.add_input("b", FLOAT, (T, width))
    graph.add("add", "y", ["a", "b"])
    return graph


def gated_activation(width: int, activation: str) -> Graph:
    """`y = activation(gate) * up`."""
    graph = _graph()
    graph.add_input("gate", FLOAT, (T, width))
    graph.add_input("up", FLOAT, (T, width))
    graph.add("gated_activation", "y", ["gate", "up"], {"activation": activation})
    return graph


def rms_norm(width: int, *, eps: float = 1e-5, select: bool = False) -> Graph:
    """`y = norm(x)`, of the selected rows with `select`."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, width))
    graph.add_weight("w", Weight((width,), "fp32"))
    graph.add("rms_norm", "y", ["x", "w", "selection" if select else ""], {"eps": eps})
    return graph


def select_rows(width: int) -> Graph:
    """`y = x[selection]`."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, width))
    graph.add("select_rows", "y", ["x", "selection"])
    return graph


def embedding(vocabulary: int, width: int, dtype: str) -> Graph:
    """`y = table[ids]`."""
    graph = _graph()
    graph.add_weight("table", Weight((vocabulary, width), dtype, matrix=True))
    graph.add("embedding", "y", ["ids", "table"])
    return graph


def rope(heads: int, head_dim: int, half_dim: int, scale: float = 1.0) -> Graph:
    """`y = x` turned."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, heads * head_dim))
    graph.add_weight("inv_freq", Weight((half_dim,), "fp32"))
    attrs = {"heads": heads, "head_dim": head_dim, "scale": scale}
    graph.add("rope", "y", ["x", "positions", "inv_freq"], attrs)
    return graph


def kv_append(kv_heads: int, head_dim: int) -> Graph:
    """k and v into the cache of layer 0."""
    graph = _graph()
    graph.add_input("k", FLOAT, (T, kv_heads * head_dim))
    graph.add_input("v", FLOAT, (T, kv_heads * head_dim))
    attrs = {"layer": 0, "kv_heads": kv_heads, "head_dim": head_dim}
    graph.add("kv_append", "cache", ["k", "v"], attrs)
    return graph


def rope_append(
    heads: int, kv_heads: int, head_dim: int, half_dim: int, scale: float = 1.0
) -> Graph:
    """The fused row `[q; k; v]` into `y` and the cache of layer 0."""
    graph = _graph()
    graph.add_input("qkv", FLOAT, (T, (heads + 2 * kv_heads) * head_dim))
    graph.add_weight("inv_freq", Weight((half_dim,), "fp32"))
    attrs = {
        "layer": 0,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "scale": scale,
    }
    inputs = ("qkv", "positions", "inv_freq")
    graph.append(Node("rope_append", "turn", inputs, ("y", "cache"), attrs))
    return graph


def attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
) -> Graph:
    """`y` = attention of q over what lies in the cache of layer 0."""
    graph = _graph()
    graph.add_input("q", FLOAT, (T, heads * head_dim))
    graph.add_input("cache", CACHE, ())
    attrs = {
        "layer": 0,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5 if scale is None else scale,
        "window": window,
        "softcap": softcap,
    }
    graph.add("attention", "y", ["q", "cache"], attrs)
    return graph


def head(vocabulary: int, k: int, dtype: str = "fp32") -> Graph:
    """`y` = logits of selected rows."""
    graph = _graph()
    graph.add_input("x", FLOAT, (S, k))
    graph.add_weight("table", Weight((vocabulary, k), dtype, matrix=True))
    graph.add("head", "y", ["x", "table"])
    return graph


def frequencies(half_dim: int, theta: float = 10000.0) -> np.ndarray:
    """The usual `inv_freq [half_dim]`, fp32."""
    return (theta ** -(np.arange(half_dim) / half_dim)).astype(np.float32)
