"""Rounding to 8 and 4 bits: scales, outliers, and errors that later columns make up for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from hornito.errors import UnsupportedError
from hornito.graph.weights import ArrayData
from hornito.parallel import Workers
from hornito.quant import matrix
from hornito.quant.compensate import sweep
from hornito.quant.formats import weight_format
from hornito.quant.matrix import Rounded, Statistics, quantise_matrix
from hornito.quant.planes import unpack
from hornito.quant.rounding import Grid, integers, numbers, search, to_half

Floats = npt.NDArray[np.float32]

FOUR_BITS = ("int4", "int4g64", "int4g128", "int4m", "int4mg64")


def rounded(name: str, x: Floats, statistics: Statistics | None = None) -> tuple[Floats, Rounded]:
    """What comes back of numbers, and what rounding says of itself."""
    fmt = weight_format(name)
    done = quantise_matrix(fmt, ArrayData(x), statistics)
    assert len(done.data) == fmt.nbytes(x.shape)
    return unpack(fmt, done.data, x.shape), done


def error_of(name: str, x: Floats) -> float:
    """Relative root-mean-square error of rounding."""
    found, done = rounded(name, x)
    error = float(np.sqrt(np.square(found - x).sum() / np.square(x).sum()))
    assert done.error == pytest.approx(error, rel=1e-4), "measured on all rows of a small matrix"
    return error


def blocks_error(ggml: str, x: Floats) -> float:
    """The same of the gguf package's rounding."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[ggml]
    found = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    return float(np.sqrt(np.square(found - x).sum() / np.square(x).sum()))


def correlated(rng: np.random.Generator, count: int, k: int) -> Floats:
    """Inputs with columns of different sizes that go with each other."""
    mixing = np.eye(k) + 0.3 * rng.standard_normal((k, k))
    x = rng.standard_normal((count, k)) @ mixing * np.exp(0.7 * rng.standard_normal(k)) + 0.2
    return x.astype(np.float32)


def statistics_of(x: Floats) -> Statistics:
    return Statistics((x.T @ x / len(x)).astype(np.float32), x.mean(axis=0))


