"""One-node graphs of every op, for the tests of kernels, references and SPIR-V."""

from __future__ import annotations

import numpy as np

from hornito.graph.graph import CACHE, FLOAT, INT, Attr, Graph, Node, Weight
from hornito.graph.shapes import S, T


def _graph() -> Graph:
    graph = Graph()
    graph.add_input("ids", INT, (T,))
    graph.add_input("positions", INT, (T,))
    graph.add_input("selection", INT, (S,))
    return graph


def linear(
    n: int,
    k: int,
    dtype: str = "fp32",
    *,
    bias: bool = False,
    residual: bool = False,
    activation: str = "",
    norm: bool = False,
) -> Graph:
    """`y = activation(x @ w.T (+ bias)) (+ residual)`, of a norm of x with `norm`."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, k))
    graph.add_weight("w", Weight((n, k), dtype, matrix=True))
    if bias:
        graph.add_weight("b", Weight((n,), "fp32"))
    if residual:
        graph.add_input("r", FLOAT, (T, n))
    attrs: dict[str, Attr] = {"activation": activation} if activation else {}
    inputs = ["x", "w", "b" if bias else "", "r" if residual else ""]
    if norm:
        inputs.append(graph.add_weight("norm", Weight((k,), "fp32")))
        attrs["eps"] = 1e-5
    graph.add("linear", "y", inputs, attrs)
    return graph


def gated_linear(
    n: int,
    k: int,
    dtype: str = "fp32",
    *,
    activation: str = "silu",
    bias: bool = False,
    norm: bool = False,
) -> Graph:
    """`y = activation(x @ gate.T) * (x @ up.T)`, `n` outputs; rows of w are gate and up in turn."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, k))
    graph.add_weight("w", Weight((2 * n, k), dtype, matrix=True))
    if bias:
        graph.add_weight("b", Weight((2 * n,), "fp32"))
    attrs: dict[str, Attr] = {"activation": activation}
    inputs = ["x", "w", "b" if bias else ""]
    if norm:
        inputs.append(graph.add_weight("norm", Weight((k,), "fp32")))
        attrs["eps"] = 1e-5
    graph.add("gated_linear", "y", inputs, attrs)
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


