"""Add, gated activation, norms, embedding, row selection: the ops that work row by row."""

from __future__ import annotations

import numpy as np
import pytest

from hornito.errors import UsageError
from hornito.ops.base import Array
from ops import cases
from ops.harness import Bench, Call, assert_close, device_class, lower, rows_of

pytestmark = pytest.mark.gpu

EPS = 2.0**-24
WIDTHS = (1, 8, 24, 36, 72, 100, 129, 576)
ROWS = (1, 2, 3, 5, 8, 17, 33, 65)
SHAPES = (*zip(ROWS, WIDTHS, strict=True), (7, 1152))


@pytest.mark.parametrize(("live", "width"), SHAPES)
def test_add(bench: Bench, live: int, width: int) -> None:
    rng = np.random.default_rng(width)
    a, b = rng.standard_normal((2, live, width)).astype(np.float32) * 1e5
    call = Call(
        graph=cases.add(width), rows=rows_of(range(live), bucket=66), inputs={"a": a, "b": b}
    )
    assert np.array_equal(bench.run(call).value("y"), a + b)


@pytest.mark.parametrize("activation", ("silu", "gelu_tanh"))
@pytest.mark.parametrize(("live", "width"), SHAPES[::2])
def test_gated_activation(bench: Bench, live: int, width: int, activation: str) -> None:
    rng = np.random.default_rng(width)
    gate, up = rng.standard_normal((2, live, width)).astype(np.float32) * 4
    call = Call(
        graph=cases.gated_activation(width, activation),
        rows=rows_of(range(live), bucket=66),
        inputs={"gate": gate, "up": up},
    )
    # exp and tanh of drivers are good to a few units in the last place of 1.
    bound = 4e-6 * np.abs(gate.astype(np.float64) * up) + 1e-7 * np.abs(up)
    assert_close(bench.run(call).value("y"), call.expected()["y"], bound)


@pytest.mark.parametrize("activation", ("silu", "gelu_tanh"))
def test_gated_activation_of_extreme_gates(bench: Bench, activation: str) -> None:
    gate = np.array([[0.0, -0.0, 1e4, -1e4, 100.0, -100.0, 89.0, -89.0, 1e-30, -1e-30]], np.float32)
    call = Call(
        graph=cases.gated_activation(10, activation),
        rows=rows_of([0]),
        inputs={"gate": gate, "up": np.ones_like(gate)},
    )
    with np.errstate(over="ignore"):
        expected = call.expected()["y"]
    assert_close(bench.run(call).value("y"), expected, 4e-6 * np.abs(gate) + 1e-31)


def norm_bound(x: Array, expected: Array) -> Array:
    """Sum of squares: a tree of depth 7 over runs of H / 128; rsqrt: 2 units; two products."""
    bound: Array = (x.shape[1] / 128 + 7 + 8) * EPS * np.abs(expected) + 1e-30
    return bound


@pytest.mark.parametrize(("live", "width"), SHAPES)
def test_rms_norm(bench: Bench, live: int, width: int) -> None:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((live, width)).astype(np.float32)
    x[:, 0] *= 3e3  # an outlier channel, as real models have
    call = Call(
        graph=cases.rms_norm(width, eps=1e-6),
        rows=rows_of(range(live), bucket=66),
        inputs={"x": x},
        weights={"w": rng.standard_normal(width).astype(np.float32)},
    )
    expected = call.expected()["y"]
    assert_close(bench.run(call).value("y"), expected, norm_bound(x, expected))


def test_rms_norm_of_large_and_tiny_rows(bench: Bench) -> None:
    """Squares of 1e15 and of 1e-12 stay in range; a row of zeros gives zeros, not NaN."""
    x = np.ones((4, 72), np.float32) * np.array([[1e15], [1e-12], [0.0], [6.5e4]], np.float32)
    call = Call(
        graph=cases.rms_norm(72, eps=1e-6),
        rows=rows_of(range(4)),
        inputs={"x": x},
        weights={"w": np.linspace(-2, 2, 72, dtype=np.float32)},
    )
    expected = call.expected()["y"]
    found = bench.run(call).value("y")
    assert_close(found, expected, norm_bound(x, expected))
    assert (found[2] == 0.0).all()


