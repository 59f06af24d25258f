"""RoPE and stores into the KV cache: angles, rounding to fp16, and what must not be touched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hornito.graph.reference import ReferenceState
from hornito.ops import digits
from hornito.ops.base import Array
from hornito.ops.variants import Choices
from ops import cases
from ops.harness import Bench, Call, Outcome, assert_close, lower, rows_of
from ops.kv_pool import KvPool, to_half

pytestmark = pytest.mark.gpu

FAR = (0, 1, 2, 63, 64, 1000, 4095, 4096, 32767, 65535, 65536, 99999, 131070, 131071)


def exact_rotation(x: Array, positions: Array, inv_freq: Array, scale: float = 1.0) -> Array:
    """`x [T, heads, D]` turned in float64 by the fp32 angle, written apart from the op's own."""
    angle = np.asarray(positions, np.float32)[:, None] * inv_freq[None].astype(np.float32)
    turned = x.astype(np.float64).copy()
    half = inv_freq.shape[0]
    for t in range(len(x)):
        for i in range(half):
            c = np.cos(np.float64(angle[t, i])) * scale
            s = np.sin(np.float64(angle[t, i])) * scale
            a, b = x[t, :, i].astype(np.float64), x[t, :, half + i].astype(np.float64)
            turned[t, :, i] = a * c - b * s
            turned[t, :, half + i] = a * s + b * c
    return turned


@pytest.mark.parametrize(
    ("heads", "head_dim", "half_dim", "scale"),
    ((1, 8, 4, 1.0), (3, 64, 32, 1.0), (2, 80, 40, 1.0), (2, 16, 6, 1.341641), (1, 24, 3, 1.0)),
)
def test_rope(bench: Bench, heads: int, head_dim: int, half_dim: int, scale: float) -> None:
    rng = np.random.default_rng(head_dim)
    x = rng.uniform(-1, 1, (len(FAR), heads * head_dim)).astype(np.float32)
    inv_freq = cases.frequencies(half_dim)
    call = Call(
        graph=cases.rope(heads, head_dim, half_dim, scale),
        rows=rows_of(FAR, bucket=16, inactive=(5,)),
        inputs={"x": x},
        weights={"inv_freq": inv_freq},
        kind="batch",
    )
    found = bench.run(call).value("y")
    exact = exact_rotation(x.reshape(len(FAR), heads, head_dim), np.array(FAR), inv_freq, scale)
    exact = exact.reshape(x.shape)
    active = [r for r in range(len(FAR)) if r != 5]
    assert_close(found[active], exact[active], 2e-6)
    assert np.isnan(found[5]).all()
    assert_close(call.expected()["y"], exact, 1e-12)


