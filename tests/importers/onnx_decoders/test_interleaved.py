"""RoPE on neighbouring pairs of lanes, as ops and spelled out, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from hornito.compiler import build_graph
from hornito.errors import UnsupportedError
from hornito.graph.weights import load_all
from hornito.importers import open_source
from onnx_decoder import (
    DIM,
    HEADS,
    KV_HEADS,
    MS,
    Decoder,
    causal_bias,
    random_ids,
    run_graph,
    run_runtime,
    save,
)

PIECES = (9, 1, 1, 7, 1)
IDS = random_ids(sum(PIECES))
PRESENTS = ["present.0.key", "present.0.value"]


def compare(d: Decoder, folder: Path) -> Any:
    """Hold the model's graph, before and after passes, to ONNX Runtime."""
    model = d.build()
    source = open_source(save(model, folder / "model.onnx"))
    assert source.builder is not None
    want = run_runtime(model, IDS, PIECES)
    assert np.abs(want).max() > 1
    graph = source.builder("fp32")
    for made in (graph, build_graph(source, "fp32")[0]):
        np.testing.assert_allclose(run_graph(made, IDS), want, rtol=0, atol=2e-4)
    assert source.patterns["RoPE on interleaved pairs"] == 2
    return graph


def normed(d: Decoder, value: str, part: str, heads: int) -> str:
    """A norm of every head with random weights."""
    d.matrix(f"{part}_norm", DIM, scale=1.0)
    split = d.op("Reshape", [value, d.ints(0, 0, heads, DIM)])
    kind = "RMSNormalization" if d.opset >= 23 else "SimplifiedLayerNormalization"
    rows = d.op(kind, [split, f"{part}_norm"], axis=-1, epsilon=1e-6)
    return d.op("Reshape", [rows, d.ints(0, 0, heads * DIM)])


def gqa(d: Decoder, q: str, k: str, v: str, past: tuple[str, str], **attrs: Any) -> str:
    tables = d.caches() if attrs.get("do_rotary") else ("", "")
    return d.op(
        "GroupQueryAttention",
        [q, k, v, *past, *d.lengths(), *tables],
        outputs=["attended", *PRESENTS],
        domain=MS,
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        **attrs,
    )


@pytest.mark.parametrize("norms", [False, True])
def test_group_query_attention(tmp_path: Path, norms: bool) -> None:
    d = Decoder(seed=31)
    x, _, q, k, v = d.start()
    if norms:
        q, k = normed(d, q, "q", HEADS), normed(d, k, "k", KV_HEADS)
    y = gqa(d, q, k, v, d.past(), do_rotary=1, rotary_interleaved=1)
    d.finish(x, y)
    compare(d, tmp_path)


def test_a_biased_projection(tmp_path: Path) -> None:
    d = Decoder(seed=32)
    x, _, q, k, v = d.start()
    q = d.op("Add", [q, d.matrix("bq", HEADS * DIM)])
    k = d.op("Add", [k, d.matrix("bk", KV_HEADS * DIM)])
    y = gqa(d, q, k, v, d.past(), do_rotary=1, rotary_interleaved=1)
    d.finish(x, y)
    graph = compare(d, tmp_path)
    order = [*range(0, DIM, 2), *range(1, DIM, 2)]
    (q_node,) = (n for n in graph if n.name == "layer0.q")
    bias = load_all(graph.weights[q_node.inputs[2]].data).reshape(HEADS, DIM)
    np.testing.assert_array_equal(bias, d.constants["bq"].reshape(HEADS, DIM)[:, order])


