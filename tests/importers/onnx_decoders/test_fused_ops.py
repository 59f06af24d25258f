"""Attention, RoPE and norms as ops of their own, against ONNX Runtime with a growing cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from hornito.errors import UnsupportedError
from hornito.importers import open_source
from hornito.importers.onnx.match.attention import nice_scale
from hornito.importers.onnx.match.rope import from_tables
from hornito.importers.onnx.values import Const, Unmatched
from onnx_decoder import (
    DIM,
    HEADS,
    HIDDEN,
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


def compare(d: Decoder, folder: Path, *, tolerance: float = 2e-4) -> Any:
    """Open the model, and hold its graph to ONNX Runtime; returns the graph."""
    model = d.build()
    source = open_source(save(model, folder / "model.onnx"))
    assert source.builder is not None
    graph = source.builder("fp32")
    want = run_runtime(model, IDS, PIECES)
    got = run_graph(graph, IDS)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)
    assert np.abs(want).max() > 1
    return graph


def attention_of(graph: Any) -> dict[str, Any]:
    (node,) = (n for n in graph if n.op == "attention")
    return dict(node.attrs)


def gqa(d: Decoder, *, packed: bool = False, **attrs: Any) -> None:
    x, _, q, k, v = d.start()
    if packed:
        q, k, v = d.op("Concat", [q, k, v], axis=-1), "", ""
        # One projection, as GenAI's builder packs it.
        del d.nodes[-4:]
        d.constants["wqkv"] = np.concatenate([d.constants.pop(w) for w in ("wq", "wk", "wv")], 1)
        q = d.op("MatMul", [d.nodes[-1].output[0], "wqkv"])
    past = d.past()
    cos, sin = d.caches()
    y = d.op(
        "GroupQueryAttention",
        [q, k, v, *past, *d.lengths(), cos, sin],
        outputs=["attended", *PRESENTS],
        domain=MS,
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        do_rotary=1,
        **attrs,
    )
    d.finish(x, y)


@pytest.mark.parametrize("packed", [False, True])
def test_group_query_attention(tmp_path: Path, packed: bool) -> None:
    d = Decoder()
    gqa(d, packed=packed)
    attrs = attention_of(compare(d, tmp_path))
    assert attrs["scale"] == DIM**-0.5 and attrs["window"] == 0 and attrs["kv_heads"] == KV_HEADS


def test_group_query_attention_with_window_cap_and_scale(tmp_path: Path) -> None:
    d = Decoder(seed=3)
    gqa(d, local_window_size=5, softcap=2.0, scale=0.5)
    attrs = attention_of(compare(d, tmp_path))
    assert (attrs["window"], attrs["softcap"], attrs["scale"]) == (5, 2.0, 0.5)


def test_a_scale_is_only_taken_for_another_within_the_noise_of_its_type() -> None:
    for dim in (16, 64, 80, 128, 256):
        exact = dim**-0.5
        half, root = np.float16(exact), np.float16(exact**0.5)
        for noisy in (np.float32(exact), np.float32(exact**0.5) ** 2, half, float(root) ** 2):
            assert nice_scale(float(noisy), dim) == exact
        assert nice_scale(exact * 1.001, dim) == exact * 1.001
        assert nice_scale(exact * 0.9995, dim) == exact * 0.9995


@pytest.mark.parametrize(("length", "dim"), [(40, 16), (131072, 8), (131072, 66)])
def test_tables_are_angles_in_fp32_and_nothing_else(length: int, dim: int) -> None:
    """Tables of 131072 positions are off by 4e-3 in themselves; one wrong row of short ones shows
    from far less on."""
    inv = (5e5 ** (-np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))).astype(np.float32)
    angle = np.arange(length, dtype=np.float32)[:, None] * inv[None]
    cos, sin = np.cos(angle), np.sin(angle)
    freq, scale = from_tables(Const(cos), Const(sin))
    np.testing.assert_allclose(freq, inv, rtol=2e-7)
    assert scale == 1.0
    cos[31] += 1e-4
    with pytest.raises(Unmatched, match="no cos and sin of positions"):
        from_tables(Const(cos), Const(sin))


def test_rotary_embedding_turns_a_part_of_each_head(tmp_path: Path) -> None:
    d = Decoder(opset=23, seed=4)
    x, _, q, k, v = d.start()
    past, positions = d.past(), d.position_ids()
    cos, sin = d.caches(8)
    q, k = (
        d.op("RotaryEmbedding", [p, cos, sin, positions], num_heads=n, rotary_embedding_dim=8)
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
    assert graph.shape("rope.inv_freq") == (4,)


def test_group_query_attention_with_norms_of_q_and_k(tmp_path: Path) -> None:
    """As nodes before the op, and as its inputs 14 and 15: one graph."""
    d = Decoder(seed=5)
    x, _, q, k, v = d.start()
    past = d.past()
    cos, sin = d.caches()
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        d.matrix(f"{part}_norm", DIM, scale=1.0)
        source = q if part == "q" else k
        split = d.op("Reshape", [source, d.ints(0, 0, heads, DIM)])
        normed = d.op(
            "SimplifiedLayerNormalization", [split, f"{part}_norm"], axis=-1, epsilon=1e-6
        )
        flat = d.op("Reshape", [normed, d.ints(0, 0, heads * DIM)])
        q, k = (flat, k) if part == "q" else (q, flat)
    y = d.op(
        "GroupQueryAttention",
        [q, k, v, *past, *d.lengths(), cos, sin],
        outputs=["attended", *PRESENTS],
        domain=MS,
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        do_rotary=1,
    )
    d.finish(x, y)
    spelled = compare(d, tmp_path / "spelled")

    fused = Decoder(seed=5)
    x, _, q, k, v = fused.start()
    past = fused.past()
    cos, sin = fused.caches()
    norms = [fused.matrix(f"{part}_norm", DIM, scale=1.0) for part in "qk"]
    y = fused.op(
        "GroupQueryAttention",
        [q, k, v, *past, *fused.lengths(), cos, sin, *[""] * 5, *norms],
        outputs=["attended", *PRESENTS],
        domain=MS,
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        do_rotary=1,
        qk_norm_epsilon=1e-6,
    )
    fused.finish(x, y)
    source = open_source(save(fused.build(), tmp_path / "fused.onnx"))
    assert source.builder is not None
    graph = source.builder("fp32")
    assert [(n.op, n.name, n.inputs, dict(n.attrs)) for n in graph] == [
        (n.op, n.name, n.inputs, dict(n.attrs)) for n in spelled
    ]
    np.testing.assert_array_equal(run_graph(graph, IDS), run_graph(spelled, IDS))


@pytest.mark.parametrize("window", [0, 6])
def test_multi_head_attention(tmp_path: Path, window: int) -> None:
    """With RotaryEmbedding of com.microsoft and an additive mask."""
    d = Decoder(seed=6)
    x, h, q, _, _ = d.start()
    del d.nodes[-2:]
    k = d.op("MatMul", [h, d.matrix("wk", HIDDEN, HEADS * DIM)])
    v = d.op("MatMul", [h, d.matrix("wv", HIDDEN, HEADS * DIM)])
    past, positions = d.past(HEADS), d.position_ids()
    cos, sin = d.caches()
    q, k = (d.op("RotaryEmbedding", [part, positions, cos, sin], domain=MS) for part in (q, k))
    y = d.op(
        "MultiHeadAttention",
        [q, k, v, "", "", causal_bias(d, window), *past],
        outputs=["attended", *PRESENTS],
        domain=MS,
        num_heads=HEADS,
        scale=0.25,
    )
    d.finish(x, y)
    attrs = attention_of(compare(d, tmp_path))
    assert attrs["window"] == window and attrs["kv_heads"] == HEADS and attrs["scale"] == 0.25


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_of_opset_23(tmp_path: Path, flat: bool, masked: bool) -> None:
    """The past as inputs of the op; causal by its flag or by a mask."""
    d = Decoder(opset=23, seed=7)
    x, _, q, k, v = d.start()
    past, positions = d.past(), d.position_ids()
    cos, sin = d.caches()
    heads: dict[str, int] = {}
    if flat:
        q = d.op("RotaryEmbedding", [q, cos, sin, positions], num_heads=HEADS)
        k = d.op("RotaryEmbedding", [k, cos, sin, positions], num_heads=KV_HEADS)
        heads = {"q_num_heads": HEADS, "kv_num_heads": KV_HEADS}
    else:
        q, k, v = (
            d.op("Transpose", [d.op("Reshape", [p, d.ints(0, 0, n, DIM)])], perm=[0, 2, 1, 3])
            for p, n in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS))
        )
        q, k = (d.op("RotaryEmbedding", [p, cos, sin, positions]) for p in (q, k))
    mask = causal_bias(d) if masked else ""
    y = d.op(
        "Attention",
        [q, k, v, mask, *past],
        outputs=["attended", *PRESENTS],
        is_causal=int(not masked),
        softcap=3.0,
        **heads,
    )
    if not flat:
        y = d.op("Reshape", [d.op("Transpose", [y], perm=[0, 2, 1, 3]), d.ints(0, 0, -1)])
    d.finish(x, y)
    attrs = attention_of(compare(d, tmp_path))
    assert attrs["softcap"] == 3.0 and attrs["scale"] == DIM**-0.5


def test_a_cache_of_fixed_size(tmp_path: Path) -> None:
    """TensorScatter into key_cache and Attention with counts of valid keys (opset 24): the same
    graph as with the past as inputs."""
    graphs = []
    for fixed in (False, True):
        d = Decoder(opset=24 if fixed else 23, seed=8)
        x, _, q, k, v = d.start()
        positions = d.position_ids()
        cos, sin = d.caches()
        q = d.op("RotaryEmbedding", [q, cos, sin, positions], num_heads=HEADS)
        k = d.op("RotaryEmbedding", [k, cos, sin, positions], num_heads=KV_HEADS)
        heads = {"q_num_heads": HEADS, "kv_num_heads": KV_HEADS}
        if fixed:
            del d.inputs["attention_mask"]
            for name in ("key_cache.0", "value_cache.0"):
                d.inputs[name] = (1, ["batch", 64, KV_HEADS * DIM])
            d.inputs["write_indices"] = d.inputs["nonpad_kv_seqlen"] = (7, ["batch"])
            k, v = (
                d.op("TensorScatter", [c, new, "write_indices"], outputs=[out], axis=1)
                for c, new, out in zip(
                    ("key_cache.0", "value_cache.0"), (k, v), PRESENTS, strict=True
                )
            )
            inputs, outputs = [q, k, v, "", "", "", "nonpad_kv_seqlen"], ["attended"]
        else:
            inputs, outputs = [q, k, v, "", *d.past()], ["attended", *PRESENTS]
        y = d.op("Attention", inputs, outputs=outputs, is_causal=1, **heads)
        d.finish(x, y)
        source = open_source(save(d.build(), tmp_path / f"{fixed}.onnx"))
        assert source.builder is not None
        graphs.append(source.builder("fp32"))
    first, second = ([(n.op, n.name, n.inputs, dict(n.attrs)) for n in g] for g in graphs)
    assert first == second
    np.testing.assert_array_equal(run_graph(graphs[0], IDS), run_graph(graphs[1], IDS))


def test_causal_flag_over_a_past_outside_of_the_op_is_refused(tmp_path: Path) -> None:
    """The op would align its triangle with the first key, not with the row's position."""
    d = Decoder(opset=23, seed=9)
    x, _, q, k, v = d.start()
    past = d.past()
    q, k, v = (
        d.op("Transpose", [d.op("Reshape", [p, d.ints(0, 0, n, DIM)])], perm=[0, 2, 1, 3])
        for p, n in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS))
    )
    k, v = (
        d.op("Concat", [old, new], outputs=[out], axis=2)
        for old, new, out in zip(past, (k, v), PRESENTS, strict=True)
    )
    y = d.op("Attention", [q, k, v], is_causal=1)
    d.finish(x, d.op("Reshape", [d.op("Transpose", [y], perm=[0, 2, 1, 3]), d.ints(0, 0, -1)]))
    with pytest.raises(
        UnsupportedError, match=r"attention_\d+ \(Attention\): is_causal over a past"
    ):
        open_source(save(d.build(), tmp_path / "model.onnx"))


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"kv_cache_bit_width": 8}, "kv_cache_bit_width=8"),
        ({"smooth_softmax": 1}, "smooth_softmax=1"),
        ({"local_window_size": 0}, "local_window_size 0"),
        ({"softcap": -2.0}, "softcap -2"),
    ],
)
def test_group_query_attention_refuses(tmp_path: Path, attrs: dict[str, int], message: str) -> None:
    d = Decoder()
    gqa(d, **attrs)
    with pytest.raises(UnsupportedError, match=message):
        open_source(save(d.build(), tmp_path / "model.onnx"))