@pytest.mark.parametrize("selection", ((0,), (6,), (0, 3, 6), (5, 5, 1, 0)))
def test_rms_norm_of_selected_rows(bench: Bench, selection: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((7, 100)).astype(np.float32)
    call = Call(
        graph=cases.rms_norm(100, select=True),
        rows=rows_of(range(7), bucket=16),
        inputs={"x": x},
        weights={"w": rng.standard_normal(100).astype(np.float32)},
        selection=selection,
        selected=8,
    )
    expected = call.expected()["y"]
    assert_close(bench.run(call).value("y"), expected, norm_bound(x, expected))


@pytest.mark.parametrize(
    ("heads", "head_dim", "select", "residual"),
    ((4, 16, False, False), (3, 130, False, True), (1, 100, True, True), (2, 8, True, False)),
)
def test_rms_norm_of_heads_and_with_a_residual(
    bench: Bench, heads: int, head_dim: int, select: bool, residual: bool
) -> None:
    rng = np.random.default_rng(head_dim)
    width, live, selection = heads * head_dim, 7, (6, 0, 3)
    inputs = {"x": rng.standard_normal((live, width)).astype(np.float32)}
    inputs["x"][:, ::head_dim] *= 100  # every head has a scale of its own
    inputs["x"][:, :head_dim] *= 50
    if residual:
        rows = len(selection) if select else live
        inputs["r"] = rng.standard_normal((rows, width)).astype(np.float32)
    call = Call(
        graph=cases.rms_norm(width, select=select, heads=heads, residual=residual),
        rows=rows_of(range(live), bucket=8),
        inputs=inputs,
        weights={"w": rng.standard_normal(head_dim).astype(np.float32)},
        selection=selection if select else (),
        selected=4 if select else 0,
    )
    expected = call.expected()["y"]
    added = np.abs(inputs["r"]) if residual else np.zeros_like(expected)
    bound = norm_bound(inputs["x"], np.abs(expected) + 2 * added)
    assert_close(bench.run(call).value("y"), expected, bound)


@pytest.mark.parametrize("select", (False, True))
@pytest.mark.parametrize(("live", "width"), ((1, 8), (3, 100), (17, 129), (5, 1152)))
def test_layer_norm(bench: Bench, live: int, width: int, select: bool) -> None:
    """Rows of a large mean keep their bits, as the variance is summed from differences."""
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((live, width)) + np.linspace(-300, 300, live)[:, None]).astype(
        np.float32
    )
    call = Call(
        graph=cases.layer_norm(width, eps=1e-6, select=select),
        rows=rows_of(range(live), bucket=18),
        inputs={"x": x},
        weights={
            "w": rng.standard_normal(width).astype(np.float32),
            "b": rng.standard_normal(width).astype(np.float32),
        },
        selection=(live - 1, 0) if select else (),
        selected=4 if select else 0,
    )
    expected = call.expected()["y"]
    # The mean of values around 300 is off by a few units of 300 / 2^24; the deviation is about 1.
    depth = width / 128 + 7
    mean_error = (depth + 4) * EPS * 305.0 * np.abs(call.weights["w"])
    bound = 3 * mean_error + (depth + 10) * EPS * (np.abs(expected) + np.abs(call.weights["b"]))
    assert_close(bench.run(call).value("y"), expected, bound)


@pytest.mark.parametrize("name", ("silu", "gelu_tanh"))
@pytest.mark.parametrize(("live", "width"), ((1, 1), (5, 100), (17, 129)))
def test_activation(bench: Bench, live: int, width: int, name: str) -> None:
    x = np.random.default_rng(width).standard_normal((live, width)).astype(np.float32) * 6
    call = Call(
        graph=cases.activation(width, name),
        rows=rows_of(range(live), bucket=18),
        inputs={"x": x},
    )
    assert_close(bench.run(call).value("y"), call.expected()["y"], 4e-6 * np.abs(x) + 1e-7)


