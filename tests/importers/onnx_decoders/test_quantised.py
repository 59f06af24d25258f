"""Quantised weights in every layout that files have, against ONNX Runtime on the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from hornito.compiler import compile_source, default_weights
from hornito.graph.weights import StoredData, load_all
from hornito.importers import open_source
from hornito.package import open_package
from hornito.quant.formats import format_of_blocks
from hornito.quant.ggml import format_by_name
from onnx_decoder import (
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MS,
    VOCABULARY,
    Decoder,
    random_ids,
    run_graph,
    run_runtime,
    save,
)

PIECES = (9, 1, 3)
IDS = random_ids(sum(PIECES))
PRESENTS = ["present.0.key", "present.0.value"]


def attended(d: Decoder, x: str, q: str, k: str, v: str) -> None:
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
    )
    d.finish(x, y)


def graph_of(d: Decoder, folder: Path) -> Any:
    source = open_source(save(d.build(), folder / "model.onnx"))
    assert source.builder is not None
    return source.builder("fp32")


def compare(d: Decoder, folder: Path, tolerance: float = 2e-4) -> Any:
    graph = graph_of(d, folder)
    want = run_runtime(d.build(), IDS, PIECES)
    np.testing.assert_allclose(run_graph(graph, IDS), want, rtol=0, atol=tolerance)
    return graph


def packed(q: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Numbers of `bits` bits along the last axis as bytes, the low ones first."""
    per = 8 // bits
    grouped = q.reshape(*q.shape[:-1], -1, per).astype(np.uint32)
    shifts = np.arange(0, 8, bits, dtype=np.uint32)
    return (grouped << shifts).sum(-1).astype(np.uint8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("zero", ["none", "packed", "float"])
@pytest.mark.parametrize("flat", [False, True])
def test_matmul_n_bits(tmp_path: Path, bits: int, block: int, zero: str, flat: bool) -> None:
    """The query projection, its 48 columns no multiple of a block of 32 (the last is cut)."""
    d = Decoder(seed=bits * 100 + block)
    x, h, _, k, v = d.start()
    width, rows = 48, HEADS * DIM
    wide = d.op("MatMul", [h, d.matrix("widen", HIDDEN, width)])
    blocks = -(-width // block)
    top = 1 << bits
    q = d.rng.integers(0, top, (rows, blocks, block))
    scales = (d.rng.random((rows, blocks)) * 0.2 / top + 0.01 / top).astype(np.float32)
    zeros = d.rng.integers(0, top, (rows, blocks))
    if zero == "none":
        zeros = np.full((rows, blocks), top // 2)
    d.const("q_w", packed(q, bits))
    d.const("q_s", scales.reshape(-1) if flat else scales)
    inputs = [wide, "q_w", "q_s"]
    if zero == "packed":
        padded = np.pad(zeros, ((0, 0), (0, -blocks % (8 // bits))))
        stored = packed(padded, bits)
        inputs.append(d.const("q_z", stored.reshape(-1) if flat else stored))
    elif zero == "float":
        inputs.append(d.const("q_z", zeros.astype(np.float32).reshape(-1 if flat else zeros.shape)))
    y = d.op("MatMulNBits", inputs, domain=MS, K=width, N=rows, bits=bits, block_size=block)
    attended(d, x, y, k, v)
    graph = graph_of(d, tmp_path)
    exact = ((q - zeros[..., None]) * scales[..., None]).reshape(rows, -1)[:, :width]
    data = graph.weights["model.layers.0.self_attn.q_proj.weight"].data
    np.testing.assert_allclose(load_all(data), exact, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(data.rows(5, 9), exact[5:9], rtol=1e-6, atol=1e-7)
    assert set(data.source_names) >= {"q_w", "q_s"}
    # ONNX Runtime's CPU kernels take float zero points neither flat nor for 8 bits.
    if zero != "float" or (bits == 4 and not flat):
        compare(d, tmp_path)


def test_an_embedding_of_4_bits(tmp_path: Path) -> None:
    d = Decoder(seed=11)
    x, _, q, k, v = d.start()
    codes = d.rng.integers(0, 16, (VOCABULARY, HIDDEN))
    scales = (d.rng.random((VOCABULARY, HIDDEN // 16)) * 0.2 + 0.05).astype(np.float32)
    d.const("e_w", packed(codes, 4))
    d.const("e_s", scales)
    gather = d.nodes[0]
    gather.op_type, gather.domain = "GatherBlockQuantized", MS
    gather.input[:] = ["e_w", "input_ids", "e_s"]
    from onnx import helper

    gather.attribute.extend(
        helper.make_attribute(k_, v_)
        for k_, v_ in {"bits": 4, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}.items()
    )
    attended(d, x, q, k, v)
    graph = compare(d, tmp_path)
    exact = (codes - 8.0) * np.repeat(scales, 16, axis=1)
    data = graph.weights["model.embed_tokens.weight"].data
    np.testing.assert_allclose(load_all(data), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["tensor", "column", "block"])
@pytest.mark.parametrize("half", [False, True])
def test_dequantize_linear(tmp_path: Path, kind: str, half: bool) -> None:
    """A large int8 weight `[in, out]`: one scale, one a column, or blocks along the rows; kept as
    it is when scales are fp16 numbers."""
    d = Decoder(seed=12)
    x, h, _, k, v = d.start()
    width, rows = 128, HEADS * DIM
    wide = d.op("MatMul", [h, d.matrix("widen", HIDDEN, width, scale=0.1)])
    codes = d.rng.integers(-128, 128, (width, rows)).astype(np.int8)
    shape = {"tensor": (), "column": (rows,), "block": (width // 32, rows)}[kind]
    scales = np.asarray(d.rng.random(shape) * 2e-3 + 1e-3, np.float32)
    if half:
        codes = codes.clip(-120, 120)
        scales = scales.astype(np.float16).astype(np.float32)
    zeros = np.asarray(d.rng.integers(-4, 5, shape), np.int8)
    attrs = {"tensor": {}, "column": {"axis": 1}, "block": {"axis": 0, "block_size": 32}}[kind]
    names = [d.const("w", codes), d.const("s", scales), d.const("z", zeros)]
    w = d.op("DequantizeLinear", names, **attrs)
    attended(d, x, d.op("MatMul", [wide, w]), k, v)
    graph = compare(d, tmp_path)
    full_s, full_z = (np.repeat(a, 32, axis=0) if kind == "block" else a for a in (scales, zeros))
    exact = (codes.astype(np.float32) - full_z) * full_s
    data = graph.weights["model.layers.0.self_attn.q_proj.weight"].data
    np.testing.assert_allclose(load_all(data), exact.T, rtol=1e-6, atol=1e-8)
    assert isinstance(data, StoredData) and data.stored == ("Q8_0" if half else "")
    if half:
        blocks = data.stored_rows(0, rows).reshape(-1, 34)
        floats = format_by_name("Q8_0").dequantise(blocks).reshape(rows, width)
        np.testing.assert_array_equal(floats, load_all(data))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_table_and_a_turned_weight(tmp_path: Path, axis: int) -> None:
    """Weights `[out, in]` that are transposed in the graph, with a scale a row, or one for all."""
    d = Decoder(seed=14)
    x, h, _, k, v = d.start()
    width, rows = 96, HEADS * DIM
    wide = d.op("MatMul", [h, d.matrix("widen", HIDDEN, width, scale=0.1)])
    codes = d.rng.integers(-100, 101, (rows, width)).astype(np.int8)
    shape = (rows,) if axis == 0 else ()
    scales = np.asarray(d.rng.random(shape) * 2e-3 + 1e-3, np.float16).astype(np.float32)
    names = [d.const("w", codes), d.const("s", scales)]
    w = d.op("Transpose", [d.op("DequantizeLinear", names, axis=axis)], perm=[1, 0])
    attended(d, x, d.op("MatMul", [wide, w]), k, v)
    graph = compare(d, tmp_path)
    data = graph.weights["model.layers.0.self_attn.q_proj.weight"].data
    exact = codes.astype(np.float32) * (scales[:, None] if axis == 0 else scales)
    np.testing.assert_array_equal(load_all(data), exact)
    assert isinstance(data, StoredData) and data.stored == "Q8_0"


def test_a_dynamic_int8_projection(tmp_path: Path) -> None:
    """DynamicQuantizeLinear + MatMulInteger: the weight is exact, activations stay unrounded, so
    logits are near ONNX Runtime's, and equal to those of the dequantised weight."""
    d = Decoder(seed=13)
    x, h, _, k, v = d.start()
    rows = HEADS * DIM
    # Seven bits: on processors without VNNI, ONNX Runtime's sums of two products saturate at 16.
    codes = d.rng.integers(-63, 64, (HIDDEN, rows)).astype(np.int8)
    scale = np.float32(0.008)
    d.op("DynamicQuantizeLinear", [h], outputs=["a_q", "a_s", "a_z"])
    product = d.op("MatMulInteger", ["a_q", d.const("w", codes), "a_z", d.const("w_z", np.int8(3))])
    both = d.op("Mul", ["a_s", d.const("w_s", scale)])
    q = d.op("Mul", [d.op("Cast", [product], to=1), both])
    attended(d, x, q, k, v)
    graph = compare(d, tmp_path, tolerance=0.3)
    exact = (codes.astype(np.float32) - 3) * scale
    data = graph.weights["model.layers.0.self_attn.q_proj.weight"].data
    np.testing.assert_allclose(load_all(data), exact.T, rtol=1e-6, atol=1e-8)
    assert graph.weights["model.layers.0.self_attn.q_proj.weight"].matrix


KINDS = {
    (4, "none"): "Q4_0",
    (4, "packed"): "Q5_0",  # q - zero needs five bits
    (4, "float"): "Q5_0",
    (8, "none"): "Q8_0",
    (2, "none"): "Q4_0",
}


@pytest.mark.parametrize(("bits", "zero"), KINDS)
@pytest.mark.parametrize("block", [32, 64])
def test_blocks_that_are_kept(tmp_path: Path, bits: int, zero: str, block: int) -> None:
    """With fp16 scales the numbers are those of GGUF's blocks, bit for bit."""
    d = Decoder(seed=bits + block)
    x, h, _, k, v = d.start()
    width, rows, top = 160, HEADS * DIM, 1 << bits
    wide = d.op("MatMul", [h, d.matrix("widen", HIDDEN, width)])
    blocks = -(-width // block)
    d.const("q_w", packed(d.rng.integers(0, top, (rows, blocks, block)), bits))
    d.const("q_s", (d.rng.random((rows, blocks)) * 0.2 / top + 0.01 / top).astype(np.float16))
    d.constants["q_s"] = d.constants["q_s"].astype(np.float32)
    inputs = [wide, "q_w", "q_s"]
    zeros = d.rng.integers(0, top, (rows, blocks))
    if zero == "packed":
        inputs.append(d.const("q_z", packed(np.pad(zeros, ((0, 0), (0, blocks % 2))), bits)))
    elif zero == "float":
        inputs.append(d.const("q_z", zeros.astype(np.float32)))
    y = d.op("MatMulNBits", inputs, domain=MS, K=width, N=rows, bits=bits, block_size=block)
    attended(d, x, y, k, v)
    path = save(d.build(), tmp_path / "model.onnx")
    source = open_source(path)
    assert source.builder is not None
    data = source.builder("fp32").weights["model.layers.0.self_attn.q_proj.weight"].data
    kind = KINDS[bits, zero]
    assert isinstance(data, StoredData) and data.stored == kind and source.stored == {kind}
    held = format_by_name(kind)
    blocks_of = data.stored_rows(3, 11).reshape(-1, held.nbytes)
    floats = held.dequantise(blocks_of).reshape(8, width)
    np.testing.assert_array_equal(floats, data.rows(3, 11))
    report = compile_source(path, tmp_path / "kept.vxm")
    with open_package(tmp_path / "kept.vxm") as package:
        formats = package.manifest.quant["formats"]
    assert weight_format_of(kind) in formats and not any(
        "dequantised" in w for w in report.warnings
    )


def weight_format_of(kind: str) -> str:
    found = format_of_blocks(kind)
    assert found is not None
    return found.name


@pytest.mark.parametrize("why", ["scales", "block", "zeros"])
def test_blocks_that_are_not_kept(tmp_path: Path, why: str) -> None:
    """What no native block holds exactly is dequantised, and said so."""
    d = Decoder(seed=50)
    x, h, _, k, v = d.start()
    width, rows, block = 64, HEADS * DIM, 16 if why == "block" else 32
    wide = d.op("MatMul", [h, d.matrix("widen", HIDDEN, width)])
    blocks = width // block
    d.const("q_w", packed(d.rng.integers(0, 16, (rows, blocks, block)), 4))
    scales = (d.rng.random((rows, blocks)) * 0.01).astype(np.float32)
    d.const("q_s", scales if why == "scales" else scales.astype(np.float16).astype(np.float32))
    zeros = np.full((rows, blocks), 7.5, np.float32)
    inputs = [wide, "q_w", "q_s"] + ([d.const("q_z", zeros)] if why == "zeros" else [])
    y = d.op("MatMulNBits", inputs, domain=MS, K=width, N=rows, bits=4, block_size=block)
    attended(d, x, y, k, v)
    source = open_source(save(d.build(), tmp_path / "model.onnx"))
    assert source.stored == frozenset() and default_weights(source) == "fp16"
    name = "model.layers.0.self_attn.q_proj.weight"
    assert any(w.startswith("1 quantised matrices are deq") and name in w for w in source.warnings)
