"""Attention over block tables: both paths against the numpy evaluator in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array
from hornito.ops.variants import Choices
from ops import cases
from ops.harness import Bench, Call, Outcome, assert_close, lower, rows_of
from ops.kv_pool import KvPool

pytestmark = pytest.mark.gpu

EPS = 2.0**-24
LENGTHS = (1, 7, 63, 64, 65, 130, 1025)
TABLE_BLOCKS = 18

# (head_dim, kv_heads, group): every head size and every group, not every pair.
SHAPES = (
    (8, 1, 1),
    (8, 2, 8),
    (16, 2, 3),
    (64, 1, 7),
    (64, 2, 1),
    (64, 1, 8),
    (80, 1, 2),
    (96, 1, 3),
    (128, 2, 2),
    (128, 1, 8),
    (256, 1, 1),
    (256, 1, 4),
    (100, 1, 2),
)
# Each takes LLVM seconds to compile for flash: every head size once, every group once.
CHUNK_SHAPES = (
    (8, 2, 8),
    pytest.param((16, 1, 2), marks=pytest.mark.slow),
    (64, 1, 7),
    (80, 1, 2),
    pytest.param((96, 1, 3), marks=pytest.mark.slow),
    pytest.param((128, 2, 2), marks=pytest.mark.slow),
    (256, 1, 1),
)


def bound(call: Call, expected: Array, states: list[ReferenceState]) -> Array:
    """Rounding bound, from the scores and values themselves.

    A score of a D-long fp32 dot is off by delta = (4 sqrt(D) + 8) eps max(sum |q k|) scale; that
    moves a weight by a relative delta, twice because of the normalisation. Drivers' exp is good to
    about 2e-6, and n keys add up with 4 sqrt(n) eps.
    """
    node = call.graph.nodes[0]
    heads, head_dim = node.attr("heads"), node.attr("head_dim")
    q = call.inputs["q"].reshape(-1, heads, head_dim).astype(np.float64)
    result = np.empty_like(q)
    for r, position in enumerate(call.rows[: len(q), 1].tolist()):
        cache = states[r].layer(0)
        window = node.attr("window") or position + 1
        seen = range(max(0, position - window + 1), position + 1)
        k = np.stack([cache.keys[j] for j in seen], axis=1)
        v = np.abs(np.stack([cache.values[j] for j in seen], axis=1))
        grouped = np.abs(q[r]).reshape(len(k), -1, head_dim)
        magnitude = np.einsum("hgd,hjd->hgj", grouped, np.abs(k)).max() * node.attr("scale")
        delta = (4 * np.sqrt(head_dim) + 8) * EPS * magnitude
        spread = 2 * delta + 4e-6 + 4 * np.sqrt(len(seen)) * EPS
        largest = v.max(axis=1)  # [kv_heads, D]
        result[r] = spread * np.repeat(largest, heads // len(k), axis=0)
    return result.reshape(expected.shape)


def check_batch(
    bench: Bench,
    shape: tuple[int, int, int],
    *,
    half: bool,
    lengths: tuple[int, ...] = LENGTHS,
    window: int = 0,
    softcap: float = 0.0,
    inactive: tuple[int, ...] = (),
    score_scale: float = 1.0,
) -> Outcome:
    """One row per slot, each with its own number of keys."""
    head_dim, kv_heads, group = shape
    rng = np.random.default_rng(head_dim * 100 + group + window)
    positions = [length - 1 for length in lengths]
    slots = [(3 * r + 1) % len(lengths) for r in range(len(lengths))]
    by_slot = dict(zip(slots, lengths, strict=True))
    owned = [-(-by_slot.get(s, 1) // 64) for s in range(len(lengths))]
    pool = KvPool(
        kv_heads, head_dim, half=half, slots=len(lengths), table_blocks=TABLE_BLOCKS, owned=owned
    )
    for slot, length in by_slot.items():
        pool.fill(slot, length, rng, score_scale)
    q = rng.standard_normal((len(lengths), kv_heads * group * head_dim)).astype(np.float32)
    graph = cases.attention(kv_heads * group, kv_heads, head_dim, window=window, softcap=softcap)
    call = Call(
        graph=graph,
        rows=rows_of(positions, slots=slots, inactive=inactive),
        inputs={"q": q},
        kv=pool,
        kind="batch",
        table_stride=TABLE_BLOCKS + 3,
    )
    suffix = "kv16" if half else "kv32"
    outcome = bench.run(call)
    assert outcome.kernels == [f"attention/split.{suffix}", "attention/merge.default"]
    # A lane has eight dims, so that a driver whose subgroups are 8 wide takes 64 dims at most.
    shared = bench.run(replace(call, device="gpu"))
    if head_dim % 8 == 0 and head_dim <= 8 * bench.device.caps.subgroup_min:
        assert shared.kernels == [f"attention/lanes.{suffix}"]
    else:
        assert shared.kernels == outcome.kernels
    states = [pool.state(slots[r], length) for r, length in enumerate(lengths)]
    expected = np.concatenate(
        [single_row(call, r).expected(states[r])["y"] for r in range(len(lengths))]
    )
    active = [r for r in range(len(lengths)) if r not in inactive]
    limit = bound(call, expected, states)
    for found in (outcome, shared):
        assert_close(found.value("y")[active], expected[active], limit[active])
        assert np.isnan(found.value("y")[list(inactive)]).all()
    return outcome


def single_row(call: Call, r: int) -> Call:
    """Row r of a batch, as a call of its own for the evaluator."""
    return Call(
        graph=call.graph,
        rows=call.rows[r : r + 1],
        live=1,
        inputs={"q": call.inputs["q"][r : r + 1]},
    )


def check_chunk(
    bench: Bench,
    shape: tuple[int, int, int],
    start: int,
    live: int,
    *,
    half: bool,
    bucket: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    score_scale: float = 1.0,
) -> Outcome:
    """Contiguous rows of one slot; its own keys are in the cache already."""
    head_dim, kv_heads, group = shape
    rng = np.random.default_rng(head_dim * 100 + group + window + start)
    count = start + live
    pool = KvPool(
        kv_heads,
        head_dim,
        half=half,
        slots=2,
        table_blocks=TABLE_BLOCKS,
        owned=[0, -(-count // 64)],
    )
    pool.fill(1, count, rng, score_scale)
    q = rng.standard_normal((live, kv_heads * group * head_dim)).astype(np.float32)
    call = Call(
        graph=cases.attention(kv_heads * group, kv_heads, head_dim, window=window, softcap=softcap),
        rows=rows_of(range(start, count), slots=[1] * live, bucket=max(bucket, live, 2)),
        inputs={"q": q},
        kv=pool,
    )
    outcome = bench.run(call)
    assert outcome.kernels == ["attention/flash." + ("kv16" if half else "kv32")]
    state = pool.state(1, count)
    expected = call.expected(state)["y"]
    assert_close(outcome.value("y"), expected, bound(call, expected, [state] * live))
    return outcome


@pytest.mark.parametrize("shape", SHAPES)
def test_batch(bench: Bench, shape: tuple[int, int, int]) -> None:
    """Every head size and group over all numbers of keys, as one batch."""
    check_batch(bench, shape, half=shape[2] % 2 == 0)


@pytest.mark.parametrize("half", (False, True))
def test_batch_of_both_cache_types(bench: Bench, half: bool) -> None:
    check_batch(bench, (64, 1, 3), half=half, inactive=(2, 5))


@pytest.mark.parametrize("window", (pytest.param(1, marks=pytest.mark.slow), 8, 64, 100))
def test_batch_with_a_window(bench: Bench, window: int) -> None:
    """Positions around block borders, in and far beyond the window."""
    lengths = (1, 2, 8, 9, 63, 64, 65, 100, 101, 128, 129, 164, 165)
    check_batch(bench, (16, 2, 3), half=window % 8 == 0, window=window, lengths=lengths)


def test_batch_with_a_softcap(bench: Bench) -> None:
    check_batch(bench, (16, 2, 3), half=False, softcap=5.0, window=100, score_scale=4.0)


def test_batch_with_large_scores(bench: Bench) -> None:
    """Scores of several hundred: the running maximum keeps exp in range."""
    check_batch(bench, (64, 1, 3), half=False, lengths=(1, 65, 130, 200), score_scale=100.0)


def test_a_row_does_not_depend_on_the_other_rows(bench: Bench) -> None:
    """The same row alone and beside others, its blocks elsewhere: the same bits."""
    lengths, group, head_dim = (7, 130, 1025), 3, 64
    q = np.random.default_rng(0).standard_normal((3, group * head_dim)).astype(np.float32)

    def run(rows: list[int], seed: int) -> Array:
        pool = KvPool(
            1,
            head_dim,
            half=False,
            slots=3,
            table_blocks=TABLE_BLOCKS,
            owned=[-(-length // 64) for length in lengths],
            seed=seed,
        )
        for slot, length in enumerate(lengths):
            pool.fill(slot, length, np.random.default_rng(slot))
        call = Call(
            graph=cases.attention(group, 1, head_dim),
            rows=rows_of([lengths[r] - 1 for r in rows], slots=rows),
            inputs={"q": q[rows]},
            kv=pool,
            kind="batch",
        )
        return bench.run(call).value("y")

    together = run([0, 1, 2], seed=5)
    for r in range(3):
        assert np.array_equal(run([r], seed=99)[0], together[r])


@pytest.mark.parametrize(
    ("shape", "half"),
    (
        ((8, 1, 2), False),
        ((64, 1, 3), True),
        pytest.param((8, 1, 2), True, marks=pytest.mark.slow),
        pytest.param((64, 1, 3), False, marks=pytest.mark.slow),
    ),
)
def test_splits_of_several_blocks(bench: Bench, shape: tuple[int, int, int], half: bool) -> None:
    """More blocks than splits: each split walks three, the last one fewer. Subgroups join every
    number of query heads that a workgroup may have."""
    head_dim, kv_heads, group = shape
    for length in (64 * 33, 64 * 70 + 5, 64 * 94 + 1):
        pool = KvPool(kv_heads, head_dim, half=half, layers=1, layer=0, table_blocks=96)
        pool.fill(0, length, np.random.default_rng(length))
        q = np.random.default_rng(1).standard_normal((1, kv_heads * group * head_dim))
        call = Call(
            graph=cases.attention(kv_heads * group, kv_heads, head_dim),
            rows=rows_of([length - 1]),
            inputs={"q": q.astype(np.float32)},
            kv=pool,
            kind="batch",
            device="gpu",
        )
        state = pool.state(0, length)
        expected = call.expected(state)["y"]
        limit = bound(call, expected, [state])
        (site,) = lower(call, bench.device.caps).sites
        for variant in site.admitted:
            outcome = bench.run(replace(call, choices=Choices(winners={site.key: variant.name})))
            assert outcome.kernels[0] == variant.kernel
            assert outcome.dispatches[0].groups[0] == 32
            assert_close(outcome.value("y"), expected, limit)


@pytest.mark.parametrize("kind", ("batch", "chunk"))
def test_positions_at_the_end_of_a_long_context(bench: Bench, kind: str) -> None:
    """Table entries near 2,048, of the last slot: only the window's blocks exist."""
    blocks, end, window = 2048, 131072, 100
    pool = KvPool(1, 16, half=True, slots=2, table_blocks=blocks, owned=[0, 3])
    pool.table[1] = np.roll(pool.table[1], blocks - 3)
    rng = np.random.default_rng(3)
    state = ReferenceState()
    for position in range(end - 192, end):
        pool.put(1, position, rng.standard_normal((1, 16)), rng.standard_normal((1, 16)))
        block, inside = pool.at(1, position)
        for side, name in enumerate(("keys", "values")):
            array = pool.data[block, pool.layer, side, :, inside].astype(np.float64)
            getattr(state.layer(0), name)[position] = array
    positions = [end - 1] if kind == "batch" else list(range(end - 5, end))
    q = rng.standard_normal((len(positions), 32)).astype(np.float32)
    call = Call(
        graph=cases.attention(2, 1, 16, window=window),
        rows=rows_of(positions, slots=[1] * len(positions)),
        inputs={"q": q},
        kv=pool,
        kind=kind,
    )
    expected = call.expected(state)["y"]
    limit = bound(call, expected, [state] * len(positions))
    assert_close(bench.run(call).value("y"), expected, limit)


