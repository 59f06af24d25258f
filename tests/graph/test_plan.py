"""Plans of a llama graph: buckets, dispatches, arena, barriers and sizes, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from graph import small_llama
from hornito.graph.graph import Graph
from hornito.graph.passes import ORDER, run_passes
from hornito.ops.base import BLOCK_POSITIONS, Dispatch, Operand
from hornito.ops.head import TAILS
from hornito.plan.plan import (
    BucketPlan,
    Plan,
    PlanOptions,
    Program,
    build_plan,
    chunk_sizes,
    kv_kinds,
)
from hornito.vk import api
from hornito.vk.caps import Caps, CoopMat

WORDS_LIMIT = 1 << 31
"""Kernels count 32-bit words in 32 bits, and SPIR-V reads an index as signed."""


def device(kind: int = api.VK_PHYSICAL_DEVICE_TYPE_CPU) -> Caps:
    return Caps.parse({"deviceType": kind})


GPU = device(api.VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU)


def fused(**changes: Any) -> Graph:
    graph = small_llama.build("fp16", **changes)
    run_passes(graph)
    return graph


def options(**changes: Any) -> PlanOptions:
    settings: dict[str, Any] = {"context": 1000, "kv_half": True, "eos_count": 2}
    return PlanOptions(**(settings | changes))


def programs(bucket: BucketPlan) -> Iterator[Program]:
    yield bucket.body
    yield from bucket.tails.values()


def every_dispatch(plan: Plan) -> Iterator[Dispatch]:
    for bucket in plan.buckets.values():
        for program in programs(bucket):
            yield from program.dispatches


def test_dispatches_per_layer() -> None:
    """Norm, QKV, RoPE and append; attention; output; norm, gate and up; down. Without shuffles
    the parts of attention are joined apart."""
    assert build_plan(fused(), GPU, options()).dispatches_per_layer() == 6
    shuffling = replace(
        GPU,
        subgroup_size=32,
        subgroup_min=32,
        subgroup_max=32,
        subgroup_ops=frozenset({"basic", "shuffle"}),
        has_full_subgroups=True,
    )
    plan = build_plan(fused(), shuffling, options())
    print(f"dispatches per layer: {plan.dispatches_per_layer()}")
    assert plan.dispatches_per_layer() == 5
    for disabled, count in ((ORDER, 16), (["norm_in_linear"], 7), (["append_in_linear"], 6)):
        graph = small_llama.build("fp16")
        run_passes(graph, disabled)
        assert build_plan(graph, shuffling, options()).dispatches_per_layer() == count


def test_chunk_sizes() -> None:
    """Large chunks where matrices are cooperative, and no larger than the context has use for."""
    matrices = replace(
        GPU,
        device_kind="discrete",
        subgroup_size=32,
        has_full_subgroups=True,
        has_float16=True,
        coopmat=(CoopMat(16, 16, 16, "f16", "f16", "f32", "f32", False),),
    )
    assert chunk_sizes(matrices, 8192, half_operands=True) == (16, 64, 256, 512, 1024)
    assert chunk_sizes(matrices, 300, half_operands=True) == (16, 64, 256, 512)
    assert chunk_sizes(matrices, 64, half_operands=True) == (16, 64, 256)
    small = replace(matrices, device_kind="integrated")
    for caps, half in ((GPU, True), (matrices, False), (small, True)):
        assert chunk_sizes(caps, 8192, half_operands=half) == (16, 64, 256)


@pytest.mark.parametrize(
    ("slots", "batches"), ((1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (4, [1, 2, 4]))
)
def test_buckets(slots: int, batches: list[int]) -> None:
    plan = build_plan(fused(), GPU, options(slots=slots, chunk_rows=(16, 64)))
    keys = [("batch", rows) for rows in batches] + [("chunk", 16), ("chunk", 64)]
    assert list(plan.buckets) == keys
    for (kind, rows), bucket in plan.buckets.items():
        assert (bucket.kind, bucket.rows) == (kind, rows)
        assert set(bucket.tails) == set(TAILS) == set(bucket.selected)
        assert bucket.selected["logprob"] == rows
        for tail in ("argmax", "sample"):
            assert bucket.selected[tail] == (rows if kind == "batch" else 1)
        assert all(s <= max(rows, 16) for s in bucket.selected.values())


@pytest.mark.parametrize("slots", (1, 4))
def test_table_and_block_sizes(slots: int) -> None:
    plan = build_plan(fused(), GPU, options(slots=slots))
    (kind,) = plan.kinds
    assert (kind.window, kind.kv_heads, kind.head_dim, kind.layers) == (0, 2, 8, (0, 1))
    assert kind.block_bytes == 2 * 2 * 2 * 64 * 8 * 2
    assert plan.table_blocks == 16 and plan.table_blocks * BLOCK_POSITIONS >= 1000
    sizes = {o.size for d in every_dispatch(plan) for o in d.reads if o.name == "tables"}
    assert sizes == {16 * 8 * slots}
    rows = {o.size for d in every_dispatch(plan) for o in d.reads if o.name == "rows"}
    assert max(rows) == 256 * 32


def test_layers_with_windows_are_kinds_of_their_own() -> None:
    graph = small_llama.build("fp16", num_hidden_layers=4)
    for i, node in enumerate(graph.nodes):
        if node.op == "attention" and node.attr("layer") % 2 == 0:
            attrs = {**node.attrs, "window": 100}
            graph.nodes[i] = type(node)(
                node.op, node.name, node.inputs, node.outputs, attrs, node.covers
            )
    run_passes(graph)
    kinds = kv_kinds(graph, half=False)
    assert [(k.window, k.layers) for k in kinds] == [(100, (0, 2)), (0, (1, 3))]
    plan = build_plan(graph, GPU, options(slots=2))
    blocks = plan.table_blocks
    for dispatch in every_dispatch(plan):
        fields = [name for name, _ in dispatch.push.fields]
        if not dispatch.node.startswith("layer") or "table" not in fields:
            continue
        table = dispatch.args[fields.index("table")]
        assert isinstance(table, Operand)
        layer = int(dispatch.node[len("layer")])
        assert table.offset == (layer % 2) * blocks * 8
        assert table.offset + table.size == 2 * 2 * blocks * 8
        assert dispatch.args[fields.index("table_stride")] == 2 * blocks
        assert dispatch.args[fields.index("layer")] == layer // 2


def placed(plan: Plan, operand: Operand) -> tuple[str, int, int]:
    if operand.name in plan.arena.offsets:
        start = plan.arena.offsets[operand.name] + operand.offset
        return "arena", start, start + operand.size
    return operand.name, operand.offset, operand.offset + operand.size


def touch(a: tuple[str, int, int], b: tuple[str, int, int]) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


def conflict(plan: Plan, first: Dispatch, second: Dispatch) -> bool:
    def any_touch(some: tuple[Operand, ...], others: tuple[Operand, ...]) -> bool:
        return any(touch(placed(plan, a), placed(plan, b)) for a in some for b in others)

    return (
        any_touch(second.reads, first.writes)
        or any_touch(second.writes, first.reads)
        or any_touch(second.writes, first.writes)
    )


@pytest.fixture(scope="module", params=("fused", "plain", "software", "tiled"))
def plan(request: pytest.FixtureRequest) -> Plan:
    graph = small_llama.build("fp16", vocab_size=5000)
    run_passes(graph, ORDER if request.param == "plain" else ())
    caps = device() if request.param == "software" else GPU
    tile = 2048 if request.param == "tiled" else 0
    return build_plan(graph, caps, options(slots=2, chunk_rows=(16, 64), head_tile_ids=tile))


@pytest.mark.parametrize("disabled", ((), ORDER), ids=("fused", "plain"))
@pytest.mark.parametrize("caps", (GPU, device()), ids=("gpu", "software"))
def test_c2_every_node_and_weight_is_used_on_the_device(
    caps: Caps, disabled: tuple[str, ...]
) -> None:
    """In every bucket, with table and head: a call leaves nothing to the processor."""
    graph = small_llama.build("fp16", vocab_size=5000)
    run_passes(graph, disabled)
    plan = build_plan(graph, caps, options(slots=2, chunk_rows=(16, 64)))
    for bucket in plan.buckets.values():
        for name, tail in bucket.tails.items():
            dispatches = (*bucket.body.dispatches, *tail.dispatches)
            assert {d.node for d in dispatches} == {node.name for node in graph}, name
            assert {o.name for d in dispatches for o in d.reads} >= set(graph.weights), name


def test_barriers_stand_between_all_conflicts(plan: Plan) -> None:
    for bucket in plan.buckets.values():
        for program in programs(bucket):
            found = program.barriers
            assert len(found) == len(program.dispatches)
            for (i, first), (j, second) in combinations(enumerate(program.dispatches), 2):
                if conflict(plan, first, second):
                    assert any(found[i + 1 : j + 1]), (first.node, second.node)


def test_values_keep_their_memory_while_they_live(plan: Plan) -> None:
    """Of a body and each of its tails: from first write to last read nobody else writes there."""
    for bucket in plan.buckets.values():
        for tail in bucket.tails.values():
            sequence = [*bucket.body.dispatches, *tail.dispatches]
            first: dict[str, int] = {}
            last: dict[str, int] = {}
            for step, dispatch in enumerate(sequence):
                for operand in dispatch.writes:
                    first.setdefault(operand.name, step)
                for operand in (*dispatch.reads, *dispatch.writes):
                    last[operand.name] = step
            for name in (n for n in last if n in plan.arena.offsets):
                assert name in first, f"{name} is read before it is written"
                home = placed(plan, Operand(name, 0, plan.arena.sizes[name]))
                for step in range(first[name], last[name] + 1):
                    for operand in sequence[step].writes:
                        if operand.name != name:
                            assert not touch(home, placed(plan, operand)), (name, operand.name)


def test_a_tail_leaves_the_values_that_other_tails_read(plan: Plan) -> None:
    """Any tail may follow any other without the body in between."""
    for bucket in plan.buckets.values():
        written = {o.name for d in bucket.body.dispatches for o in d.writes}
        for tail in bucket.tails.values():
            needed = {o.name for d in tail.dispatches for o in d.reads} & written
            needed &= set(plan.arena.offsets)
            assert needed, "a tail reads something that the body made"
            for other in bucket.tails.values():
                for dispatch in other.dispatches:
                    for operand in dispatch.writes:
                        for name in needed:
                            home = placed(plan, Operand(name, 0, plan.arena.sizes[name]))
                            assert not touch(home, placed(plan, operand)), (name, operand.name)


def test_every_argument_is_declared(plan: Plan) -> None:
    """What a kernel gets an address of, it says that it reads or writes, or has memory anyway."""
    known = {"rows", "selection", "call", "next_ids", "eos", "records", "given_logprob", "tables"}
    for dispatch in every_dispatch(plan):
        declared = {o.name for o in (*dispatch.reads, *dispatch.writes)}
        for arg in dispatch.args:
            if isinstance(arg, Operand) and arg.name not in declared:
                assert arg.name in known, f"{dispatch.kernel}: {arg.name} is not declared"


def test_guards_keep_buffers_apart() -> None:
    guarded = build_plan(fused(), GPU, options(guard=256)).arena
    spans = sorted((guarded.offsets[n], guarded.offsets[n] + s) for n, s in guarded.sizes.items())
    for (_, end), (start, _) in pairwise(spans):
        assert end + 256 <= start
    assert spans[-1][1] + 256 <= guarded.total


def test_barrier_everywhere() -> None:
    plan = build_plan(fused(), GPU, options(barrier_everywhere=True))
    assert all(all(p.barriers) for b in plan.buckets.values() for p in programs(b))


def test_kernels_are_few_and_listed_once() -> None:
    plan = build_plan(fused(), device(), options())
    kernels = plan.kernels()
    assert len(kernels) == len({(name, spec) for name, spec, _ in kernels})
    used = {(d.kernel, tuple(sorted(d.spec.items()))) for d in every_dispatch(plan)}
    assert {(name, spec) for name, spec, _ in kernels} == used
    print(f"pipelines: {len(kernels)}")


LARGE = {
    "num_hidden_layers": 4,  # of 80: every layer is like the others
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}


@pytest.mark.parametrize("kv_half", (False, True))
def test_index_arithmetic_of_a_large_model(kv_half: bool) -> None:
    """A 70B llama at 128k positions: no word index of any operand reaches 2^31."""
    graph = fused(**LARGE)
    plan = build_plan(graph, GPU, options(context=131072, kv_half=kv_half, slots=4))
    assert plan.table_blocks == 2048
    for dispatch in every_dispatch(plan):
        for operand in (*dispatch.reads, *dispatch.writes):
            assert (operand.offset + operand.size) // 4 < WORDS_LIMIT, operand
    (kind,) = plan.kinds
    blocks_of_all_layers = kind.block_bytes // 4 * 80 // len(kind.layers)
    assert blocks_of_all_layers < WORDS_LIMIT
    whole = kind.block_bytes * plan.table_blocks
    per_position = 2 * 8 * 128 * (2 if kv_half else 4) * 4
    assert whole == 131072 * per_position >= 1 << 31, "beyond what 31 bits can count"


@pytest.mark.parametrize("rows", (16, 256, 1024))
def test_memory_of_a_head_stays_bounded(rows: int) -> None:
    """S x V is never stored for log-probabilities: 128,256 ids for 1024 rows would take 525 MB."""
    graph = fused(**LARGE)
    plan = build_plan(graph, GPU, options(chunk_rows=(rows,)))
    tiles = [size for name, size in plan.arena.sizes.items() if name.endswith(":tile@logprob")]
    assert tiles and max(tiles) <= 32 << 20
