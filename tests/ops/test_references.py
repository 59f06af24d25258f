"""Every op's numpy reference against the ONNX reference evaluator, so that one misreading can't
pass both. ONNX spells the same operations with other layouts and names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hornito.graph.graph import Graph
from hornito.graph.reference import ReferenceState, evaluate
from hornito.ops import registry
from hornito.ops.base import Array
from ops import cases

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

OPSET = 24
COVERED: dict[str, str] = {
    "activation": "Swish, Gelu",
    "add": "Add",
    "attention": "Attention",
    "embedding": "Gather",
    "gated_activation": "Swish, Gelu",
    "gated_linear": "MatMul, Swish, Gelu",
    "head": "MatMul",
    "kv_append": "Concat",
    "layer_norm": "LayerNormalization",
    "linear": "Gemm",
    "position_embedding": "Gather, Add",
    "qkv_append": "RMSNormalization, Gemm, RotaryEmbedding, Concat",
    "rms_norm": "RMSNormalization",
    "rope": "RotaryEmbedding",
    "rope_append": "RotaryEmbedding, Concat",
    "select_rows": "Gather",
}


def onnx_op(op: str, inputs: list[Array], **attributes: Any) -> Array:
    """The first output of one ONNX operation, evaluated by `onnx.reference`."""
    names = [f"i{n}" for n in range(len(inputs))]
    node = helper.make_node(op, names, ["y"], **attributes)
    graph = helper.make_graph(
        [node],
        op,
        [
            helper.make_tensor_value_info(
                name, numpy_helper.from_array(array).data_type, array.shape
            )
            for name, array in zip(names, inputs, strict=True)
        ],
        [helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    results: Any = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    result: Array = results[0]
    return result


def run(
    graph: Graph,
    inputs: dict[str, Array],
    weights: dict[str, Array] | None = None,
    state: ReferenceState | None = None,
    positions: Array | None = None,
) -> Array:
    """The value `y` of a one-node graph by the numpy evaluator."""
    every = {name: np.zeros(0, np.int64) for name in graph.inputs}
    every |= inputs
    every["positions"] = np.zeros(0, np.int64) if positions is None else positions
    values = evaluate(graph, every, weights or {}, state or ReferenceState(), keep=True)
    return values.get("y", np.zeros(0))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(12)


def test_every_op_has_an_oracle_here() -> None:
    assert set(registry.names()) == set(COVERED)


def test_add(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((2, 3, 8))
    assert np.array_equal(run(cases.add(8), {"a": a, "b": b}), onnx_op("Add", [a, b]))


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("residual", (False, True))
def test_linear(rng: np.random.Generator, bias: bool, residual: bool) -> None:
    x, w = rng.standard_normal((3, 12)), rng.standard_normal((5, 12))
    b, r = rng.standard_normal(5), rng.standard_normal((3, 5))
    expected = onnx_op("Gemm", [x, w, b] if bias else [x, w], transB=1)
    if residual:
        expected = onnx_op("Add", [expected, r])
    inputs, weights = {"x": x}, {"w": w}
    if bias:
        weights["b"] = b
    if residual:
        inputs["r"] = r
    found = run(cases.linear(5, 12, bias=bias, residual=residual), inputs, weights)
    np.testing.assert_allclose(found, expected, rtol=1e-13)


def onnx_activation(name: str, x: Array) -> Array:
    if name == "silu":
        return onnx_op("Swish", [x], alpha=1.0)
    return onnx_op("Gelu", [x], approximate="tanh")


@pytest.mark.parametrize("activation", ("silu", "gelu_tanh"))
def test_gated_activation(rng: np.random.Generator, activation: str) -> None:
    gate, up = rng.standard_normal((2, 4, 9)) * 3
    expected = onnx_activation(activation, gate) * up
    found = run(cases.gated_activation(9, activation), {"gate": gate, "up": up})
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("activation", ("silu", "gelu_tanh"))
def test_activation(rng: np.random.Generator, activation: str) -> None:
    x = rng.standard_normal((4, 9)) * 3
    found = run(cases.activation(9, activation), {"x": x})
    np.testing.assert_allclose(found, onnx_activation(activation, x), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("activation", ("silu", "gelu_tanh"))
def test_linear_with_activation(rng: np.random.Generator, activation: str) -> None:
    """The activation comes before the residual."""
    x, w, r = (rng.standard_normal(shape) for shape in ((3, 12), (5, 12), (3, 5)))
    b = rng.standard_normal(5)
    expected = onnx_activation(activation, onnx_op("Gemm", [x, w, b], transB=1)) + r
    graph = cases.linear(5, 12, bias=True, residual=True, activation=activation)
    found = run(graph, {"x": x, "r": r}, {"w": w, "b": b})
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("activation", ("silu", "gelu_tanh"))
@pytest.mark.parametrize("bias", (False, True))
def test_gated_linear(rng: np.random.Generator, activation: str, bias: bool) -> None:
    x, gate, up = (rng.standard_normal(shape) for shape in ((3, 12), (5, 12), (5, 12)))
    b = rng.standard_normal(10) if bias else np.zeros(10)
    gated = onnx_op("Gemm", [x, gate, b[0::2].copy()], transB=1)
    plain = onnx_op("Gemm", [x, up, b[1::2].copy()], transB=1)
    weights = {"w": np.stack([gate, up], axis=1).reshape(10, 12)}  # gate and up rows in turn
    if bias:
        weights["b"] = b
    graph = cases.gated_linear(5, 12, activation=activation, bias=bias)
    expected = onnx_activation(activation, gated) * plain
    np.testing.assert_allclose(run(graph, {"x": x}, weights), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("select", (False, True))
def test_rms_norm(rng: np.random.Generator, select: bool) -> None:
    x, w = rng.standard_normal((4, 24)), rng.standard_normal(24)
    selection = np.array([3, 1, 1])
    rows = onnx_op("Gather", [x, selection], axis=0) if select else x
    expected = onnx_op("RMSNormalization", [rows, w], axis=-1, epsilon=1e-3)
    graph = cases.rms_norm(24, eps=1e-3, select=select)
    found = run(graph, {"x": x, "selection": selection}, {"w": w})
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_rms_norm_of_heads_with_a_residual(rng: np.random.Generator) -> None:
    x, w, r = rng.standard_normal((4, 24)), rng.standard_normal(8), rng.standard_normal((4, 24))
    normed = onnx_op("RMSNormalization", [x.reshape(4, 3, 8), w], axis=-1, epsilon=1e-3)
    graph = cases.rms_norm(24, eps=1e-3, heads=3, residual=True)
    found = run(graph, {"x": x, "r": r}, {"w": w})
    np.testing.assert_allclose(found, normed.reshape(4, 24) + r, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("select", (False, True))
def test_layer_norm(rng: np.random.Generator, select: bool) -> None:
    x, w, b = rng.standard_normal((4, 24)) + 5, rng.standard_normal(24), rng.standard_normal(24)
    selection = np.array([3, 1, 1])
    rows = onnx_op("Gather", [x, selection], axis=0) if select else x
    expected = onnx_op("LayerNormalization", [rows, w, b], axis=-1, epsilon=1e-3)
    graph = cases.layer_norm(24, eps=1e-3, select=select)
    found = run(graph, {"x": x, "selection": selection}, {"w": w, "b": b})
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


def test_position_embedding(rng: np.random.Generator) -> None:
    x, table, positions = rng.standard_normal((3, 8)), rng.standard_normal((20, 8)), [19, 0, 7]
    added = onnx_op("Gather", [table, np.array(positions)], axis=0)
    graph = cases.position_embedding(20, 8, "fp32")
    found = run(graph, {"x": x}, {"table": table}, positions=np.array(positions))
    assert np.array_equal(found, onnx_op("Add", [x, added]))


def test_embedding_and_selection(rng: np.random.Generator) -> None:
    table, ids = rng.standard_normal((70000, 3)), np.array([0, 65505, 69999, 2])
    expected = onnx_op("Gather", [table, ids], axis=0)
    found = run(cases.embedding(70000, 3, "fp32"), {"ids": ids}, {"table": table})
    assert np.array_equal(found, expected)
    scale = np.float32(40.0**0.5)
    found = run(cases.embedding(70000, 3, "fp32", float(scale)), {"ids": ids}, {"table": table})
    assert np.array_equal(found, onnx_op("Mul", [expected, np.array(scale, np.float64)]))
    selection = np.array([2, 0])
    found = run(cases.select_rows(3), {"x": table[:5], "selection": selection})
    assert np.array_equal(found, onnx_op("Gather", [table[:5], selection], axis=0))


def onnx_rope(x: Array, positions: Array, inv_freq: Array, scale: float) -> Array:
    """`x [T, heads, D]` by RotaryEmbedding, whose input is [1, heads, T, D]."""
    angle = np.arange(200, dtype=np.float32)[:, None] * inv_freq[None]
    cos = np.cos(angle.astype(np.float64)) * scale
    sin = np.sin(angle.astype(np.float64)) * scale
    inputs = [x.swapaxes(0, 1)[None], cos, sin, positions[None]]
    rotary = 2 * len(inv_freq)
    attributes = {"rotary_embedding_dim": rotary} if rotary < x.shape[-1] else {}
    turned: Array = onnx_op("RotaryEmbedding", inputs, interleaved=0, **attributes)[0]
    return turned.swapaxes(0, 1)


ROPES = ((3, 16, 8, 1.0), (2, 16, 6, 1.341641), (1, 8, 1, 1.0))


@pytest.mark.parametrize(("heads", "head_dim", "half_dim", "scale"), ROPES)
def test_rope(
    rng: np.random.Generator, heads: int, head_dim: int, half_dim: int, scale: float
) -> None:
    positions = np.array([0, 1, 63, 64, 199])
    x = rng.standard_normal((5, heads, head_dim))
    inv_freq = cases.frequencies(half_dim)
    expected = onnx_rope(x, positions, inv_freq, scale)
    graph = cases.rope(heads, head_dim, half_dim, scale)
    found = run(graph, {"x": x.reshape(5, -1)}, {"inv_freq": inv_freq}, positions=positions)
    np.testing.assert_allclose(found.reshape(x.shape), expected, rtol=1e-12, atol=1e-12)


def cached(state: ReferenceState, side: str, count: int) -> Array:
    """Keys or values of layer 0 as `[positions, kv_heads, D]`."""
    store = getattr(state.layer(0), side)
    assert sorted(store) == list(range(count))
    return np.stack([store[p] for p in range(count)])


def test_kv_append(rng: np.random.Generator) -> None:
    """Two calls leave what Concat of past and present leaves."""
    k, v = rng.standard_normal((2, 5, 2 * 4))
    state, graph = ReferenceState(), cases.kv_append(2, 4)
    for part in (slice(0, 3), slice(3, 5)):
        run(graph, {"k": k[part], "v": v[part]}, state=state, positions=np.arange(5)[part])
    for side, array in (("keys", k), ("values", v)):
        whole = array.reshape(5, 2, 4)
        expected = onnx_op("Concat", [whole[:3], whole[3:]], axis=0)
        assert np.array_equal(cached(state, side, 5), expected)


def test_rope_append(rng: np.random.Generator) -> None:
    heads, kv_heads, head_dim, half_dim, scale = 4, 2, 8, 3, 1.5
    qkv = rng.standard_normal((3, heads + 2 * kv_heads, head_dim))
    inv_freq = cases.frequencies(half_dim)
    state = ReferenceState()
    graph = cases.rope_append(heads, kv_heads, head_dim, half_dim, scale)
    positions = np.arange(3)
    found = run(graph, {"qkv": qkv.reshape(3, -1)}, {"inv_freq": inv_freq}, state, positions)
    turned = onnx_rope(qkv[:, : heads + kv_heads], positions, inv_freq, scale)
    np.testing.assert_allclose(found.reshape(3, heads, head_dim), turned[:, :heads], atol=1e-12)
    np.testing.assert_allclose(cached(state, "keys", 3), turned[:, heads:], atol=1e-12)
    assert np.array_equal(cached(state, "values", 3), qkv[:, heads + kv_heads :])


def test_rope_append_with_norms(rng: np.random.Generator) -> None:
    """Each head of q and k is normed by its weight before it turns; values are left alone."""
    heads, kv_heads, head_dim = 3, 1, 8
    qkv = rng.standard_normal((2, heads + 2 * kv_heads, head_dim)) * 4
    norms = rng.standard_normal((2, head_dim))
    inv_freq = cases.frequencies(4)
    state, positions = ReferenceState(), np.arange(2)
    found = run(
        cases.rope_append(heads, kv_heads, head_dim, 4, norms=True),
        {"qkv": qkv.reshape(2, -1)},
        {"inv_freq": inv_freq, "q_norm": norms[0], "k_norm": norms[1]},
        state,
        positions,
    )
    parts = (qkv[:, :heads], qkv[:, heads : heads + kv_heads])
    q, k = (
        onnx_rope(
            onnx_op("RMSNormalization", [part.copy(), w], axis=-1, epsilon=1e-5),
            positions,
            inv_freq,
            1.0,
        )
        for part, w in zip(parts, norms, strict=True)
    )
    np.testing.assert_allclose(found.reshape(2, heads, head_dim), q, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(cached(state, "keys", 2), k, rtol=2e-6, atol=1e-6)
    assert np.array_equal(cached(state, "values", 2), qkv[:, heads + kv_heads :])


def test_qkv_append(rng: np.random.Generator) -> None:
    heads, kv_heads, head_dim, half_dim, k = 4, 2, 8, 4, 12
    x, norm = rng.standard_normal((3, k)) * 5, rng.standard_normal(k)
    w, b = rng.standard_normal((64, k)), rng.standard_normal(64)
    inv_freq, state, positions = cases.frequencies(half_dim), ReferenceState(), np.arange(3)
    found = run(
        cases.qkv_append(heads, kv_heads, head_dim, half_dim, k, bias=True, norm=True),
        {"x": x},
        {"w": w, "b": b, "norm": norm, "inv_freq": inv_freq},
        state,
        positions,
    )
    normed = onnx_op("RMSNormalization", [x, norm], axis=-1, epsilon=1e-5)
    qkv = onnx_op("Gemm", [normed, w, b], transB=1).reshape(3, heads + 2 * kv_heads, head_dim)
    turned = onnx_rope(qkv[:, : heads + kv_heads], positions, inv_freq, 1.0)
    close = {"rtol": 2e-6, "atol": 2e-6}
    np.testing.assert_allclose(found.reshape(3, heads, head_dim), turned[:, :heads], **close)
    np.testing.assert_allclose(cached(state, "keys", 3), turned[:, heads:], **close)
    np.testing.assert_allclose(cached(state, "values", 3), qkv[:, heads + kv_heads :], **close)


@pytest.mark.parametrize("gated", (False, True))
def test_norm_before_a_linear(rng: np.random.Generator, gated: bool) -> None:
    x, norm = rng.standard_normal((3, 8)) * 5, rng.standard_normal(8)
    w = rng.standard_normal((6, 8))
    normed = onnx_op("RMSNormalization", [x, norm], axis=-1, epsilon=1e-5)
    make = cases.gated_linear if gated else cases.linear
    n = 3 if gated else 6
    found = run(make(n, 8, norm=True), {"x": x}, {"w": w, "norm": norm})
    wanted = run(make(n, 8), {"x": normed}, {"w": w})
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("window", "softcap"), ((0, 0.0), (1, 0.0), (3, 0.0), (0, 2.0), (5, 2.0)))
@pytest.mark.parametrize("start", (0, 6))
def test_attention(rng: np.random.Generator, window: int, softcap: float, start: int) -> None:
    """Row by row over the keys that it may see, so that no mask rule of ONNX is involved."""
    heads, kv_heads, head_dim, live = 6, 2, 8, 4
    count = start + live
    q = rng.standard_normal((live, heads, head_dim)) * 2
    k, v = rng.standard_normal((2, count, kv_heads, head_dim))
    state = ReferenceState()
    for p in range(count):
        state.layer(0).keys[p], state.layer(0).values[p] = k[p], v[p]
    graph = cases.attention(heads, kv_heads, head_dim, window=window, softcap=softcap, scale=0.3)
    positions = np.arange(start, count)
    found = run(graph, {"q": q.reshape(live, -1)}, state=state, positions=positions)
    for r in range(live):
        first = max(0, start + r - window + 1) if window else 0
        seen = slice(first, start + r + 1)
        expected = onnx_op(
            "Attention",
            [
                q[r][None, :, None],
                k[seen].swapaxes(0, 1)[None],
                v[seen].swapaxes(0, 1)[None],
            ],
            scale=0.3,
            softcap=softcap,
            is_causal=0,
        )
        np.testing.assert_allclose(found[r], expected[0, :, 0].reshape(-1), rtol=1e-6, atol=1e-7)


def test_attention_is_causal_as_onnx_says(rng: np.random.Generator) -> None:
    """A whole prompt at once, with ONNX's own causal mask and grouped heads."""
    heads, kv_heads, head_dim, count = 4, 2, 8, 7
    q = rng.standard_normal((count, heads, head_dim))
    k, v = rng.standard_normal((2, count, kv_heads, head_dim))
    state = ReferenceState()
    for p in range(count):
        state.layer(0).keys[p], state.layer(0).values[p] = k[p], v[p]
    graph = cases.attention(heads, kv_heads, head_dim)
    found = run(graph, {"q": q.reshape(count, -1)}, state=state, positions=np.arange(count))
    inputs = [array.swapaxes(0, 1)[None] for array in (q, k, v)]
    expected = onnx_op("Attention", inputs, is_causal=1)[0].swapaxes(0, 1)
    np.testing.assert_allclose(found, expected.reshape(count, -1), rtol=1e-6, atol=1e-7)


def test_head(rng: np.random.Generator) -> None:
    x, table = rng.standard_normal((2, 12)), rng.standard_normal((40, 12))
    expected = onnx_op("MatMul", [x, table.T])
    np.testing.assert_allclose(run(cases.head(40, 12), {"x": x}, {"table": table}), expected)
    capped = onnx_op("Tanh", [expected / 2.5]) * 2.5
    found = run(cases.head(40, 12, softcap=2.5), {"x": x}, {"table": table})
    np.testing.assert_allclose(found, capped, rtol=1e-12)
