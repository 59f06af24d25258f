"""Barriers from declared ranges, against brute force over all pairs of dispatches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hornito.ops.base import Dispatch, Operand, Push
from hornito.plan.hazards import Range, barriers

PUSH = Push("n:u32")


def dispatch(reads: tuple[Operand, ...], writes: tuple[Operand, ...]) -> Dispatch:
    return Dispatch("k", PUSH, (0,), (1, 1, 1), reads, writes, "node")


def place(operand: Operand) -> Range:
    """Two names share one space, at different places of it."""
    base = {"a": 0, "b": 48}.get(operand.name)
    if base is None:
        return (operand.name, operand.offset, operand.offset + operand.size)
    return ("arena", base + operand.offset, base + operand.offset + operand.size)


operands = st.builds(
    Operand, st.sampled_from(["a", "b", "c"]), st.integers(0, 64), st.integers(1, 40)
)
programs = st.lists(
    st.builds(
        dispatch,
        st.lists(operands, max_size=3).map(tuple),
        st.lists(operands, min_size=1, max_size=2).map(tuple),
    ),
    max_size=10,
)


def bytes_of(found: tuple[Operand, ...]) -> set[tuple[str, int]]:
    return {(space, i) for space, start, end in map(place, found) for i in range(start, end)}


def conflict(first: Dispatch, second: Dispatch) -> bool:
    """Read after write, write after read, or write after write, byte by byte."""
    read, written = bytes_of(first.reads), bytes_of(first.writes)
    return bool(
        bytes_of(second.reads) & written
        or bytes_of(second.writes) & read
        or bytes_of(second.writes) & written
    )


@given(programs)
def test_every_conflict_has_a_barrier_between(program: list[Dispatch]) -> None:
    found = barriers(program, place)
    assert len(found) == len(program)
    for j in range(len(program)):
        for i in range(j):
            if conflict(program[i], program[j]):
                assert any(found[i + 1 : j + 1]), (i, j)


@given(programs)
def test_every_barrier_has_a_conflict(program: list[Dispatch]) -> None:
    """None without a reason among the dispatches since the barrier before."""
    since = 0
    for j, needed in enumerate(barriers(program, place)):
        if needed:
            assert any(conflict(program[i], program[j]) for i in range(since, j))
            since = j


def test_known_cases() -> None:
    a, b, c = (Operand(name, 0, 16) for name in "abc")
    assert barriers([], place) == ()
    chain = [dispatch((a,), (b,)), dispatch((b,), (c,)), dispatch((c,), (a,))]
    assert barriers(chain, place) == (False, True, True)
    apart = [dispatch((a,), (b,)), dispatch((a,), (c,)), dispatch((b, c), (a,))]
    assert barriers(apart, place) == (False, False, True)
    again = [dispatch((), (a,)), dispatch((), (a,))]
    assert barriers(again, place) == (False, True)
    # a and b are neighbours of one arena: [0, 48) and [48, ...).
    wide = Operand("a", 32, 16), Operand("a", 33, 16)
    assert barriers([dispatch((), (b,)), dispatch((), (wide[0],))], place) == (False, False)
    assert barriers([dispatch((), (b,)), dispatch((), (wide[1],))], place) == (False, True)