@pytest.mark.parametrize("shape", CHUNK_SHAPES)
def test_chunk(bench: Bench, shape: tuple[int, int, int]) -> None:
    """Chunks from position 0 and over a past that starts at unaligned positions."""
    half = shape[0] > 64
    check_chunk(bench, shape, 0, 17, half=half, bucket=32)
    check_chunk(bench, shape, 129, 9, half=half, bucket=32)


@pytest.mark.parametrize("half", (False, True))
@pytest.mark.parametrize(
    ("start", "live", "bucket"),
    ((0, 1, 16), (0, 64, 64), (0, 65, 128), (1, 63, 64), (62, 3, 16), (63, 2, 2), (1000, 25, 32)),
)
def test_chunk_starts(bench: Bench, half: bool, start: int, live: int, bucket: int) -> None:
    check_chunk(bench, (16, 1, 2), start, live, half=half, bucket=bucket)


@pytest.mark.parametrize("window", (1, 8, 64, 100))
@pytest.mark.parametrize("start", (0, 5, 63, 190))
def test_chunk_with_a_window(bench: Bench, window: int, start: int) -> None:
    check_chunk(bench, (16, 1, 2), start, 67, half=False, window=window, bucket=128)


def test_chunk_with_a_softcap(bench: Bench) -> None:
    check_chunk(bench, (16, 1, 2), 30, 40, half=False, softcap=5.0, window=20, score_scale=4.0)