def test_sine_and_cosine_over_all_positions(bench: Bench) -> None:
    """x = (1, 0) shows cosine and sine themselves: 30,000 angles below 131072, and near k pi/2."""
    half = 2048
    positions = np.linspace(0, 131071, 12, dtype=np.int64)
    near = np.arange(1, half // 2 + 1) * 79 * (np.pi / 2) / 131071
    inv_freq = np.concatenate([np.linspace(1e-6, 1.0, half // 2), near]).astype(np.float32)
    x = np.zeros((len(positions), 2 * half), np.float32)
    x[:, :half] = 1.0
    call = Call(
        graph=cases.rope(1, 2 * half, half),
        rows=rows_of(positions.tolist()),
        inputs={"x": x},
        weights={"inv_freq": inv_freq},
        kind="batch",
    )
    found = bench.run(call).value("y")
    angle = (positions.astype(np.float32)[:, None] * inv_freq[None]).astype(np.float64)
    assert_close(found[:, :half], np.cos(angle), 4e-7)
    assert_close(found[:, half:], np.sin(angle), 4e-7)


def half_grid() -> Array:
    """Every fp16 number, both neighbours and the exact tie between each and the next, and values
    beyond the range: `[rows, 64]` fp32."""
    every = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.unique(every[np.isfinite(every)])  # sorted; one zero
    ties = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    large = [65519.996, 65520.0, 65536.0, 1e6, 3.4e38, -65520.0, -1e9]
    small = [1e-8, -1e-8, 2.0**-25, -(2.0**-25), 2.0**-25 * 1.0001, 1e-40, -1e-40, -0.0]
    wide = np.array([*large, *small, np.inf, -np.inf, np.nan], np.float32)
    up = np.nextafter(ties, np.float32(np.inf))
    down = np.nextafter(ties, np.float32(-np.inf))
    values = np.concatenate([every, ties, up, down, wide]).astype(np.float32)
    rows = -(-len(values) // 64)
    return np.resize(values, rows * 64).reshape(rows, 64)


def same_halves(found: Array, expected: Array) -> bool:
    """Equal bits, any NaN equal to any other."""
    f, e = found.view(np.uint16), expected.view(np.uint16)
    nan = np.isnan(found.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    return bool(((f == e) | nan).all())


def test_fp16_stores_round_to_nearest_even_and_saturate(bench: Bench) -> None:
    values = half_grid()
    kv_heads, head_dim = 16, 256  # one position takes 4096 values
    per_row = kv_heads * head_dim
    rows = -(-values.size // per_row)
    k = np.resize(values, rows * per_row).reshape(rows, per_row)
    v = k[:, ::-1].copy()
    pool = KvPool(kv_heads, head_dim, half=True, table_blocks=2, layers=1, layer=0)
    call = Call(
        graph=cases.kv_append(kv_heads, head_dim),
        rows=rows_of(range(rows)),
        inputs={"k": k, "v": v},
        kv=pool,
    )
    after = bench.run(call).blocks
    assert after is not None
    with np.errstate(over="ignore"):
        wanted_k, wanted_v = to_half(k), to_half(v)
    for r in range(rows):
        block, inside = pool.at(0, r)
        assert same_halves(after.data[block, 0, 0, :, inside].reshape(-1), wanted_k[r])
        assert same_halves(after.data[block, 0, 1, :, inside].reshape(-1), wanted_v[r])
    assert np.isposinf(after.data).any() and np.isneginf(after.data).any()


def check_cache(
    outcome: Outcome, before: KvPool, writes: list[tuple[int, int, Array, Array]]
) -> None:
    """The pool is, byte for byte, what it was plus the given (slot, position, k, v)."""
    expected = before.copy()
    for slot, position, k, v in writes:
        expected.put(slot, position, k, v)
    assert outcome.blocks is not None
    assert np.array_equal(
        outcome.blocks.data.reshape(-1).view(np.uint32), expected.data.reshape(-1).view(np.uint32)
    )


@pytest.mark.parametrize("half", (False, True))
@pytest.mark.parametrize(("kv_heads", "head_dim"), ((1, 8), (3, 64), (2, 100), (1, 130)))
def test_kv_append_chunk(bench: Bench, half: bool, kv_heads: int, head_dim: int) -> None:
    """Rows across a block border, from an unaligned position; padded rows write nothing."""
    rng = np.random.default_rng(head_dim)
    for start, live in ((0, 1), (61, 7), (63, 66)):
        k, v = rng.standard_normal((2, live, kv_heads * head_dim)).astype(np.float32)
        pool = KvPool(kv_heads, head_dim, half=half, table_blocks=3, layers=3, layer=1)
        call = Call(
            graph=cases.kv_append(kv_heads, head_dim),
            rows=rows_of(range(start, start + live), bucket=68),
            inputs={"k": k, "v": v},
            kv=pool,
        )
        outcome = bench.run(call)
        assert outcome.kernels == ["kv_append/append." + ("kv16" if half else "kv32")]
        shape = (live, kv_heads, head_dim)
        ks, vs = k.reshape(shape), v.reshape(shape)
        check_cache(outcome, pool, [(0, start + r, ks[r], vs[r]) for r in range(live)])


@pytest.mark.parametrize("half", (False, True))
def test_kv_append_batch(bench: Bench, half: bool) -> None:
    """Rows of different slots at their own positions, one of them inactive; a wide table stride."""
    rng = np.random.default_rng(2)
    positions, slots = (0, 130, 64, 5), (2, 0, 3, 1)
    k, v = rng.standard_normal((2, 4, 2 * 16)).astype(np.float32)
    pool = KvPool(2, 16, half=half, slots=4, table_blocks=3)
    call = Call(
        graph=cases.kv_append(2, 16),
        rows=rows_of(positions, slots=slots, inactive=(2,)),
        inputs={"k": k, "v": v},
        kv=pool,
        kind="batch",
        table_stride=7,
    )
    ks, vs = k.reshape(4, 2, 16), v.reshape(4, 2, 16)
    writes = [(slots[r], positions[r], ks[r], vs[r]) for r in (0, 1, 3)]
    check_cache(bench.run(call), pool, writes)


@pytest.mark.parametrize("half", (False, True))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half_dim", "scale"),
    (
        (4, 2, 16, 8, 1.0),
        (3, 1, 64, 32, 1.0),
        (2, 2, 80, 40, 1.341641),
        (4, 1, 16, 6, 1.0),
        (1, 1, 8, 2, 1.0),
        (2, 1, 256, 128, 1.0),
    ),
)
def test_rope_append(
    bench: Bench, half: bool, heads: int, kv_heads: int, head_dim: int, half_dim: int, scale: float
) -> None:
    """Bits of its twins: rope on q, rope on k, kv_append on k and v."""
    rng = np.random.default_rng(head_dim + half_dim)
    start, live, bucket = 60, 9, 16
    width = (heads + 2 * kv_heads) * head_dim
    qkv = rng.standard_normal((live, width)).astype(np.float32)
    split = qkv.reshape(live, heads + 2 * kv_heads, head_dim)
    inv_freq = cases.frequencies(half_dim)
    rows = rows_of(range(start, start + live), bucket=bucket)

    def turned(part: Array, count: int) -> Array:
        call = Call(
            graph=cases.rope(count, head_dim, half_dim, scale),
            rows=rows,
            inputs={"x": part.reshape(live, -1)},
            weights={"inv_freq": inv_freq},
        )
        return bench.run(call).value("y").reshape(live, count, head_dim)

    pool = KvPool(kv_heads, head_dim, half=half, table_blocks=2)
    call = Call(
        graph=cases.rope_append(heads, kv_heads, head_dim, half_dim, scale),
        rows=rows,
        inputs={"qkv": qkv},
        weights={"inv_freq": inv_freq},
        kv=pool,
    )
    outcome = bench.run(call)
    q = turned(split[:, :heads], heads)
    k = turned(split[:, heads : heads + kv_heads], kv_heads)
    v = split[:, heads + kv_heads :]
    assert np.array_equal(outcome.value("y").reshape(q.shape), q)
    check_cache(outcome, pool, [(0, start + r, k[r], v[r]) for r in range(live)])
    exact = exact_rotation(split[:, :heads], np.arange(start, start + live), inv_freq, scale)
    assert_close(q, exact, 2e-6 * np.abs(qkv).max())


def test_rope_append_batch_and_inactive_rows(bench: Bench) -> None:
    rng = np.random.default_rng(9)
    positions, slots = (100, 3, 64, 7), (1, 0, 2, 3)
    qkv = rng.standard_normal((4, 4 * 8)).astype(np.float32)
    inv_freq = cases.frequencies(4)
    pool = KvPool(1, 8, half=False, slots=4, table_blocks=2)
    call = Call(
        graph=cases.rope_append(2, 1, 8, 4),
        rows=rows_of(positions, slots=slots, inactive=(1,)),
        inputs={"qkv": qkv},
        weights={"inv_freq": inv_freq},
        kv=pool,
        kind="batch",
        table_stride=5,
    )
    outcome = bench.run(call)
    found = outcome.value("y")
    exact = exact_rotation(qkv.reshape(4, 4, 8), np.array(positions), inv_freq)
    active = [0, 2, 3]
    assert_close(found[active], exact[active, :2].reshape(3, 16), 1e-5)
    assert np.isnan(found[1]).all()
    assert outcome.blocks is not None
    changed = (outcome.blocks.data != pool.data) & ~np.isnan(outcome.blocks.data)
    assert int(changed.sum()) == 3 * 2 * 8
    for r in active:
        block, inside = pool.at(slots[r], positions[r])
        assert_close(outcome.blocks.data[block, 1, 0, 0, inside], exact[r, 2], 1e-5)
        assert np.array_equal(outcome.blocks.data[block, 1, 1, 0, inside], qkv[r, 24:])


@pytest.mark.parametrize("context", (64, 65))
def test_two_sets_of_frequencies(bench: Bench, context: int) -> None:
    """The long set from a context beyond `original_max` on, for every position; twins agree."""
    rng = np.random.default_rng(context)
    tables = np.stack([cases.frequencies(4), cases.frequencies(4, 500.0) / 7]).astype(np.float32)
    qkv = rng.standard_normal((3, 4, 16)).astype(np.float32)
    rows = rows_of(range(40, 43))
    exact = exact_rotation(qkv, np.arange(40, 43), tables[int(context > 64)], 1.25)
    plain = Call(
        graph=cases.rope(4, 16, 4, 1.25, original_max=64),
        rows=rows,
        inputs={"x": qkv.reshape(3, -1)},
        weights={"inv_freq": tables},
        context=context,
    )
    assert_close(bench.run(plain).value("y"), exact.reshape(3, -1), 1e-5)
    assert_close(plain.expected()["y"], exact.reshape(3, -1), 1e-12)
    fused = Call(
        graph=cases.rope_append(2, 1, 16, 4, 1.25, original_max=64),
        rows=rows,
        inputs={"qkv": qkv.reshape(3, -1)},
        weights={"inv_freq": tables},
        kv=KvPool(1, 16, half=False, table_blocks=2),
        context=context,
    )
    assert_close(bench.run(fused).value("y"), exact[:, :2].reshape(3, -1), 1e-5)
    assert_close(fused.expected()["y"], exact[:, :2].reshape(3, -1), 1e-12)


@pytest.mark.parametrize("half", (False, True))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half_dim"),
    ((4, 2, 16, 8), (3, 1, 64, 32), (2, 1, 16, 6), (1, 1, 256, 128), (2, 2, 130, 0)),
)
def test_rope_append_with_norms(
    bench: Bench, half: bool, heads: int, kv_heads: int, head_dim: int, half_dim: int
) -> None:
    """Norms of the heads of q and k, then RoPE (or none): its twins, op by op.

    A software driver computes what is written, so their bits are equal there; a GPU's compiler may
    fuse a multiplication and a sum in one kernel and not in the other.
    """
    rng = np.random.default_rng(head_dim + half_dim)
    start, live = 60, 9
    split = rng.standard_normal((live, heads + 2 * kv_heads, head_dim)).astype(np.float32)
    split *= rng.uniform(0.1, 30, (live, heads + 2 * kv_heads, 1)).astype(np.float32)
    norms = rng.standard_normal((2, head_dim)).astype(np.float32)
    inv_freq = cases.frequencies(max(half_dim, 1))
    rows = rows_of(range(start, start + live), bucket=16, inactive=(4,))

    def twin(part: Array, count: int, weight: Array) -> Array:
        normed = Call(
            graph=cases.rms_norm(count * head_dim, heads=count),
            rows=rows_of(range(start, start + live), bucket=16),
            inputs={"x": part.reshape(live, -1)},
            weights={"w": weight},
        )
        y = bench.run(normed).value("y")
        if half_dim:
            turned = Call(
                graph=cases.rope(count, head_dim, half_dim),
                rows=normed.rows,
                inputs={"x": y},
                weights={"inv_freq": inv_freq},
            )
            y = bench.run(turned).value("y")
        return y.reshape(live, count, head_dim)

    pool = KvPool(kv_heads, head_dim, half=half, table_blocks=2)
    weights = {"q_norm": norms[0], "k_norm": norms[1]}
    if half_dim:
        weights["inv_freq"] = inv_freq
    call = Call(
        graph=cases.rope_append(heads, kv_heads, head_dim, half_dim, norms=True),
        rows=rows,
        inputs={"qkv": split.reshape(live, -1)},
        weights=weights,
        kv=pool,
    )
    outcome = bench.run(call)
    assert outcome.kernels == ["rope_append/norm_rotate_append." + ("kv16" if half else "kv32")]
    q = twin(split[:, :heads], heads, norms[0])
    k = twin(split[:, heads : heads + kv_heads], kv_heads, norms[1])
    v = split[:, heads + kv_heads :]
    active = [r for r in range(live) if r != 4]
    found = outcome.value("y").reshape(q.shape)[active]
    np.testing.assert_allclose(found, q[active], rtol=1e-5, atol=1e-6)
    assert np.isnan(outcome.value("y")[4]).all()
    if bench.device.info.kind == "software":
        assert np.array_equal(found, q[active])
        check_cache(outcome, pool, [(0, start + r, k[r], v[r]) for r in active])
    expected = call.expected()["y"]
    assert_close(outcome.value("y")[active], expected[active], 1e-5 + 4e-6 * np.abs(expected).max())


@pytest.mark.parametrize("half", (False, True))
def test_rope_append_without_rope(bench: Bench, half: bool) -> None:
    """GPT-2 and layers without positions: q, k and v as they are."""
    rng = np.random.default_rng(1)
    split = rng.standard_normal((5, 2 + 2 * 2, 12)).astype(np.float32)
    pool = KvPool(2, 12, half=half, table_blocks=1)
    call = Call(
        graph=cases.rope_append(2, 2, 12, 0),
        rows=rows_of(range(3, 8), bucket=8),
        inputs={"qkv": split.reshape(5, -1)},
        kv=pool,
    )
    outcome = bench.run(call)
    assert np.array_equal(outcome.value("y"), split[:, :2].reshape(5, -1))
    check_cache(outcome, pool, [(0, 3 + r, split[r, 2:4], split[r, 4:]) for r in range(5)])


def check_qkv_row(call: Call, outcome: Outcome, pool: KvPool, r: int) -> None:
    """Row r of a projection with append is the reference's, in q and in the cache."""
    state = ReferenceState()
    row, x = call.rows[r : r + 1], call.inputs["x"][r : r + 1]
    expected = replace(call, rows=row, live=1, inputs={"x": x}).expected(state)["y"]
    assert_close(outcome.value("y")[r : r + 1], expected, 2e-5 * (1 + np.abs(expected)))
    assert outcome.blocks is not None
    position, slot = (int(number) for number in row[0, 1:3])
    block, inside = pool.at(slot, position)
    rounding = 2.0**-10 if pool.half else 2e-5
    for side, kept in ((0, state.layer(0).keys), (1, state.layer(0).values)):
        wanted = kept[position]
        found = outcome.blocks.data[block, 1, side, :, inside]
        assert_close(found, wanted, rounding * (1 + np.abs(wanted)))


@pytest.mark.parametrize(
    ("device", "dtype"),
    (
        *((device, dtype) for device in ("software", "gpu") for dtype in ("fp32", "fp16", "int4")),
        ("bare_gpu", "fp16"),
    ),
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half_dim", "half"),
    (
        (4, 2, 16, 8, True),
        (3, 1, 64, 32, False),
        (2, 1, 16, 6, True),
        (2, 1, 8, 2, False),
        (2, 2, 12, 0, True),
    ),
)
def test_qkv_append(
    bench: Bench,
    device: str,
    dtype: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    half_dim: int,
    half: bool,
) -> None:
    """Norm, projections, RoPE and append in one launch or in several: float64's numbers, and the
    cache's; a row that is not live leaves everything as it is."""
    rng = np.random.default_rng(head_dim + half_dim)
    k, n = 64, (heads + 2 * kv_heads) * head_dim
    positions, slots = (100, 3, 63, 64), (1, 0, 2, 3)
    weights = {
        "w": rng.standard_normal((n, k)).astype(np.float32) / 8,
        "b": rng.standard_normal(n).astype(np.float32),
        "norm": rng.standard_normal(k).astype(np.float32),
    }
    if half_dim:
        weights["inv_freq"] = cases.frequencies(half_dim)
    pool = KvPool(kv_heads, head_dim, half=half, slots=4, table_blocks=2)
    graph = cases.qkv_append(
        heads, kv_heads, head_dim, half_dim, k, dtype, scale=1.25, bias=True, norm=True
    )
    call = Call(
        graph=graph,
        rows=rows_of(positions, slots=slots, inactive=(1,)),
        inputs={"x": rng.standard_normal((4, k)).astype(np.float32) * 20},
        weights=weights,
        kv=pool,
        kind="batch",
        table_stride=5,
        device=device,
    )
    outcome = bench.run(call)
    assert len(outcome.kernels) == (3 if device == "software" else 1)
    assert np.isnan(outcome.value("y")[1]).all()
    assert outcome.blocks is not None
    changed = (outcome.blocks.data != pool.data) & ~np.isnan(outcome.blocks.data)
    assert int(changed.sum()) == 3 * 2 * kv_heads * head_dim
    for r in (0, 2, 3):
        check_qkv_row(call, outcome, pool, r)


@pytest.mark.parametrize("half", (False, True))
def test_every_qkv_append_variant(bench: Bench, half: bool) -> None:
    """One row, whose pairs of dims are shared out in groups of one, two or four, with x from
    memory or as digits: heads with a part of their dims rotated, and a last group that is
    not full."""
    rng = np.random.default_rng(8)
    heads, kv_heads, head_dim, half_dim, k = 3, 1, 20, 6, 96
    n = (heads + 2 * kv_heads) * head_dim
    pool = KvPool(kv_heads, head_dim, half=half, slots=4, table_blocks=2)
    call = Call(
        graph=cases.qkv_append(
            heads, kv_heads, head_dim, half_dim, k, "int4", scale=1.0, bias=True, norm=True
        ),
        rows=rows_of((70,), slots=(2,)),
        inputs={"x": rng.standard_normal((1, k)).astype(np.float32) * 20},
        weights={
            "w": rng.standard_normal((n, k)).astype(np.float32) / 8,
            "b": rng.standard_normal(n).astype(np.float32),
            "norm": rng.standard_normal(k).astype(np.float32),
            "inv_freq": cases.frequencies(half_dim),
        },
        kv=pool,
        kind="batch",
        table_stride=5,
        device="dot_gpu",
    )
    (site,) = lower(call, bench.device.caps).sites
    names = {v.name for v in site.admitted if not v.plain}
    cache = "kv16" if half else "kv32"
    starts = [f"gemv_append.{cache}_q[3=1,4=1,5={n},11={outs}" for outs, n in ((4, 16), (8, 64))]
    if bench.device.caps.has_dot_product:
        starts.append(f"digits_append.{cache}[5=8,")
    for start in starts:
        (name,) = (name for name in names if name.startswith(f"linear/{start}"))
        outcome = bench.run(replace(call, choices=Choices(winners={site.key: name})))
        assert outcome.kernels == [name.partition("[")[0]]
        assert outcome.blocks is not None
        changed = (outcome.blocks.data != pool.data) & ~np.isnan(outcome.blocks.data)
        assert int(changed.sum()) == 2 * kv_heads * head_dim
        check_qkv_row(call, outcome, pool, 0)


@pytest.mark.parametrize("half", (False, True))
def test_a_dead_row_has_no_block(bench: Bench, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its position and slot are nonsense: nothing is looked up there, and nothing stored."""
    if not bench.device.caps.has_dot_product:
        pytest.skip(f"{bench.device.info.name} has no integer dot products")
    monkeypatch.setattr(digits, "DIGIT_WEIGHTS", 0)
    rng = np.random.default_rng(9)
    heads, kv_heads, head_dim, k = 2, 1, 16, 64
    pool = KvPool(kv_heads, head_dim, half=half, slots=2, table_blocks=2)
    rows = rows_of((), bucket=1)
    rows[0, 2] = 0x08000000  # 2 GiB behind the block table
    call = Call(
        graph=cases.qkv_append(heads, kv_heads, head_dim, 8, k, "int8", scale=1.0, bias=True),
        rows=rows,
        weights={
            "w": rng.standard_normal(((heads + 2 * kv_heads) * head_dim, k)).astype(np.float32),
            "b": rng.standard_normal((heads + 2 * kv_heads) * head_dim).astype(np.float32),
            "inv_freq": cases.frequencies(8),
        },
        kv=pool,
        kind="batch",
        device="dot_gpu",
    )
    outcome = bench.run(call)
    assert outcome.kernels == [f"linear/digits_append.{'kv16' if half else 'kv32'}"]
    assert np.isnan(outcome.value("y")).all()
    assert outcome.blocks is not None
    assert not ((outcome.blocks.data != pool.data) & ~np.isnan(outcome.blocks.data)).any()
