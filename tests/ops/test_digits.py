"""Weights of 4 and 8 bits with integer dot products: x as numbers of two or three bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hornito.ops import digits
from hornito.ops.base import Array, Tail
from hornito.ops.digits import DigitGeometry
from hornito.ops.variants import Choices
from hornito.quant.formats import weight_format
from hornito.quant.planes import unpack
from ops import cases
from ops.harness import Bench, Call, assert_close, lower, rows_of
from ops.test_linear import product_bound
from ops.test_quants import WIDTHS, WITH_OUTLIERS, check, stored_matrix

pytestmark = pytest.mark.gpu

# Of each kind of integers, with groups of every size and outliers.
NAMES = ["int8", "int4g64", "int4m", *WITH_OUTLIERS]


@pytest.fixture(autouse=True)
def every_size(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits for matrices of every size."""
    if not bench.device.caps.has_dot_product:
        pytest.skip(f"{bench.device.info.name} has no integer dot products")
    monkeypatch.setattr(digits, "DIGIT_WEIGHTS", 0)
    monkeypatch.setattr(digits, "SPLIT_WEIGHTS", 0)


def random_matrix(rng: np.random.Generator, name: str, n: int, k: int) -> tuple[Array, Array]:
    """The bytes of a matrix `[n, k]`, and its numbers."""
    fmt = weight_format(name)
    stored = stored_matrix(rng, fmt, n, k)
    return stored, unpack(fmt, stored, (n, k)).astype(np.float64)


