"""Linear and gated linear: every kernel variant against float64, over odd shapes."""

from __future__ import annotations

import numpy as np
import pytest

from hornito.graph.graph import Node
from hornito.ops import gated_linear, gemv, linear
from hornito.ops.base import Array, Lowering
from hornito.ops.gated_activation import activate
from hornito.ops.gemv import Geometry
from hornito.ops.linear import LinearArgs, emit_join
from ops import cases
from ops.harness import Bench, Call, assert_close, rows_of, stored_values

pytestmark = pytest.mark.gpu

EPS = 2.0**-24
DTYPES = ("fp32", "fp16")
DEVICES = ("software", "plain", "gpu")


def bucket_of(live: int) -> int:
    """Buckets of plans are powers of two."""
    return 1 << (live - 1).bit_length()


def data(rng: np.random.Generator, live: int, n: int, k: int, scale: float) -> tuple[Array, Array]:
    x = (rng.standard_normal((live, k)) * scale).astype(np.float32)
    return x, rng.standard_normal((n, k)).astype(np.float32)


def product_bound(x: Array, w: Array) -> Array:
    """Bound on the rounding error of fp32 dot products, `[rows, N]`.

    Each of the K roundings is at most eps times the sum of |x w| so far and their signs are as good
    as random, so the sum of them stays below 4 sqrt(K) eps sum |x w|.
    """
    k = x.shape[1]
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T
    bound: Array = (4.0 * np.sqrt(k) + 8.0) * EPS * magnitude
    return bound


def rounded(w: Array, dtype: str) -> Array:
    return stored_values(w, dtype)


def check_linear(
    bench: Bench,
    live: int,
    n: int,
    k: int,
    dtype: str,
    device: str,
    *,
    extras: bool = True,
    scale: float = 1.0,
    bucket: int = 0,
) -> list[str]:
    rng = np.random.default_rng(live * 7919 + n * 31 + k)
    x, w = data(rng, live, n, k, scale)
    bucket = bucket or bucket_of(live)
    inputs, weights = {"x": x}, {"w": w}
    if extras:
        inputs["r"] = rng.standard_normal((live, n)).astype(np.float32)
        weights["b"] = rng.standard_normal(n).astype(np.float32)
    call = Call(
        graph=cases.linear(n, k, dtype, bias=extras, residual=extras),
        rows=rows_of(range(live), bucket=bucket),
        inputs=inputs,
        weights=weights,
        device=device,
    )
    outcome = bench.run(call)
    bound = product_bound(x, rounded(w, dtype))
    if extras:
        bound = bound + 4 * EPS * (np.abs(weights["b"]) + np.abs(inputs["r"]))
    assert_close(outcome.value("y"), call.expected()["y"], bound)
    return outcome.kernels


ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_counts(bench: Bench, device: str, dtype: str) -> None:
    """Every row count, with N of every remainder mod 8 and K of several widths."""
    seen = set()
    for i, live in enumerate(ROWS):
        k = (8, 24, 72, 136)[i % 4]
        seen.update(check_linear(bench, live, 40 + i, k, dtype, device))
    stems = {name.split("/")[1].split(".")[0] for name in seen}
    expected = {
        "software": {"words", "broadcast"},
        "plain": {"lane_row"},
        "gpu": {"gemv", "gemm"},
    }
    assert stems == expected[device]
    if device == "gpu":
        suffix = "f16" if dtype == "fp16" else "f32"
        assert f"linear/gemm.m16_{suffix}" in seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", (1, 7, 36, 100))