@pytest.mark.parametrize("rotary", [8, DIM])
def test_the_standard_op_before_attention(tmp_path: Path, rotary: int) -> None:
    d = Decoder(opset=23, seed=33)
    x, _, q, k, v = d.start()
    past, positions = d.past(), d.position_ids()
    cos, sin = d.caches(rotary)
    q, k = (
        d.op(
            "RotaryEmbedding",
            [p, cos, sin, positions],
            num_heads=n,
            rotary_embedding_dim=rotary,
            interleaved=1,
        )
        for p, n in ((q, HEADS), (k, KV_HEADS))
    )
    y = d.op(
        "Attention",
        [q, k, v, "", *past],
        outputs=["attended", *PRESENTS],
        is_causal=1,
        q_num_heads=HEADS,
        kv_num_heads=KV_HEADS,
    )
    d.finish(x, y)
    graph = compare(d, tmp_path)
    assert graph.shape("rope.inv_freq") == (rotary // 2,)


def test_the_contrib_op_before_attention(tmp_path: Path) -> None:
    d = Decoder(seed=34)
    x, _, q, k, v = d.start()
    past, positions = d.past(), d.position_ids()
    cos, sin = d.caches()
    q, k = (
        d.op("RotaryEmbedding", [p, positions, cos, sin], domain=MS, interleaved=1) for p in (q, k)
    )
    d.finish(x, gqa(d, q, k, v, past))
    compare(d, tmp_path)


def spelled_out(d: Decoder, value: str, heads: int, cos: str, sin: str) -> str:
    """`x * cos + stack(-odd, even) * sin`, on heads `[1, heads, N, DIM]`."""
    split = d.op(
        "Transpose", [d.op("Reshape", [value, d.ints(0, 0, heads, DIM)])], perm=[0, 2, 1, 3]
    )
    end, axis, two = d.ints(1 << 60), d.ints(-1), d.ints(2)
    even = d.op("Slice", [split, d.ints(0), end, axis, two])
    odd = d.op("Slice", [split, d.ints(1), end, axis, two])
    pair = [d.op("Unsqueeze", [part, axis]) for part in (d.op("Neg", [odd]), even)]
    stacked = d.op("Concat", pair, axis=-1)
    sizes = d.op("Concat", [d.op("Shape", [stacked], start=0, end=3), d.ints(DIM)], axis=0)
    other = d.op("Reshape", [stacked, sizes])
    return d.op("Add", [d.op("Mul", [split, cos]), d.op("Mul", [other, sin])])


def test_spelled_out(tmp_path: Path) -> None:
    d = Decoder(seed=35)
    x, _, q, k, v = d.start()
    past = d.past()
    inv = np.repeat(10000.0 ** -(np.arange(0, DIM, 2) / DIM), 2)
    freq = d.const("freq", inv[None, None], np.float32)
    positions = d.op("Unsqueeze", [d.op("Cast", [d.position_ids()], to=1), d.ints(2)])
    angles = d.op("Unsqueeze", [d.op("Mul", [positions, freq]), d.ints(1)])
    cos, sin = d.op("Cos", [angles]), d.op("Sin", [angles])
    q = spelled_out(d, q, HEADS, cos, sin)
    k = spelled_out(d, k, KV_HEADS, cos, sin)
    v = d.op("Transpose", [d.op("Reshape", [v, d.ints(0, 0, KV_HEADS, DIM)])], perm=[0, 2, 1, 3])
    keys, values = (
        d.op("Concat", [old, new], axis=2, outputs=[name])
        for old, new, name in zip(past, (k, v), PRESENTS, strict=True)
    )
    bias = causal_bias(d)
    group = HEADS // KV_HEADS
    spread = []
    for name in (keys, values):
        wide = d.op("Unsqueeze", [name, d.ints(2)])
        times = d.op("Concat", [wide] * group, axis=2)
        total = d.op("Shape", [name], start=2, end=3)
        shape = d.op("Concat", [d.ints(1, HEADS), total, d.ints(DIM)], axis=0)
        spread.append(d.op("Reshape", [times, shape]))
    turned = d.op("Transpose", [spread[0]], perm=[0, 1, 3, 2])
    scores = d.op("Mul", [d.op("MatMul", [q, turned]), d.const("quarter", 0.25, np.float32)])
    weights = d.op("Softmax", [d.op("Add", [scores, bias])], axis=-1)
    y = d.op("Transpose", [d.op("MatMul", [weights, spread[1]])], perm=[0, 2, 1, 3])
    d.finish(x, d.op("Reshape", [y, d.ints(0, 0, HEADS * DIM)]))
    compare(d, tmp_path)


def test_queries_alone_are_refused(tmp_path: Path) -> None:
    d = Decoder(seed=36)
    x, _, q, k, v = d.start()
    past, positions = d.past(), d.position_ids()
    cos, sin = d.caches()
    q = d.op("RotaryEmbedding", [q, positions, cos, sin], domain=MS, interleaved=1)
    k = d.op("RotaryEmbedding", [k, positions, cos, sin], domain=MS)
    d.finish(x, gqa(d, q, k, v, past))
    with pytest.raises(UnsupportedError, match="of only one of queries and keys"):
        open_source(save(d.build(), tmp_path / "model.onnx"))


@pytest.mark.parametrize("where", ["values", "residual"])
def test_turned_pairs_outside_of_scores_are_refused(tmp_path: Path, where: str) -> None:
    d = Decoder(seed=37)
    x, _, q, k, v = d.start()
    past, positions = d.past(), d.position_ids()
    cos, sin = d.caches()

    def turned(value: str) -> str:
        return d.op("RotaryEmbedding", [value, positions, cos, sin], domain=MS, interleaved=1)

    q, k = turned(q), turned(k)
    if where == "values":
        y = gqa(d, q, k, turned(v), past)
    else:
        y = d.op("Add", [gqa(d, q, k, v, past), q])
    d.finish(x, y)
    with pytest.raises(UnsupportedError, match="used outside of attention"):
        open_source(save(d.build(), tmp_path / "model.onnx"))