def product(
    bench: Bench,
    name: str,
    stored: Array,
    x: Array,
    n: int,
    *,
    half: bool = False,
    allow_nan: bool = False,
) -> Array:
    """What the kernel makes of one row."""
    call = Call(
        graph=cases.linear(n, len(x), name),
        rows=rows_of([0]),
        inputs={"x": x[None]},
        weights={"w": stored},
        device="dot_gpu",
        half_operands=half,
        allow_nan=allow_nan,
    )
    outcome = bench.run(call)
    assert outcome.kernels == ["linear/digits.default"]
    assert outcome.dispatches[0].spec[14] == (2 if half else 3)
    return outcome.value("y")[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_width_and_output_count(bench: Bench, name: str) -> None:
    """Every K of real models, N of every remainder modulo 8."""
    fmt = weight_format(name)
    for i, k in enumerate(k for k in WIDTHS if fmt.fits((1, k))):
        assert check(bench, name, 1, 24 + 3 * i % 8, k, "dot_gpu") == ["linear/digits.default"]


@pytest.mark.parametrize("name", ("int8", "int4", "int4mg128o24"))
def test_one_hot_activations_find_each_weight(bench: Bench, name: str) -> None:
    """Exactly, whatever the size of the one: its digits and the scale give it back."""
    rng = np.random.default_rng(5)
    n, k = 3, 256
    stored, w = random_matrix(rng, name, n, k)
    for column in rng.choice(k, 24, replace=False):
        x = np.zeros(k, np.float32)
        x[column] = rng.choice([-1, 1]) * 2.0 ** rng.integers(-40, 40)
        found = product(bench, name, stored, x, n) / x[column]
        assert_close(found, w[:, column], 2e-7 * (np.abs(w[:, column]) + np.abs(w).max()))


@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("resident", (2, 400))
def test_every_geometry(
    bench: Bench, gated: bool, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a norm, with a workgroup for each tile, and with two that walk over all of them."""
    monkeypatch.setattr(digits, "RESIDENT", resident)
    rng = np.random.default_rng(resident)
    n, k = 133, 608
    make = cases.gated_linear if gated else cases.linear
    call = Call(
        graph=make(n, k, "int4o8" if gated else "int8", bias=True, norm=True),
        rows=rows_of([0]),
        inputs={"x": rng.standard_normal((1, k)).astype(np.float32) * 7},
        weights={
            "w": rng.standard_normal((2 * n if gated else n, k)).astype(np.float32) / np.sqrt(k),
            "b": rng.standard_normal(2 * n if gated else n).astype(np.float32),
            "norm": rng.standard_normal(k).astype(np.float32),
        },
        device="dot_gpu",
    )
    expected = call.expected()["y"]
    for lanes in (4, 8):
        geometry = DigitGeometry(lanes)
        monkeypatch.setattr(digits, "usual_geometry", lambda *_, taken=geometry: taken)
        outcome = bench.run(call, repeats=2)
        assert outcome.kernels == ["linear/digits." + ("gated" if gated else "default")]
        assert_close(outcome.value("y"), expected, 2e-5 * (1 + np.abs(expected)))


@pytest.mark.parametrize(("dtype", "gated"), (("int4o16", True), ("int8", False)))
@pytest.mark.parametrize("resident", (3, 400))
def test_long_rows_are_split(
    bench: Bench, dtype: str, gated: bool, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where K does not fit shared memory, workgroups sum parts of it, and the last one adds up."""
    monkeypatch.setattr(digits, "RESIDENT", resident)
    rng = np.random.default_rng(resident)
    n, k = 75, 10272
    rows = 2 * n if gated else n
    make = cases.gated_linear if gated else cases.linear
    call = Call(
        graph=make(n, k, dtype, bias=True),
        rows=rows_of([0]),
        inputs={"x": rng.standard_normal((1, k)).astype(np.float32)},
        weights={
            "w": rng.standard_normal((rows, k)).astype(np.float32) / np.sqrt(k),
            "b": rng.standard_normal(rows).astype(np.float32),
        },
        device="dot_gpu",
    )
    expected = call.expected()["y"]
    (site,) = lower(call, bench.device.caps).sites
    kernel = "linear/digits." + ("gated" if gated else "default")
    for lanes, splits in ((8, 2), (8, 4)):
        variant = next(
            v
            for v in site.admitted
            if (v.kernel, v.spec.get(5), v.groups[2]) == (kernel, lanes, splits)
        )
        choices = Choices(winners={site.key: variant.name})
        outcome = bench.run(replace(call, choices=choices), repeats=2)
        assert outcome.kernels == [kernel] and outcome.dispatches[0].groups[2] == splits
        assert_close(outcome.value("y"), expected, 2e-5 * (1 + np.abs(expected)))


def test_tiles_of_a_head_are_split_whatever_their_size(bench: Bench) -> None:
    """A last tile with fewer ids than the others, all in parts of K."""
    rng = np.random.default_rng(11)
    ids, k = 1024 + 76, 4128
    stored, w = random_matrix(rng, "int4", ids, k)
    x = rng.standard_normal(k).astype(np.float32)
    logits = w @ x.astype(np.float64)
    call = Call(
        graph=cases.head(ids, k, "int4"),
        rows=rows_of([0]),
        inputs={"x": x[None]},
        weights={"table": stored},
        selection=[0],
        selected=1,
        kind="batch",
        device="dot_gpu",
        tail=Tail("logprob", 1024),
        next_ids=[ids - 1],
    )
    outcome = bench.run(call, repeats=2)
    products = [d for d in outcome.dispatches if d.kernel == "linear/digits.default"]
    assert [d.groups[2] for d in products] == [3, 3]
    exact = logits[-1] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    found = outcome.given_logprob[0]
    assert abs(found - exact) < 1e-4 * (1 + abs(exact))


def test_activations_of_all_sizes(bench: Bench) -> None:
    """A column ten thousand times its neighbours takes no more from them than it does in fp32."""
    rng = np.random.default_rng(3)
    n, k = 40, 1024
    stored, w = random_matrix(rng, "int4", n, k)
    x = rng.standard_normal(k).astype(np.float32)
    x[::50] *= 1e4
    x[64:96] = 0.0
    x[96:128] *= 1e-20
    x[128:160] = 1e-38
    bound = product_bound(x[None], np.abs(w) + np.abs(w).max())[0]
    assert_close(product(bench, "int4", stored, x, n), w @ x.astype(np.float64), bound)


@pytest.mark.parametrize("name", ("int8", "int4o8", "int4mg64"))
def test_two_digits_where_operands_may_be_rounded(bench: Bench, name: str) -> None:
    """They keep x to 2^-16 of the greatest of 32 columns; outliers are as they are."""
    rng = np.random.default_rng(6)
    n, k = 40, 512
    stored, w = random_matrix(rng, name, n, k)
    x = rng.standard_normal(k).astype(np.float32)
    x[::70] *= 100
    error = np.abs(product(bench, name, stored, x, n, half=True) - w @ x.astype(np.float64))
    greatest = np.repeat(np.abs(x).reshape(-1, 32).max(axis=1), 32)
    assert (error < np.abs(w) @ greatest * 2.0**-16 + 1e-4).all()
    exact = np.abs(product(bench, name, stored, x, n) - w @ x.astype(np.float64))
    assert exact.max() < error.max() / 8


@pytest.mark.parametrize("half", (False, True))
@pytest.mark.parametrize("poison", (np.nan, np.inf, -np.inf))
def test_what_is_not_finite_stays_so(bench: Bench, poison: float, half: bool) -> None:
    rng = np.random.default_rng(4)
    n, k = 16, 128
    stored, _ = random_matrix(rng, "int8", n, k)
    x = rng.standard_normal(k).astype(np.float32)
    x[70] = poison
    found = product(bench, "int8", stored, x, n, half=half, allow_nan=True)
    assert not np.isfinite(found).any()
