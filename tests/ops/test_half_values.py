"""Values stored as fp16 (precision `low`): every kernel family against the evaluator on the numbers
that lie in memory. What is left is one rounding of the result, and the sums' own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hornito.graph.graph import FLOAT, Graph
from hornito.ops import digits
from hornito.ops.base import Array, Tail
from hornito.ops.matrices import MATRIX_NEEDS
from hornito.ops.variants import Choices, meets
from ops import cases
from ops.harness import Bench, Call, assert_close, lower, rows_of
from ops.kv_pool import KvPool, to_half

pytestmark = pytest.mark.gpu

LIVE = 5

ROW_BY_ROW = {
    "add": cases.add(33),
    "activation": cases.activation(7, "silu"),
    "gated activation": cases.gated_activation(7, "gelu_tanh"),
    "rms norm": cases.rms_norm(72),
    "rms norm, odd": cases.rms_norm(99, heads=3, residual=True),
    "rms norm, selected": cases.rms_norm(36, select=True, residual=True),
    "layer norm": cases.layer_norm(129),
    "select rows": cases.select_rows(7),
    "position embedding": cases.position_embedding(64, 7, "fp16"),
    "embedding": cases.embedding(40, 24, "fp16", scale=3.0),
    "embedding, odd": cases.embedding(40, 7, "fp32"),
    "embedding, outliers": cases.embedding(40, 64, "int4o16"),
    "rope": cases.rope(3, 8, 3),
}

LINEAR = (
    ("software", 1, 33, 64, "fp16", "linear/words.f16"),
    ("software", 1, 33, 64, "int4o8", "linear/groups.gated_q"),
    ("software", 3, 33, 64, "int4o8", "linear/broadcast.q"),
    ("plain", 3, 33, 64, "int4o8", "linear/lane_row.q"),
    ("plain", 3, 7, 9, "fp32", "linear/lane_row.gated_f32"),
    ("gpu", 2, 33, 64, "int4o8", "linear/gemv.q"),
    ("gpu", 2, 7, 9, "fp16", "linear/gemv.gated_f16"),
    ("gpu", 20, 33, 64, "int4o8", "linear/gemm.m16_q"),
    ("dot_gpu", 1, 33, 64, "int4o8", "linear/digits.gated"),
)


def filled(graph: Graph, live: int = LIVE, **options: object) -> Call:
    """A call with random inputs and weights."""
    rng = np.random.default_rng(live)
    inputs = {
        name: rng.standard_normal((live, int(str(value.shape[1])))).astype(np.float32)
        for name, value in graph.inputs.items()
        if value.dtype == FLOAT
    }
    weights = {
        name: rng.standard_normal(weight.shape).astype(np.float32) / weight.shape[-1] ** 0.5
        for name, weight in graph.weights.items()
    }
    if "inv_freq" in weights:
        weights["inv_freq"] = cases.frequencies(*graph.weights["inv_freq"].shape)
    call = Call(
        graph=graph,
        rows=rows_of(range(live), tokens=range(live)),
        inputs=inputs,
        weights=weights,
        half_values=True,
    )
    return replace(call, **options)  # type: ignore[arg-type]


def check(bench: Bench, call: Call, expected: Array, slack: float = 2e-5) -> list[str]:
    """The result is the nearest fp16 number, but for what the sums are off; the kernels."""
    outcome = bench.run(call)
    found = outcome.value("y")
    assert found.dtype == np.float16
    bound = 2.0**-11 * np.abs(expected) + 2.0**-25 + slack * np.abs(expected).max()
    assert_close(found, expected, bound)
    return outcome.kernels


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_row_by_row(bench: Bench, name: str) -> None:
    selected = "select" in name
    call = filled(ROW_BY_ROW[name])
    if selected:
        inputs = {n: array[:2] if n == "r" else array for n, array in call.inputs.items()}
        call = replace(call, inputs=inputs, selection=(3, 0), selected=3)
    outliers = 2.0**-10 if "outliers" in name else 0.0  # such columns are rounded twice
    check(bench, call, call.expected()["y"], 2e-5 + outliers)


@pytest.mark.parametrize(("device", "rows", "n", "k", "dtype", "kernel"), LINEAR)
def test_linear(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    rows: int,
    n: int,
    k: int,
    dtype: str,
    kernel: str,
) -> None:
    """Odd rows of results, of which two share a word; a norm inside or in a launch of its own."""
    if device == "dot_gpu" and not bench.device.caps.has_dot_product:
        pytest.skip(f"{bench.device.info.name} has no integer dot products")
    monkeypatch.setattr(digits, "DIGIT_WEIGHTS", 0)
    gated = "gated" in kernel
    if gated:
        graph = cases.gated_linear(n, k, dtype, bias=True, norm=True)
    else:
        graph = cases.linear(n, k, dtype, bias=True, residual=True, activation="silu")
    call = filled(graph, rows, device=device)
    # A norm in a launch of its own leaves fp16, too.
    kernels = check(bench, call, call.expected()["y"], 2e-3 if gated else 2e-5)
    assert kernels[-1] == kernel


@pytest.mark.parametrize(("n", "gated"), ((8, True), (7, True), (8, False), (7, False)))
def test_joined_splits(bench: Bench, n: int, gated: bool) -> None:
    """Raw sums of splits are fp32; what is made of them is a value."""
    if not bench.device.caps.has_dot_product:
        pytest.skip(f"{bench.device.info.name} has no integer dot products")
    graph = (
        cases.gated_linear(n, 512, "int4", bias=True)
        if gated
        else cases.linear(n, 512, "int4", bias=True, residual=True)
    )
    call = filled(graph, 1, device="dot_gpu")
    (site,) = lower(call, bench.device.caps).sites
    split = next(variant for variant in site.admitted if variant.groups[2] > 1)
    call = replace(call, choices=Choices(winners={site.key: split.name}))
    kernels = check(bench, call, call.expected()["y"])
    assert kernels == [split.kernel]


@pytest.mark.parametrize(
    ("device", "rows", "kernel"),
    (
        ("software", 12, "attention/flash.kv16"),
        ("software", 1, "attention/split.kv16"),
        ("gpu", 1, "attention/lanes.kv16"),
    ),
)
def test_attention(bench: Bench, device: str, rows: int, kernel: str) -> None:
    rng = np.random.default_rng(rows)
    start = 300  # some splits
    pool = KvPool(3, 8, half=True, table_blocks=6)
    pool.fill(0, start + rows, rng)
    call = filled(
        cases.attention(9, 3, 8),
        rows,
        rows=rows_of(range(start, start + rows)),
        kv=pool,
        device=device,
        kind="chunk" if rows > 1 else "batch",
    )
    assert check(bench, call, call.expected(pool.state(0, start + rows))["y"])[0] == kernel


@pytest.mark.parametrize("name", ("linear", "gated", "attention"))
def test_cooperative_matrices(bench: Bench, name: str) -> None:
    """x goes into the tiles as it lies in memory; odd rows of results."""
    if not all(meets(bench.device.caps, need) for need in MATRIX_NEEDS):
        pytest.skip(f"{bench.device.info.name} has no 16 x 16 x 16 cooperative matrices of fp16")
    rows = 20
    if name == "attention":
        pool = KvPool(2, 64, half=True)
        pool.fill(0, rows, np.random.default_rng(1))
        call = filled(cases.attention(4, 2, 64), rows, kv=pool)
        expected = call.expected(pool.state(0, rows))["y"]
    else:
        make = cases.linear if name == "linear" else cases.gated_linear
        call = filled(make(33, 64, "fp16", bias=True), rows)
        expected = call.expected()["y"]
    kernels = check(
        bench, replace(call, device="gpu", half_operands=True, kind="chunk"), expected, 2e-3
    )
    assert "linear/coopmat." in kernels[0] or "attention/flash_matrix." in kernels[0]


@pytest.mark.parametrize("norms", (False, True))
def test_rope_append(bench: Bench, norms: bool) -> None:
    """q as a value, k and v into an fp32 cache, from rows stored as fp16."""
    pool = KvPool(1, 8, half=False)
    call = filled(cases.rope_append(3, 1, 8, 2, norms=norms), kv=pool)
    check(bench, call, call.expected()["y"])
    after = bench.run(call).blocks
    assert after is not None
    block, inside = pool.at(0, 2)
    stored = call.inputs["qkv"][2, -8:].astype(np.float16).astype(np.float32)
    assert np.array_equal(after.data[block, 1, 1, 0, inside], stored)


@pytest.mark.parametrize(
    ("device", "dtype"), (("gpu", "fp16"), ("dot_gpu", "int8"), ("plain", "fp16"))
)
def test_qkv_append(bench: Bench, monkeypatch: pytest.MonkeyPatch, device: str, dtype: str) -> None:
    if device == "dot_gpu" and not bench.device.caps.has_dot_product:
        pytest.skip(f"{bench.device.info.name} has no integer dot products")
    monkeypatch.setattr(digits, "DIGIT_WEIGHTS", 0)
    graph = cases.qkv_append(3, 1, 8, 2, 32, dtype, bias=True, norm=True)
    call = filled(graph, 1, kv=KvPool(1, 8, half=True), device=device, kind="batch")
    # Apart, the norm and the row [q; k; v] are rounded as well.
    check(bench, call, call.expected()["y"], 2e-3 if device == "plain" else 2e-5)


def test_kv_append(bench: Bench) -> None:
    call = filled(cases.kv_append(2, 8), kv=KvPool(2, 8, half=True))
    after = bench.run(call).blocks
    assert after is not None and call.kv is not None
    block, inside = call.kv.at(0, 4)
    for side, name in enumerate("kv"):
        want = call.inputs[name][4].astype(np.float16).reshape(2, 8)
        assert np.array_equal(after.data[block, 1, side, :, inside], want)


@pytest.mark.parametrize("device", ("software", "gpu"))
def test_logits_stay_fp32(bench: Bench, device: str) -> None:
    call = filled(cases.head(77, 64, "fp16"), 2, device=device, tail=Tail("logits"))
    call = replace(call, selection=(0, 1))
    outcome = bench.run(call)
    assert outcome.value("y").dtype == np.float32
    assert_close(outcome.value("y"), call.expected()["y"], 1e-5)


def test_saturation_and_what_is_not_finite(bench: Bench) -> None:
    """Finite sums beyond fp16 become its largest numbers, in either half of a word; infinities and
    NaN stay what they are, so that they are still found at the logits."""
    a = np.array([[6e4, -6e4, 65504, 65504, np.inf, np.nan, 6e4]], np.float32)
    b = np.array([[6e4, -6e4, 8, 16, 1, 1, np.inf]], np.float32)
    call = Call(
        graph=cases.add(7),
        rows=rows_of([0]),
        inputs={"a": a, "b": b},
        half_values=True,
        allow_nan=True,
    )
    found = bench.run(call).value("y")
    with np.errstate(over="ignore", invalid="ignore"):
        want = to_half(a.astype(np.float16).astype(np.float32) + b.astype(np.float16))
    assert want[0, :4].tolist() == [65504, -65504, 65504, 65504]
    assert np.array_equal(found, want, equal_nan=True)


def test_choices_are_of_a_form_of_storage() -> None:
    """What was measured fastest for fp32 values says nothing about fp16 ones."""
    from ops.test_spirv import small_caps

    call = filled(cases.linear(24, 64, "fp16"), 1, device="gpu")
    keys = []
    for half in (False, True):
        low = lower(replace(call, half_values=half, choices=Choices()), small_caps())
        keys.append(low.sites[0].key)
        sizes = {name.rpartition("/")[2]: size for name, size in low.buffers.items()}
        assert sizes["x"] == (128 if half else 256)
    assert keys[0] != keys[1]
