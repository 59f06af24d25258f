"""The arena planner: nothing that lives at once shares a byte, nothing lies past the end."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hornito.plan.arena import ALIGNMENT, Layout, LiveRange, pack


@st.composite
def live_ranges(draw: st.DrawFn) -> list[LiveRange]:
    count = draw(st.integers(0, 14))
    sizes = st.one_of(
        st.integers(1, 5000), st.sampled_from([63, 64, 65, 255, 256, 257, 4194304, 4202496])
    )
    ranges = []
    for i in range(count):
        first = draw(st.integers(0, 12))
        ranges.append(LiveRange(f"v{i}", draw(sizes), first, first + draw(st.integers(0, 6))))
    return ranges


def check(ranges: list[LiveRange], layout: Layout, alignment: int, guard: int) -> None:
    assert set(layout.offsets) == {r.name for r in ranges}
    assert layout.sizes == {r.name: r.size for r in ranges}
    assert layout.guard == guard
    for r in ranges:
        start = layout.offsets[r.name]
        assert start >= 0 and start % alignment == 0
        assert start + r.size + guard <= layout.total
    for a, b in combinations(ranges, 2):
        if (a.first <= b.last and b.first <= a.last) or guard:
            low, high = sorted((a, b), key=lambda r: layout.offsets[r.name])
            assert layout.offsets[low.name] + low.size + guard <= layout.offsets[high.name]


@given(live_ranges(), st.sampled_from([64, 256]), st.sampled_from([0, 1, 64, 256, 1000]))
def test_live_buffers_never_overlap(ranges: list[LiveRange], alignment: int, guard: int) -> None:
    check(ranges, pack(ranges, alignment=alignment, guard=guard), alignment, guard)


@given(live_ranges())
def test_defaults(ranges: list[LiveRange]) -> None:
    layout = pack(ranges)
    check(ranges, layout, ALIGNMENT, 0)
    assert layout == pack(list(reversed(ranges))), "the order of the list does not matter"
    total = sum(-(-r.size // ALIGNMENT) * ALIGNMENT for r in ranges)
    assert layout.total <= total


@given(live_ranges())
def test_total_is_not_below_what_lives_at_once(ranges: list[LiveRange]) -> None:
    layout = pack(ranges)
    for step in range(20):
        assert layout.total >= sum(r.size for r in ranges if r.first <= step <= r.last)


def test_empty() -> None:
    assert pack([]) == Layout({}, {}, 0, 0)


def test_buffers_that_follow_each_other_share_memory() -> None:
    ranges = [LiveRange(f"v{i}", 1024, i, i) for i in range(5)]
    assert pack(ranges).total == 1024
    chain = [LiveRange(f"v{i}", 1024, i, i + 1) for i in range(5)]
    assert pack(chain).total == 2048


def test_touching_ends_overlap() -> None:
    """A buffer's last step is in use: the next may start only after it."""
    a, b = LiveRange("a", 256, 0, 3), LiveRange("b", 256, 3, 4)
    assert a.overlaps(b) and b.overlaps(a)
    assert pack([a, b]).total == 512
    assert not a.overlaps(LiveRange("c", 1, 4, 5))


@pytest.mark.parametrize("size", (4194304, 4194305, 4202496))
def test_sizes_around_a_pool(size: int) -> None:
    """The last buffer ends inside the arena, to the byte (mlc-llm's 4,202,496 in 4,194,304)."""
    layout = pack([LiveRange("a", size, 0, 1), LiveRange("b", 100, 1, 2)])
    assert layout.offsets["b"] + 100 <= layout.total
    assert layout.total == -(-size // 256) * 256 + 256
