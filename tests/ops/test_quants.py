"""Every weight format in every matrix kernel, against the numbers that its bytes stand for.

The bytes are random where every pattern of them is a weight (blocks of GGUF's types with tame
scales), so nothing depends on how numbers were rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from blocks import HALVES
from hornito.ops.base import Array, Tail
from hornito.ops.gated_activation import activate
from hornito.quant.formats import FORMATS, WeightFormat, weight_format
from hornito.quant.ggml import dequantise_rows, format_by_name
from hornito.quant.planes import from_blocks
from hornito.quant.storage import unpack
from ops import cases
from ops.harness import Bench, Call, assert_close, rows_of
from ops.test_linear import EPS, bucket_of, product_bound

pytestmark = pytest.mark.gpu

T = TypeVar("T")

DEVICES = ("software", "plain", "gpu")
WIDTHS = (32, 64, 256, 576, 640, 896, 1152, 4864)
STORED = [f for f in FORMATS.values() if f.variant == "q"]
BLOCKED = [f for f in STORED if f.ggml and f.quantised]
WITH_OUTLIERS = ["int8g64o16", "int4o8", "int4mg128o24"]
NAMES = [f.name for f in STORED] + WITH_OUTLIERS

EACH_KIND = ("bf16", "int8", "int4m", "q4k", "q6k", "int4mg128o24")
"""A format of each kind. LLVM compiles every kernel for every format anew, GPUs' for seconds."""

GATED = ((1, 13, 256), (2, 9, 256), (17, 65, 256))
"""(rows, N, K) of a kernel for one row, for some rows and for many."""


def random_blocks(rng: np.random.Generator, ggml: str, count: int) -> Array:
    """Blocks of random bits, but for scales: normal numbers of either sign around 0.01."""
    blocks = rng.integers(0, 256, (count, format_by_name(ggml).nbytes), np.uint8)
    for at in HALVES[ggml]:
        scales = rng.uniform(0.004, 0.02, count) * rng.choice([-1.0, 1.0], count)
        blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return blocks


def join_planes(fmt: WeightFormat, planes: list[Array]) -> Array:
    """Planes one behind the other; what aligns them holds NaN, which no kernel may use."""
    pieces = []
    for plane in planes:
        flat = plane.reshape(-1)
        pieces += [flat, np.full(-len(flat) % 16, 255, np.uint8)]
    return np.concatenate(pieces)