@pytest.mark.parametrize("dtype", ("fp32", "fp16"))
@pytest.mark.parametrize("width", (1, 7, 64, 130))
def test_position_embedding(bench: Bench, dtype: str, width: int) -> None:
    rng = np.random.default_rng(width)
    positions = (0, 255, 3, 100, 64)
    x = rng.standard_normal((5, width)).astype(np.float32)
    call = Call(
        graph=cases.position_embedding(256, width, dtype),
        rows=rows_of(positions, bucket=8, inactive=(2,)),
        inputs={"x": x},
        weights={"table": rng.standard_normal((256, width)).astype(np.float32)},
        kind="batch",
        context=256,
    )
    found, expected = bench.run(call).value("y"), call.expected()["y"]
    active = [0, 1, 3, 4]
    assert np.array_equal(found[active], expected[active].astype(np.float32))
    assert np.isnan(found[2]).all()


def test_positions_past_the_table_are_refused(bench: Bench) -> None:
    call = Call(graph=cases.position_embedding(256, 8, "fp16"), rows=rows_of([0]), context=257)
    with pytest.raises(UsageError, match=r"256 tokens; a context of 257 .*context of 256 or less"):
        lower(call, device_class(bench.device.caps, "software"))


def test_select_rows(bench: Bench) -> None:
    x = np.random.default_rng(3).standard_normal((7, 130)).astype(np.float32)
    selection = (6, 0, 0, 5)
    call = Call(
        graph=cases.select_rows(130),
        rows=rows_of(range(7), bucket=8),
        inputs={"x": x},
        selection=selection,
        selected=6,
    )
    assert np.array_equal(bench.run(call).value("y"), x[list(selection)])


@pytest.mark.parametrize("dtype", ("fp32", "fp16"))
@pytest.mark.parametrize("width", (3, 8, 130))
def test_embedding(bench: Bench, dtype: str, width: int) -> None:
    """Ids beyond 65504 stay integers; inactive rows in the middle are left alone."""
    vocabulary = 70001
    table = np.random.default_rng(width).standard_normal((vocabulary, width), np.float32)
    ids = [0, 1, 65503, 65504, 65505, 65535, 65536, 65537, 69999, 70000, 69999]
    call = Call(
        graph=cases.embedding(vocabulary, width, dtype),
        rows=rows_of(range(len(ids)), bucket=16, tokens=ids, inactive=(3, 7)),
        weights={"table": table},
    )
    outcome = bench.run(call)
    found, expected = outcome.value("y"), call.expected()["y"]
    active = [r for r in range(len(ids)) if r not in (3, 7)]
    assert np.array_equal(found[active], expected[active])
    assert np.isnan(found[[3, 7]]).all()


def test_embedding_of_subnormal_halves(bench: Bench) -> None:
    """fp16 weights below 2^-14 are numbers, not zero."""
    table = (np.arange(-512, 512, dtype=np.float32) * 2.0**-24).reshape(-1, 8)
    call = Call(
        graph=cases.embedding(len(table), 8, "fp16"),
        rows=rows_of(range(len(table)), tokens=range(len(table))),
        weights={"table": table},
    )
    assert np.array_equal(bench.run(call).value("y"), table)


@pytest.mark.parametrize("dtype", ("fp32", "fp16"))
def test_embedding_scale_and_given_embeddings(bench: Bench, dtype: str) -> None:
    """Gathered rows are scaled in fp32; rows that the host embeds are copied as they are."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((40, 70)).astype(np.float32)
    given = rng.standard_normal((8, 70)).astype(np.float32)
    scale = float(np.float32(640.0**0.5))
    call = Call(
        graph=cases.embedding(40, 70, dtype, scale),
        rows=rows_of(range(5), bucket=8, tokens=(3, 39, 0xFFFFFFFF, 0, 7), embedded=(1, 2)),
        weights={"table": table},
        state={"embedded": given},
    )
    found = bench.run(call).value("y")
    numbers = table.astype(np.float16).astype(np.float32) if dtype == "fp16" else table
    for r, token in ((0, 3), (3, 0), (4, 7)):
        assert np.array_equal(found[r], numbers[token] * np.float32(scale))
    assert np.array_equal(found[[1, 2]], given[[1, 2]])