def test_chunk_with_large_scores(bench: Bench) -> None:
    check_chunk(bench, (64, 1, 7), 60, 20, half=False, score_scale=100.0)


@pytest.mark.parametrize("half", (False, True))
def test_chunk_of_one_row_equals_the_batch_path(bench: Bench, half: bool) -> None:
    """A chunk bucket of one row runs the split kernels."""
    pool = KvPool(1, 16, half=half, table_blocks=TABLE_BLOCKS)
    pool.fill(0, 70, np.random.default_rng(0))
    q = np.random.default_rng(1).standard_normal((1, 32)).astype(np.float32)
    results = []
    for kind in ("chunk", "batch"):
        call = Call(
            graph=cases.attention(2, 1, 16),
            rows=rows_of([69]),
            inputs={"q": q},
            kv=pool,
            kind=kind,
        )
        results.append(bench.run(call).value("y"))
    assert np.array_equal(results[0], results[1])


def test_no_live_row(bench: Bench) -> None:
    for kind, bucket in (("chunk", 16), ("batch", 2)):
        call = Call(
            graph=cases.attention(2, 1, 16),
            rows=rows_of([], bucket=bucket),
            inputs={"q": np.zeros((0, 32), np.float32)},
            kv=KvPool(1, 16, half=False),
            kind=kind,
        )
        assert bench.run(call).value("y").shape == (0, 32)