def test_width_that_is_no_multiple_of_eight(bench: Bench, device: str, dtype: str, k: int) -> None:
    for live, n in ((1, 13), (3, 66), (9, 7), (20, 70)):
        check_linear(bench, live, n, k, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
def test_without_bias_and_residual(bench: Bench, device: str) -> None:
    for live in (1, 5, 20):
        check_linear(bench, live, 9, 16, "fp32", device, extras=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", (1, 7, 8, 63, 64, 65, 576))
def test_output_counts(bench: Bench, device: str, n: int) -> None:
    for live in (1, 8, 17):
        check_linear(bench, live, n, 64, "fp16", device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_beyond_the_range_of_fp16(bench: Bench, device: str, dtype: str) -> None:
    """Activations of 60 over weights of 1: partial sums exceed 65504 (GLM-4's GGGG)."""
    for live, k in ((1, 4864), (2, 4864), (12, 1152), (32, 1152)):
        n = 10
        x = np.full((live, k), 60.0, np.float32)
        w = np.ones((n, k), np.float32)
        w[1::2] = -1.0
        w[4:, ::2] *= -1.0
        graph = cases.linear(n, k, dtype)
        call = Call(
            graph=graph,
            rows=rows_of(range(live), bucket=bucket_of(live)),
            inputs={"x": x},
            weights={"w": w},
            device=device,
        )
        found = bench.run(call).value("y")
        # Every partial sum is a multiple of 60 below 2^24, so fp32 is exact.
        assert np.array_equal(found, call.expected()["y"])
        assert abs(found[0, 0]) == 60.0 * k
        check_linear(bench, live, 21, k, dtype, device, scale=60.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("live", (1, 2, 7, 8, 9, 31, 32, 33, 127, 128, 129))
def test_row_counts_around_half_the_width(bench: Bench, device: str, live: int) -> None:
    """K = 64, rows below, at and far above K / 2: scratch sized by K would show (executorch)."""
    check_linear(bench, live, 72, 64, "fp16", device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", (36, 64))
def test_one_hot_rows_recover_every_weight(bench: Bench, device: str, dtype: str, k: int) -> None:
    n = 21
    w = np.random.default_rng(1).standard_normal((n, k)).astype(np.float32)
    for live in (1, k):
        rows = np.eye(k, dtype=np.float32)[-live:]
        call = Call(
            graph=cases.linear(n, k, dtype),
            rows=rows_of(range(live), bucket=bucket_of(live)),
            inputs={"x": rows},
            weights={"w": w},
            device=device,
        )
        assert np.array_equal(bench.run(call).value("y"), rounded(w, dtype).T[-live:])


@pytest.mark.parametrize("n", (80, 130, 300))
def test_output_rows_that_need_fewer_lanes_each(bench: Bench, n: int) -> None:
    """A grid of 20 workgroups: 32, 16 and 8 lanes an output row."""
    assert check_linear(bench, 2, n, 72, "fp16", "small_grid") == ["linear/gemv.f16"]


@pytest.mark.parametrize("device", DEVICES)
def test_bucket_with_few_live_rows(bench: Bench, device: str) -> None:
    """A bucket of 64 with 1, 5 and 17 live rows: the others stay poison."""
    for live in (1, 5, 17):
        check_linear(bench, live, 33, 40, "fp16", device, bucket=64)


@pytest.mark.parametrize("device", DEVICES)
def test_no_live_row(bench: Bench, device: str) -> None:
    for bucket in (1, 16, 64):
        call = Call(
            graph=cases.linear(9, 16, bias=True),
            rows=rows_of([], bucket=bucket),
            weights={"w": np.ones((9, 16), np.float32), "b": np.ones(9, np.float32)},
            inputs={"x": np.ones((0, 16), np.float32)},
            device=device,
        )
        assert bench.run(call).value("y").shape == (0, 9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ("silu", "gelu_tanh"))
def test_gated(bench: Bench, device: str, dtype: str, activation: str) -> None:
    shapes = ((1, 13, 24), (2, 9, 100), (8, 66, 64), (17, 65, 40), (33, 7, 36))
    for i, (live, n, k) in enumerate(shapes):
        rng = np.random.default_rng(i)
        x, w = data(rng, live, 2 * n, k, 0.5)
        bias = i % 2 == 0
        weights = {"w": w}
        if bias:
            weights["b"] = rng.standard_normal(2 * n).astype(np.float32)
        call = Call(
            graph=cases.gated_linear(n, k, dtype, activation=activation, bias=bias),
            rows=rows_of(range(live), bucket=bucket_of(live)),
            inputs={"x": x},
            weights=weights,
            device=device,
        )
        outcome = bench.run(call)
        assert all("gated_" in kernel for kernel in outcome.kernels)
        exact = x.astype(np.float64) @ rounded(w, dtype).astype(np.float64).T
        exact += weights.get("b", np.zeros(2 * n))
        error = product_bound(x, rounded(w, dtype)) + 2 * EPS * np.abs(exact)
        before, up = exact[:, 0::2], exact[:, 1::2]
        gate = activate(activation, before)
        # Both activations have slopes below 1.13; exp and tanh are good to a few 1e-6.
        bound = 1.13 * error[:, 0::2] * np.abs(up) + np.abs(gate) * error[:, 1::2]
        bound += 4e-6 * np.abs(before * up) + 1e-7 * np.abs(up)
        assert_close(outcome.value("y"), call.expected()["y"], bound)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ("silu", "gelu_tanh"))
def test_activation_before_the_residual(bench: Bench, device: str, activation: str) -> None:
    for live in (1, 5, 20):
        rng = np.random.default_rng(live)
        x, w = data(rng, live, 30, 40, 0.5)
        bias = rng.standard_normal(30).astype(np.float32)
        residual = rng.standard_normal((live, 30)).astype(np.float32) * 100
        call = Call(
            graph=cases.linear(30, 40, bias=True, residual=True, activation=activation),
            rows=rows_of(range(live), bucket=bucket_of(live)),
            inputs={"x": x, "r": residual},
            weights={"w": w, "b": bias},
            device=device,
        )
        expected = call.expected()["y"]
        before = np.abs(x.astype(np.float64) @ w.T + bias)
        bound = 1.13 * (product_bound(x, w) + 2 * EPS * before) + 4e-6 * before + 1e-7
        bound += 2 * EPS * np.abs(expected)
        assert_close(bench.run(call).value("y"), expected, bound)


@pytest.mark.parametrize("device", DEVICES)
def test_gated_with_huge_gates(bench: Bench, device: str) -> None:
    """Gates of +-1e4: silu and gelu are the identity or zero, never NaN."""
    k = 8
    x = np.zeros((2, k), np.float32)
    x[0, 0], x[1, 0] = 1e4, -1e4
    w = np.ones((2, k), np.float32)
    w[1] = 0.0
    w[1, 0] = 1e-4
    for activation in ("silu", "gelu_tanh"):
        call = Call(
            graph=cases.gated_linear(1, k, activation=activation),
            rows=rows_of(range(2)),
            inputs={"x": x},
            weights={"w": w},
            device=device,
        )
        assert_close(bench.run(call).value("y"), np.array([[1e4], [0.0]]), 1e-2)


@pytest.mark.parametrize("dtype", (pytest.param("fp32", marks=pytest.mark.slow), "fp16"))
def test_large_tiles(bench: Bench, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMM in tiles of 64 rows, which otherwise only large grids take."""
    monkeypatch.setattr(linear, "LARGE_TILE_GROUPS", 1)
    seen: set[str] = set()
    for i, live in enumerate((17, 33, 64, 65, 130)):
        seen.update(check_linear(bench, live, 60 + 7 * i, (8, 24, 72, 136, 36)[i], dtype, "gpu"))
    assert {name.split(".")[1].split("_")[0] for name in seen} == {"m64"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "gated"),
    [
        pytest.param(dtype, gated, marks=() if gated == (i % 2 == 1) else pytest.mark.slow)
        for i, dtype in enumerate((*DTYPES, "int8", "int4m"))
        for gated in (False, True)
    ],
)
def test_norm_first(bench: Bench, device: str, dtype: str, gated: bool) -> None:
    """A norm before the product, in the same launch for few rows on GPUs, in its own elsewhere."""
    k, n = 96, 37
    rng = np.random.default_rng(k)
    for live in (1, 3, 9, 17):
        x = (rng.standard_normal((live, k)) * np.geomspace(0.01, 300, live)[:, None]).astype("f4")
        weights = {
            "w": rng.standard_normal((2 * n if gated else n, k)).astype(np.float32) / 10,
            "norm": rng.standard_normal(k).astype(np.float32),
            "b": rng.standard_normal(2 * n if gated else n).astype(np.float32),
        }
        make = cases.gated_linear if gated else cases.linear
        call = Call(
            graph=make(n, k, dtype, bias=True, norm=True),
            rows=rows_of(range(live), bucket=bucket_of(live)),
            inputs={"x": x},
            weights=weights,
            device=device,
        )
        outcome = bench.run(call)
        fused = device == "gpu" and live <= 16
        assert ("rms_norm/norm.default" in outcome.kernels) != fused
        assert len(outcome.kernels) == (1 if fused else 2)
        expected = call.expected()["y"]
        assert_close(outcome.value("y"), expected, 1e-5 * (1 + np.abs(expected)))


@pytest.mark.parametrize("outs", (1, 2, 4))
@pytest.mark.parametrize("lanes", (8, 32, 128))
def test_every_gemv_geometry(bench: Bench, lanes: int, outs: int) -> None:
    """Variants that are taken only where they measure faster give the same numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemv, "gemv_geometry", lambda *_: Geometry(lanes, outs))
        for live, n, k, dtype in ((1, 9, 88, "fp16"), (4, 130, 160, "int8"), (3, 66, 36, "fp32")):
            (kernel,) = check_linear(bench, live, n, k, dtype, "gpu")
            assert kernel.startswith("linear/gemv.")


def test_sums_join_in_shared_memory_without_shuffles(bench: Bench) -> None:
    geometries = (Geometry(8, 4), Geometry(128, 1), Geometry(64, 2))
    for geometry, live, dtype in zip(geometries, (3, 1, 4), ("fp16", "fp32", "int8"), strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gemv, "gemv_geometry", lambda *_, taken=geometry: taken)
            (kernel,) = check_linear(bench, live, 37, 160, dtype, "bare_gpu")
            assert kernel.startswith("linear/gemv.tree_")


@pytest.mark.parametrize(
    ("dtype", "gated", "device"),
    (("int8", False, "gpu"), ("int4o24", True, "gpu"), ("int4o24", True, "bare_gpu")),
)
def test_groups_of_eight_weight_rows(bench: Bench, dtype: str, gated: bool, device: str) -> None:
    n, k = 21, 2304
    rng = np.random.default_rng(k)
    make = cases.gated_linear if gated else cases.linear
    call = Call(
        graph=make(n, k, dtype, norm=True),
        rows=rows_of([0]),
        inputs={"x": rng.standard_normal((1, k)).astype(np.float32) * 7},
        weights={
            "w": rng.standard_normal((2 * n if gated else n, k)).astype(np.float32) / 40,
            "norm": rng.standard_normal(k).astype(np.float32),
        },
        device=device,
    )
    expected = call.expected()["y"]
    join = "tree_" if device == "bare_gpu" else ""
    for geometry in (Geometry(16, 8), Geometry(128, 8)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gemv, "gemv_geometry", lambda *_, taken=geometry: taken)
            outcome = bench.run(call)
        assert outcome.kernels == [f"linear/gemv.{join}" + ("gated_q" if gated else "q")]
        assert_close(outcome.value("y"), expected, 2e-5 * (1 + np.abs(expected)))


@pytest.mark.parametrize("n", (8, 7))
@pytest.mark.parametrize("gated", (False, True))
def test_parts_of_k_join(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, n: int, gated: bool
) -> None:
    """What joins the splits of cooperative matrices: x holds raw sums, some of no live row."""
    live, bucket, splits, padded = 3, 4, 5, 16
    products = 2 * n if gated else n
    k = splits * padded * products // bucket
    rng = np.random.default_rng(n)

    def only_join(node: Node, low: Lowering, args: LinearArgs) -> None:
        emit_join(node, low, args, splits, padded)

    for module in (linear, gated_linear):
        monkeypatch.setattr(module, "emit_linear", only_join)
    sums = rng.standard_normal((splits, padded, products)).astype(np.float32)
    bias = rng.standard_normal(products).astype(np.float32)
    residual = rng.standard_normal((bucket, n)).astype(np.float32)
    call = Call(
        graph=(
            cases.gated_linear(n, k, "fp32", bias=True)
            if gated
            else cases.linear(n, k, "fp32", bias=True, residual=True, activation="silu")
        ),
        rows=rows_of(range(live), bucket=bucket),
        inputs={"x": sums.reshape(bucket, k)} | ({} if gated else {"r": residual}),
        weights={"w": np.zeros((products, k), np.float32), "b": bias},
    )
    outcome = bench.run(call)
    assert outcome.kernels == ["linear/join." + ("gated" if gated else "default")]
    total = sums[:, :live].astype(np.float64).sum(0) + bias
    if gated:
        expected = activate("silu", total[:, 0::2]) * total[:, 1::2]
    else:
        expected = activate("silu", total) + residual[:live]
    assert_close(outcome.value("y"), expected, 1e-6 * (1 + np.abs(total).max()))