def activation(width: int, name: str) -> Graph:
    """`y = activation(x)`."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, width))
    graph.add("activation", "y", ["x"], {"activation": name})
    return graph


def rms_norm(
    width: int,
    *,
    eps: float = 1e-5,
    select: bool = False,
    heads: int = 1,
    residual: bool = False,
) -> Graph:
    """`y = norm(x) (+ residual)`, of the selected rows with `select`; of each head alone."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, width))
    graph.add_weight("w", Weight((width // heads,), "fp32"))
    attrs: dict[str, Attr] = {"eps": eps}
    if heads > 1:
        attrs["heads"] = heads
    inputs = ["x", "w", "selection" if select else ""]
    if residual:
        inputs.append(graph.add_input("r", FLOAT, (S if select else T, width)))
    graph.add("rms_norm", "y", inputs, attrs)
    return graph


def layer_norm(width: int, *, eps: float = 1e-5, select: bool = False) -> Graph:
    """`y = (x - mean) / deviation * w + b`, of the selected rows with `select`."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, width))
    graph.add_weight("w", Weight((width,), "fp32"))
    graph.add_weight("b", Weight((width,), "fp32"))
    graph.add("layer_norm", "y", ["x", "w", "selection" if select else "", "b"], {"eps": eps})
    return graph


def position_embedding(positions: int, width: int, dtype: str) -> Graph:
    """`y = x + table[positions]`."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, width))
    graph.add_weight("table", Weight((positions, width), dtype, matrix=True))
    graph.add("position_embedding", "y", ["x", "positions", "table"])
    return graph


def select_rows(width: int) -> Graph:
    """`y = x[selection]`."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, width))
    graph.add("select_rows", "y", ["x", "selection"])
    return graph


def embedding(vocabulary: int, width: int, dtype: str, scale: float = 1.0) -> Graph:
    """`y = table[ids] * scale`."""
    graph = _graph()
    graph.add_weight("table", Weight((vocabulary, width), dtype, matrix=True))
    graph.add("embedding", "y", ["ids", "table"], {"scale": scale} if scale != 1.0 else {})
    return graph


def _frequencies(graph: Graph, half_dim: int, scale: float, original_max: int) -> dict[str, Attr]:
    """Declare the table (two sets with `original_max`) and return the attributes of RoPE."""
    shape = (2, half_dim) if original_max else (half_dim,)
    graph.add_weight("inv_freq", Weight(shape, "fp32"))
    attrs: dict[str, Attr] = {"scale": scale}
    if original_max:
        attrs["original_max"] = original_max
    return attrs


def rope(
    heads: int, head_dim: int, half_dim: int, scale: float = 1.0, original_max: int = 0
) -> Graph:
    """`y = x` turned."""
    graph = _graph()
    graph.add_input("x", FLOAT, (T, heads * head_dim))
    attrs: dict[str, Attr] = {"heads": heads, "head_dim": head_dim}
    attrs |= _frequencies(graph, half_dim, scale, original_max)
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
    heads: int,
    kv_heads: int,
    head_dim: int,
    half_dim: int,
    scale: float = 1.0,
    *,
    norms: bool = False,
    original_max: int = 0,
) -> Graph:
    """The fused row `[q; k; v]` into `y` and the cache of layer 0; no RoPE with `half_dim` 0."""
    graph = _graph()
    graph.add_input("qkv", FLOAT, (T, (heads + 2 * kv_heads) * head_dim))
    attrs: dict[str, Attr] = {
        "layer": 0,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    inputs = ["qkv", "", ""]
    if half_dim:
        attrs |= _frequencies(graph, half_dim, scale, original_max)
        inputs = ["qkv", "positions", "inv_freq"]
    if norms:
        attrs["eps"] = 1e-5
        for name in ("q_norm", "k_norm"):
            inputs.append(graph.add_weight(name, Weight((head_dim,), "fp32")))
    graph.append(Node("rope_append", "turn", tuple(inputs), ("y", "cache"), attrs))
    return graph


def qkv_append(
    heads: int,
    kv_heads: int,
    head_dim: int,
    half_dim: int,
    k: int,
    dtype: str = "fp32",
    *,
    scale: float = 1.0,
    bias: bool = False,
    norm: bool = False,
) -> Graph:
    """Projections of x, their row `[q; k; v]` turned, into `y` and the cache of layer 0."""
    graph = _graph()
    n = (heads + 2 * kv_heads) * head_dim
    graph.add_input("x", FLOAT, (T, k))
    graph.add_weight("w", Weight((n, k), dtype, matrix=True))
    attrs: dict[str, Attr] = {
        "layer": 0,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    inputs = ["x", "w", "", "", "", ""]
    if bias:
        inputs[2] = graph.add_weight("b", Weight((n,), "fp32"))
    if norm:
        inputs[3] = graph.add_weight("norm", Weight((k,), "fp32"))
        attrs["eps"] = 1e-5
    if half_dim:
        attrs |= _frequencies(graph, half_dim, scale, 0)
        inputs[4:] = ["positions", "inv_freq"]
    graph.append(Node("qkv_append", "turn", tuple(inputs), ("y", "cache"), attrs))
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


def head(vocabulary: int, k: int, dtype: str = "fp32", softcap: float = 0.0) -> Graph:
    """`y` = logits of selected rows."""
    graph = _graph()
    graph.add_input("x", FLOAT, (S, k))
    graph.add_weight("table", Weight((vocabulary, k), dtype, matrix=True))
    graph.add("head", "y", ["x", "table"], {"softcap": softcap} if softcap else {})
    return graph


def frequencies(half_dim: int, theta: float = 10000.0) -> np.ndarray:
    """The usual `inv_freq [half_dim]`, fp32."""
    return (theta ** -(np.arange(half_dim) / half_dim)).astype(np.float32)