def stored_matrix(rng: np.random.Generator, fmt: WeightFormat, n: int, k: int) -> Array:
    """The bytes of a random matrix `[n, k]`."""
    if not fmt.quantised:
        halves = (rng.standard_normal(n * k).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
        return halves.view(np.uint8)
    count = n * (k // fmt.block)
    if fmt.ggml:
        planes = from_blocks(fmt, random_blocks(rng, fmt.ggml, count))
    else:
        planes = [rng.integers(0, 256, (count, fmt.planes[0]), np.uint8)]
        scales = rng.uniform(0.004, 0.02, count * fmt.planes[1] // 2).astype(np.float16)
        planes.append(scales.view(np.uint8).reshape(count, -1))
    if fmt.outliers:
        numbers = rng.uniform(-0.5, 0.5, (n, fmt.outliers)).astype(np.float16)
        columns = rng.choice(k, fmt.outliers, replace=False).astype("<u4")
        planes += [numbers.view(np.uint8), columns.view(np.uint8)]
    stored = join_planes(fmt, planes)
    assert len(stored) == fmt.nbytes((n, k))
    return stored


def widths(name: str) -> list[tuple[int, int]]:
    """(number, K) of the widths that a format takes."""
    return [(i, k) for i, k in enumerate(WIDTHS) if weight_format(name).fits((1, k))]


def products(all_of: Callable[[str], Sequence[T]], usual: Callable[..., bool]) -> list[Any]:
    """(format, device, cases) of a test; cases that are not `usual` come with --slow."""
    found = []
    for name in NAMES:
        for device in DEVICES:
            cases = all_of(name)
            now = [case for case in cases if usual(name, device, case)]
            later = [case for case in cases if case not in now]
            if now:
                found.append(pytest.param(name, device, now, id=f"{name}-{device}"))
            if later:
                slow = pytest.param(
                    name, device, later, id=f"{name}-{device}-others", marks=pytest.mark.slow
                )
                found.append(slow)
    return found


def usual_width(name: str, device: str, width: tuple[int, int]) -> bool:
    """GPUs' kernels have formats of each kind, and of many widths every other one, in turn."""
    if device != "gpu":
        return True
    at = EACH_KIND.index(name) if name in EACH_KIND else -1
    return at >= 0 and (len(widths(name)) < 4 or (width[0] + at) % 2 == 0)


def usual_gated(name: str, device: str, case: tuple[int, int, int]) -> bool:
    """Formats of each kind have all, the others take turns."""
    return name in EACH_KIND or (NAMES.index(name) + GATED.index(case)) % len(GATED) == 0


def check(bench: Bench, name: str, live: int, n: int, k: int, device: str) -> list[str]:
    fmt = weight_format(name)
    rng = np.random.default_rng(live * 7919 + n * 31 + k)
    x = rng.standard_normal((live, k)).astype(np.float32)
    stored = stored_matrix(rng, fmt, n, k)
    w = unpack(fmt, stored, (n, k)).astype(np.float64)
    call = Call(
        graph=cases.linear(n, k, name),
        rows=rows_of(range(live), bucket=bucket_of(live)),
        inputs={"x": x},
        weights={"w": stored},
        device=device,
    )
    outcome = bench.run(call, repeats=2)
    # Some kernels sum integers and add the offset's share once: the sums that round are of
    # numbers up to the offset and the integer, not of their difference.
    bound = product_bound(x, np.abs(w) + np.abs(w).max())
    assert_close(outcome.value("y"), x.astype(np.float64) @ w.T, bound)
    return outcome.kernels


@pytest.mark.parametrize(("name", "device", "sizes"), products(widths, usual_width))
def test_b7_every_width_and_output_count(
    bench: Bench, name: str, device: str, sizes: list[tuple[int, int]]
) -> None:
    """B7: every K of real models, N of every remainder mod 8, one row and many."""
    seen = set()
    for i, k in sizes:
        for j, live in enumerate((1, 3, 7, 20)):
            if k > 2000 and live > 3:
                continue
            if device == "gpu" and live in (3, 7) and k > 256:
                continue  # kernels for so many rows differ by few widths, and take LLVM long
            seen.update(check(bench, name, live, 24 + (3 * i + 5 * j) % 8, k, device))
    stems = {kernel.split("/")[1].split(".")[0] for kernel in seen}
    assert (
        stems
        == {
            "software": {"groups", "broadcast"},
            "plain": {"lane_row"},
            "gpu": {"gemv", "gemm"},
        }[device]
    )
    assert all(kernel.endswith("q") for kernel in seen)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bf16", "int4", "q6k", "int8g64o16"])
def test_b7_all_remainders_of_n(bench: Bench, name: str, device: str) -> None:
    """B7: N from 1 to 17 at one K, so that tails of every kernel are met."""
    for n in range(1, 18):
        check(bench, name, 1, n, 256, device)
        check(bench, name, 5, n, 256, device)
    check(bench, name, 70, 65, 256, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_b9_one_hot_rows_recover_every_weight(bench: Bench, name: str, device: str) -> None:
    """B9: a row that is one at k gives the k-th weight of each output, to the bit."""
    fmt = weight_format(name)
    n, k = 13, max(64, 2 * fmt.outliers, fmt.block)
    stored = stored_matrix(np.random.default_rng(3), fmt, n, k)
    w = unpack(fmt, stored, (n, k))
    for rows in (np.arange(k), np.array([5]), np.array([k - 1]), np.array([k // 2 + 1])):
        call = Call(
            graph=cases.linear(n, k, name),
            rows=rows_of(range(len(rows)), bucket=bucket_of(len(rows))),
            inputs={"x": np.eye(k, dtype=np.float32)[rows]},
            weights={"w": stored},
            device=device,
        )
        assert np.array_equal(bench.run(call, repeats=1).value("y"), w.T[rows])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["int4", "int4m", "q5", "q5m", "q4k", "q5k"])
def test_b9_nibble_order(bench: Bench, name: str, device: str) -> None:
    """B9: GGUF has weight i of a run in the low and weight i + half the run in the high nibble; the
    bytes here count 0 to 15, so that a swapped or interleaved order shows in every column."""
    fmt = weight_format(name)
    source = format_by_name(fmt.ggml)
    k = fmt.block
    blocks = np.zeros((2, source.nbytes), np.uint8)
    half = 16 if k == 32 else 32
    body = blocks[:, source.nbytes - k // 2 :]
    at = np.arange(k // 2) % half
    body[0] = (at % 16) | ((15 - at % 16) << 4)
    body[1] = (15 - at % 16) | ((at % 16) << 4)
    for offset in HALVES[fmt.ggml]:
        blocks[:, offset : offset + 2] = np.array([1.0], np.float16).view(np.uint8)
    if k == 256:
        blocks[:, 4:8], blocks[:, 12:16] = 1, 1  # scales 1, minima 0
    low = np.concatenate([np.arange(half) % 16, 15 - np.arange(half) % 16])
    pattern = np.tile(low, k // (2 * half)).astype(np.float32)
    shift = {"int4": -8.0, "int4m": 1.0, "q5": -16.0, "q5m": 1.0}.get(name, 0.0)
    expected = np.stack([pattern, 15 - pattern]) + np.float32(shift)
    assert np.array_equal(dequantise_rows(blocks.reshape(2, -1), source, k), expected)
    call = Call(
        graph=cases.linear(2, k, name),
        rows=rows_of(range(k), bucket=k),
        inputs={"x": np.eye(k, dtype=np.float32)},
        weights={"w": join_planes(fmt, from_blocks(fmt, blocks))},
        device=device,
    )
    assert np.array_equal(bench.run(call, repeats=1).value("y"), expected.T)


@pytest.mark.parametrize(("name", "device", "sizes"), products(lambda _: GATED, usual_gated))
def test_gated(bench: Bench, name: str, device: str, sizes: list[tuple[int, int, int]]) -> None:
    fmt = weight_format(name)
    for live, n, k in sizes:
        rng = np.random.default_rng(n)
        x = (0.3 * rng.standard_normal((live, k))).astype(np.float32)
        stored = stored_matrix(rng, fmt, 2 * n, k)
        w = unpack(fmt, stored, (2 * n, k))
        call = Call(
            graph=cases.gated_linear(n, k, name, activation="silu"),
            rows=rows_of(range(live), bucket=bucket_of(live)),
            inputs={"x": x},
            weights={"w": stored},
            device=device,
        )
        outcome = bench.run(call, repeats=1)
        assert all("gated_q" in kernel for kernel in outcome.kernels)
        exact = x.astype(np.float64) @ w.astype(np.float64).T
        error = product_bound(x, np.abs(w) + np.abs(w).max()) + 2 * EPS * np.abs(exact)
        before, up = exact[:, 0::2], exact[:, 1::2]
        bound = 1.13 * error[:, 0::2] * np.abs(up) + np.abs(before) * error[:, 1::2]
        bound += 4e-6 * np.abs(before * up) + 1e-7 * np.abs(up)
        assert_close(outcome.value("y"), activate("silu", before) * up, bound)


@pytest.mark.parametrize("name", NAMES)
def test_embedding_rows_are_exact(bench: Bench, name: str) -> None:
    fmt = weight_format(name)
    tokens = [0, 7, 36, 1, 36]
    for k in (256, 1024):
        stored = stored_matrix(np.random.default_rng(k), fmt, 37, k)
        call = Call(
            graph=cases.embedding(37, k, name),
            rows=rows_of(range(5), tokens=tokens, bucket=8),
            weights={"table": stored},
        )
        assert np.array_equal(
            bench.run(call).value("y"), unpack(fmt, stored, (37, k))[np.array(tokens)]
        )


def test_bf16_of_odd_width(bench: Bench) -> None:
    """Plain numbers need no blocks: rows of any length."""
    for device in DEVICES:
        for k in (1, 7, 24, 36, 100):
            check(bench, "bf16", 1, 13, k, device)
            check(bench, "bf16", 9, 7, k, device)
    stored = stored_matrix(np.random.default_rng(0), weight_format("bf16"), 5, 9)
    call = Call(
        graph=cases.embedding(5, 9, "bf16"),
        rows=rows_of([0], tokens=[3]),
        weights={"table": stored},
    )
    assert np.array_equal(
        bench.run(call).value("y")[0], unpack(weight_format("bf16"), stored, (5, 9))[3]
    )


@pytest.mark.parametrize("device", ["software", "gpu"])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4o8", "q5m", "q4k", "q6k"])
def test_head_in_tiles(bench: Bench, name: str, device: str) -> None:
    """Tiles begin inside the planes of one table: the id is that of the largest logit."""
    fmt = weight_format(name)
    rng = np.random.default_rng(9)
    n, k = 2500, 256
    stored = stored_matrix(rng, fmt, n, k)
    x = rng.standard_normal((3, k)).astype(np.float32)
    logits = x.astype(np.float64) @ unpack(fmt, stored, (n, k)).astype(np.float64).T
    call = Call(
        graph=cases.head(n, k, name),
        rows=rows_of(range(3), bucket=4),
        inputs={"x": x},
        weights={"table": stored},
        selection=(0, 1, 2),
        tail=Tail("argmax", tile_ids=1024),
        device=device,
    )
    records = bench.run(call, repeats=1).records
    assert records[:, 0, 0].tolist() == logits.argmax(axis=1).tolist()
