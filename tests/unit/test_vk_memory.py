"""Memory types on recorded tables, and the plan of chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hornito.errors import DeviceMemoryError
from hornito.vk.memory import MemoryKind, MemoryTable, MemoryType, choose_memory_type, plan_chunks

LOCAL, VISIBLE, COHERENT, CACHED = 1, 2, 4, 8
HOST = VISIBLE | COHERENT
MIB, GIB = 1 << 20, 1 << 30


def table(
    types: list[tuple[int, int]], heaps: list[tuple[int, bool]], unified: bool = False
) -> MemoryTable:
    return MemoryTable(
        tuple(MemoryType(flags, heap) for flags, heap in types),
        tuple(size for size, _ in heaps),
        tuple(local for _, local in heaps),
        unified,
    )


# NVIDIA before resizable BAR: no type is both device local and host visible.
NO_BAR = table(
    [(0, 1), (LOCAL, 0), (HOST, 1), (HOST | CACHED, 1)], [(8 * GIB, True), (16 * GIB, False)]
)
# NVIDIA with the 256 MiB window as a heap of its own.
SMALL_BAR = table(
    [(0, 1), (LOCAL, 0), (HOST, 1), (HOST | CACHED, 1), (LOCAL | HOST, 2)],
    [(8 * GIB, True), (16 * GIB, False), (246 * MIB, True)],
)
# RADV with the window first among the device-local types, and AMD's device-coherent twins.
SMALL_BAR_FIRST = table(
    [(LOCAL | HOST, 2), (LOCAL, 0), (HOST, 1), (HOST | CACHED, 1), (LOCAL | 0xC0, 0)],
    [(8 * GIB, True), (16 * GIB, False), (256 * MIB, True)],
)
# Resizable BAR: all video memory is host visible.
REBAR = table(
    [(LOCAL, 0), (LOCAL | HOST, 0), (HOST, 1), (HOST | CACHED, 1)],
    [(24 * GIB, True), (64 * GIB, False)],
)
# Intel integrated: one heap, everything device local.
UMA = table(
    [(LOCAL, 0), (LOCAL | HOST, 0), (LOCAL | HOST | CACHED, 0)], [(12 * GIB, True)], unified=True
)
# An APU with a carve-out: the device-local heap is the small one.
CARVE_OUT = table(
    [(LOCAL | HOST, 0), (HOST, 1), (HOST | CACHED, 1)],
    [(512 * MIB, True), (14 * GIB, False)],
    unified=True,
)
# Two device-local heaps, the small one first.
TWO_HEAPS = table(
    [(LOCAL, 0), (LOCAL, 1), (HOST, 2), (HOST | CACHED, 2)],
    [(512 * MIB, True), (16 * GIB, True), (32 * GIB, False)],
)
LAVAPIPE = table([(LOCAL | HOST | CACHED, 0)], [(24 * GIB, True)], unified=True)


@pytest.mark.parametrize(
    ("devices", "kind", "expected"),
    [
        (NO_BAR, "device", 1), (NO_BAR, "upload", 2), (NO_BAR, "host", 3),
        (SMALL_BAR, "device", 1), (SMALL_BAR, "upload", 2), (SMALL_BAR, "host", 3),
        (SMALL_BAR_FIRST, "device", 1), (SMALL_BAR_FIRST, "upload", 2),
        (SMALL_BAR_FIRST, "host", 3),
        (REBAR, "device", 0), (REBAR, "upload", 2), (REBAR, "host", 3),
        (UMA, "device", 1), (UMA, "upload", 1), (UMA, "host", 2),
        (CARVE_OUT, "device", 1), (CARVE_OUT, "upload", 1), (CARVE_OUT, "host", 2),
        (TWO_HEAPS, "device", 1), (TWO_HEAPS, "upload", 2), (TWO_HEAPS, "host", 3),
        (LAVAPIPE, "device", 0), (LAVAPIPE, "upload", 0), (LAVAPIPE, "host", 0),
    ],
)  # fmt: skip
def test_choice_on_recorded_tables(devices: MemoryTable, kind: MemoryKind, expected: int) -> None:
    """C6."""
    assert choose_memory_type(devices, kind, ~0, 1 * MIB) == expected


def test_mask_of_the_buffer_is_respected() -> None:
    assert choose_memory_type(REBAR, "device", 0b0010, MIB) == 1
    with pytest.raises(DeviceMemoryError):
        choose_memory_type(NO_BAR, "device", 0b1100, MIB)


def test_heap_that_is_too_small_is_an_error_with_numbers() -> None:
    with pytest.raises(DeviceMemoryError, match="device buffer of") as caught:
        choose_memory_type(SMALL_BAR, "device", ~0, 9 * GIB)
    assert (caught.value.needed, caught.value.available) == (9 * GIB, 8 * GIB)


def test_device_heap_is_the_one_that_buffers_come_from() -> None:
    assert [t.device_heap() for t in (SMALL_BAR, TWO_HEAPS, CARVE_OUT)] == [0, 1, 1]


@pytest.mark.parametrize("limit", [2 * GIB, GIB, 256 * MIB, 128 * MIB])
def test_chunks_of_a_real_model_under_real_limits(limit: int) -> None:
    """C4: a 0.5B model in fp16, without its 272 MB head where that exceeds the limit."""
    sizes = [896 * 4864 * 2] * 72 + [896 * 896 * 2] * 48
    if limit >= 272 * MIB:
        sizes.append(151_936 * 896 * 2)
    plan = plan_chunks(sizes, limit, 256)
    assert max(plan.chunk_sizes) <= limit
    assert len(plan.chunk_sizes) <= -(-sum(sizes) // limit) + 1


def test_item_above_the_limit() -> None:
    with pytest.raises(ValueError, match="an item of 257 bytes exceeds the chunk limit of 256"):
        plan_chunks([1, 257], 256, 64)


def test_exact_fit_and_empty_plan() -> None:
    assert plan_chunks([256, 256], 512, 256).places == ((0, 0), (0, 256))
    assert plan_chunks([256, 1, 256], 512, 256).places == ((0, 0), (0, 256), (1, 0))
    assert plan_chunks([], 512, 256).chunk_sizes == ()


@given(
    st.lists(st.integers(0, 5000), max_size=60),
    st.integers(5000, 20_000),
    st.sampled_from([1, 4, 64, 256]),
)
def test_chunks_never_overlap(sizes: list[int], limit: int, alignment: int) -> None:
    plan = plan_chunks(sizes, limit, alignment)
    ends = [0] * len(plan.chunk_sizes)
    for size, (chunk, offset) in zip(sizes, plan.places, strict=True):
        assert offset % alignment == 0
        assert offset >= ends[chunk]  # items of a chunk are in the order given
        ends[chunk] = offset + size
    assert tuple(ends) == plan.chunk_sizes
    assert all(end <= limit for end in ends)