@pytest.mark.parametrize("shape", ["normal", "heavy tails"])
def test_rounding_loses_less_than_ggufs(shape: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((128, 512)).astype(np.float32)
    if shape != "normal":
        x = rng.standard_t(4, (128, 512)).astype(np.float32)
    x *= np.float32(0.02)
    assert error_of("int8", x) <= blocks_error("Q8_0", x)
    assert error_of("int4", x) <= 0.97 * blocks_error("Q4_0", x)
    assert error_of("int4m", x) <= 0.97 * blocks_error("Q4_1", x)
    assert error_of("int8", x) < error_of("int8g64", x) < error_of("int8g128", x) < 0.012
    assert error_of("int4", x) < error_of("int4g64", x) < error_of("int4g128", x) < 0.2
    assert error_of("int4o32", x) < error_of("int4", x)


@pytest.mark.parametrize("name", ["int8", "int4", "int4m"])
def test_the_search_judges_what_is_stored(name: str) -> None:
    """Its scales are fp16 numbers, and no scale a step away leaves less of the weighted error."""
    rng = np.random.default_rng(5)
    fmt = weight_format(name)
    x = (rng.standard_normal((40, 64)) * 0.03).astype(np.float32)
    importance = np.exp(rng.standard_normal(64)).astype(np.float32)
    grid = search(fmt, x, importance)
    assert np.array_equal(grid.scale, to_half(grid.scale).astype(np.float32))
    assert np.array_equal(grid.base, to_half(grid.base).astype(np.float32))

    def loss(grid: Grid) -> float:
        change = numbers(fmt, integers(fmt, x, grid), grid) - x
        return float((np.square(change) * importance).sum())

    best = loss(grid)
    for factor in (0.97, 0.99, 1.01, 1.03):
        scaled = to_half(grid.scale * np.float32(factor)).astype(np.float32)
        assert best <= loss(Grid(scaled, grid.base))
    plain = search(fmt, x)
    assert name == "int8" or best < loss(plain), "important columns count for more"


def test_special_groups() -> None:
    x = np.zeros((4, 32), np.float32)
    x[1] = 3.5
    x[2, 5] = -1e-9  # the scale is below the least fp16
    x[3] = 6e4
    for name in ("int8", "int4", "int4m"):
        found, _ = rounded(name, x)
        assert np.isfinite(found).all()
        assert np.all(found[0] == 0) and np.abs(found[2]).max() < 1e-7
        assert np.allclose(found[[1, 3]], x[[1, 3]], rtol=4e-3), name
    with pytest.raises(UnsupportedError, match="q6k"):
        quantise_matrix(weight_format("q6k"), ArrayData(np.zeros((1, 256), np.float32)))


def test_numbers_on_the_grid_come_back() -> None:
    """Integers times an fp16 scale, as in a package that is stored anew."""
    rng = np.random.default_rng(1)
    scales = rng.uniform(0.01, 0.02, (64, 1)).astype(np.float16).astype(np.float32)
    for name, low, high in (("int8", -127, 127), ("int4", -8, 7)):
        q = rng.integers(low, high + 1, (64, 32)).astype(np.float32)
        q[:, 3] = low
        assert np.array_equal(rounded(name, q * scales)[0], q * scales)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_later_columns_make_up_for_earlier_ones(name: str) -> None:
    """Outputs of inputs that were not seen are closer with statistics than without."""
    rng = np.random.default_rng(2)
    inputs = correlated(rng, 1200, 128)
    seen, unseen = inputs[:800], inputs[800:].astype(np.float64)
    w = (rng.standard_normal((96, 128)) * 0.05).astype(np.float32)
    exact = unseen @ w.T

    def off(found: Floats) -> float:
        return float(np.linalg.norm(unseen @ found.T - exact) / np.linalg.norm(exact))

    blind, aware = rounded(name, w)[0], rounded(name, w, statistics_of(seen))
    assert off(aware[0]) < 0.75 * off(blind)
    moments = seen.T.astype(np.float64) @ seen / len(seen)
    change = (aware[0] - w).astype(np.float64)
    lost = np.einsum("nk,nk->", change @ moments, change)
    total = np.einsum("nk,nk->", w @ moments, w)
    assert aware[1].error == pytest.approx((lost / total) ** 0.5, rel=1e-3)
    assert aware[1].shift is not None
    assert np.allclose(aware[1].shift, change @ seen.mean(axis=0), atol=1e-6)


def test_outliers_are_the_columns_that_matter() -> None:
    """By inputs where they are known, by weights else; they come back as near as fp16."""
    rng = np.random.default_rng(3)
    w = (rng.standard_normal((64, 256)) * 0.05).astype(np.float32)
    loud = [7, 40, 41, 99, 130, 180, 181, 255]
    inputs = rng.standard_normal((600, 256)).astype(np.float32)
    inputs[:, loud] *= 30.0
    heavy = w.copy()
    heavy[:, loud] *= 30.0
    for weights, statistics in ((w, statistics_of(inputs)), (heavy, None)):
        fmt = weight_format("int4g64o8")
        done = quantise_matrix(fmt, ArrayData(weights), statistics)
        sizes = fmt.plane_sizes(weights.shape)
        columns = np.frombuffer(done.data[-sizes[-1] :].tobytes(), "<u4")
        assert columns.tolist() == loud
        plain = quantise_matrix(weight_format("int4g64"), ArrayData(weights), statistics)
        assert done.error < 0.5 * plain.error
    found = unpack(fmt, done.data, heavy.shape)[:, loud]
    assert np.abs(found - heavy[:, loud]).max() <= np.abs(heavy).max() * 2.0**-11


@pytest.mark.parametrize("name", ["int4o8", "int4mg64"])
def test_bytes_do_not_depend_on_threads_or_tasks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    w = ArrayData(rng.standard_normal((70, 128)).astype(np.float32))
    for statistics in (None, statistics_of(correlated(rng, 300, 128))):
        first = quantise_matrix(weight_format(name), w, statistics)
        for threads, elements in ((1, 1 << 20), (4, 128 * 9), (4, 128 * 2)):
            monkeypatch.setattr(matrix, "TASK_ELEMENTS", elements)
            monkeypatch.setattr(matrix, "ELEMENTS_AT_ONCE", elements // 2)
            with Workers(threads) as workers:
                again = quantise_matrix(weight_format(name), w, statistics, workers=workers)
            assert np.array_equal(first.data, again.data)
            assert first.error == again.error and first.shift_share == again.shift_share
            monkeypatch.undo()


def test_inputs_that_never_vary() -> None:
    """Moments of low rank, and of inputs that are always zero."""
    rng = np.random.default_rng(6)
    w = rng.standard_normal((16, 64)).astype(np.float32)
    inputs = np.zeros((3, 64), np.float32)
    inputs[:, :2] = [[1.0, 2.0], [2.0, 1.0], [3.0, 3.0]]
    for given in (inputs, np.zeros_like(inputs)):
        found, done = rounded("int4o8", w, statistics_of(given))
        assert np.isfinite(found).all() and np.isfinite(done.error)
        assert np.abs(found - w).max() < 1.0
    plan = sweep(np.zeros((64, 64), np.float32), np.array([5, 9]), 0.01)
    assert sorted(plan.order[-2:].tolist()) == [5, 9] and np.isfinite(plan.factor).all()
