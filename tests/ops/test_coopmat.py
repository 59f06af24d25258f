"""Cooperative-matrix linears against float64, on devices that have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hornito.graph.graph import Graph
from hornito.ops.base import Array
from hornito.ops.gated_activation import activate
from hornito.ops.matrices import TILES
from hornito.ops.variants import Choices
from ops import cases
from ops.harness import Bench, Call, assert_close, lower, rows_of, stored_values

pytestmark = pytest.mark.gpu

EPS = 2.0**-24
HALF = 2.0**-11
ROWS = (17, 31, 32, 33, 64, 65, 200)
# K with tails of every step, N with tails of every tile.
SHAPES = ((8, 24), (72, 100), (136, 63), (576, 65), (4864, 40))


@pytest.fixture(autouse=True)
def matrices(bench: Bench) -> None:
    caps = bench.device.caps
    shapes = {(c.m, c.n, c.k, c.a_type, c.c_type) for c in caps.coopmat}
    if (16, 16, 16, "f16", "f32") not in shapes or caps.subgroup_size != 32:
        pytest.skip(f"{bench.device.info.name} has no 16 x 16 x 16 cooperative matrices of fp16")


def run(bench: Bench, graph: Graph, x: Array, w: Array) -> Array:
    live = len(x)
    call = Call(
        graph=graph,
        rows=rows_of(range(live), bucket=-(-live // 64) * 64),
        inputs={"x": x},
        weights={"w": w},
        device="gpu",
        half_operands=True,
    )
    outcome = bench.run(call)
    assert outcome.kernels[0].startswith("linear/coopmat.")
    assert all(name.startswith("linear/join.") for name in outcome.kernels[1:])
    return outcome.value("y")[:live]


def bound(x: Array, w: Array) -> Array:
    """Both operands rounded to fp16 once, sums in fp32."""
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T
    return magnitude * (2 * HALF + 4 * np.sqrt(x.shape[1]) * EPS) + 1e-6


@pytest.mark.parametrize("dtype", ("fp16", "int8", "int4o16"))
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_linear(bench: Bench, dtype: str, k: int, n: int) -> None:
    if dtype != "fp16" and k % 32:
        k = -(-k // 32) * 32
    for live in ROWS:
        rng = np.random.default_rng(k + n + live)
        x = rng.standard_normal((live, k)).astype(np.float32)
        given = rng.standard_normal((n, k)).astype(np.float32)
        w = stored_values(given, dtype)
        graph = cases.linear(n, k, dtype)
        expected = x.astype(np.float64) @ w.astype(np.float64).T
        assert_close(run(bench, graph, x, given), expected, bound(x, w))


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_gated(bench: Bench, k: int, n: int) -> None:
    for live in ROWS:
        rng = np.random.default_rng(k + n + live)
        x = rng.standard_normal((live, k)).astype(np.float32)
        w = stored_values(rng.standard_normal((2 * n, k)).astype(np.float32) / np.sqrt(k), "fp16")
        both = x.astype(np.float64) @ w.astype(np.float64).T
        gate, up = both[:, 0::2], both[:, 1::2]
        off = bound(x, w)
        limit = (1.1 * np.abs(up) + 1) * off[:, 0::2] + (np.abs(gate) + 1) * off[:, 1::2]
        graph = cases.gated_linear(n, k, "fp16")
        assert_close(run(bench, graph, x, w), activate("silu", gate) * up, limit)


def test_operands_beyond_fp16_saturate(bench: Bench) -> None:
    x = np.full((20, 64), 1e6, np.float32)
    w = np.full((24, 64), 2.0**-10, np.float32)
    graph = cases.linear(24, 64, "fp16")
    expected = np.full((20, 24), 65504.0 * 2.0**-10 * 64)
    assert_close(run(bench, graph, x, w), expected, np.full((20, 24), 1e-2))


@pytest.mark.parametrize("tile", [tile.stem for tile in TILES])
@pytest.mark.parametrize("dtype", ("fp16", "int4o16", "int8"))
@pytest.mark.parametrize("gated", (False, True))
def test_every_tile(bench: Bench, tile: str, dtype: str, gated: bool) -> None:
    """With tails in rows, weight rows and K, whole and split, as tile and splits are measured."""
    rng = np.random.default_rng(7)
    n, k, live = 150, 608, 270
    x = rng.standard_normal((live, k)).astype(np.float32)
    given = rng.standard_normal((2 * n if gated else n, k)).astype(np.float32) / np.sqrt(k)
    make = cases.gated_linear if gated else cases.linear
    call = Call(
        graph=make(n, k, dtype),
        rows=rows_of(range(live), bucket=320),
        inputs={"x": x},
        weights={"w": given},
        device="gpu",
        half_operands=True,
    )
    (site,) = lower(call, bench.device.caps).sites
    variants = [v for v in site.admitted if f".{tile}_" in v.kernel]
    assert variants
    w = stored_values(given, dtype)
    both, off = x.astype(np.float64) @ w.astype(np.float64).T, bound(x, w)
    expected, limit = both, off
    if gated:
        gate, up = both[:, 0::2], both[:, 1::2]
        expected = activate("silu", gate) * up
        limit = (1.1 * np.abs(up) + 1) * off[:, 0::2] + (np.abs(gate) + 1) * off[:, 1::2]
    for variant in variants:
        outcome = bench.run(replace(call, choices=Choices(winners={site.key: variant.name})))
        assert outcome.kernels[0] == variant.kernel
        assert_close(outcome.value("y")[:live], expected, limit)
