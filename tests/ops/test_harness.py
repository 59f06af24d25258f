"""The harness itself: each kind of fault that it is meant to see, put in on purpose."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from hornito.graph.graph import Node
from hornito.ops import add, kv_append
from hornito.ops.base import Dispatch, Lowering
from ops import cases
from ops.harness import Bench, Call, assert_close, rows_of
from ops.kv_pool import KvPool

pytestmark = pytest.mark.gpu

Change = Callable[[Dispatch], Dispatch]


def sum_call() -> Call:
    ones = np.ones((3, 70), np.float32)
    return Call(
        graph=cases.add(70), rows=rows_of(range(3), bucket=4), inputs={"a": ones, "b": ones}
    )


@pytest.mark.software
@pytest.mark.skipif(os.cpu_count() == 1, reason="one processor computes one workgroup at a time")
def test_workgroups_are_computed_side_by_side(bench: Bench) -> None:
    """Else workgroups that race would never show here."""
    bench.run(sum_call())
    if "llvmpipe" in bench.device.info.name:
        threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        assert sum(name.startswith("llvmpipe-") for name in threads) > 1


def change_lowering(patch: pytest.MonkeyPatch, module: ModuleType, change: Change) -> None:
    """Every dispatch of an op altered on its way out."""
    real = module.lower

    def lower(node: Node, low: Lowering) -> None:
        real(node, low)
        low.dispatches[:] = [change(d) for d in low.dispatches]

    patch.setattr(module, "lower", lower)


def with_argument(dispatch: Dispatch, name: str, value: int) -> Dispatch:
    args = list(dispatch.args)
    args[[field for field, _ in dispatch.push.fields].index(name)] = value
    return replace(dispatch, args=tuple(args))


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda d: replace(d, writes=()), "undeclared writes at placeholder"),
        (lambda d: replace(d, reads=d.reads[1:]), "values are NaN"),
        (lambda d: replace(d, groups=(1, 4, 1)), "values are NaN"),
        (lambda d: replace(d, groups=(2, 2, 1)), "values are NaN"),
        (lambda d: replace(d, writes=(d.writes[0].part(0, 280),)), r"undeclared writes at /y"),
        (lambda d: with_argument(d, "width", 100), "rows past 3 were written|undeclared writes"),
    ),
)
def test_faults_of_a_dispatch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: Change, message: str
) -> None:
    bench.run(sum_call())
    change_lowering(monkeypatch, add, change)
    with pytest.raises(AssertionError, match=message):
        bench.run(sum_call())


def test_a_padded_row_that_is_written(bench: Bench) -> None:
    """A header that counts more rows than are live."""
    call = replace(sum_call(), live=2)
    outcome = bench.run(call)
    assert outcome.value("y").shape == (2, 70)
    inputs = {name: np.ones((4, 70), np.float32) for name in ("a", "b")}
    wrong = replace(call, inputs=inputs, rows=rows_of(range(4)), live=4)
    assert len(bench.run(wrong).value("y")) == 4


def test_a_store_into_a_block_of_someone_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer further: the pool is not what was asked for."""
    pool = KvPool(1, 8, half=False, layers=3, layer=1, table_blocks=1)
    ones = np.ones((1, 8), np.float32)
    call = Call(
        graph=cases.kv_append(1, 8), rows=rows_of([5]), inputs={"k": ones, "v": ones}, kv=pool
    )
    expected = pool.copy()
    expected.put(0, 5, ones, ones)

    def right() -> bool:
        after = bench.run(call).blocks
        assert after is not None
        return after.data.tobytes() == expected.data.tobytes()

    assert right()
    change_lowering(monkeypatch, kv_append, lambda d: with_argument(d, "layer", 2))
    assert not right()


def test_close_means_close() -> None:
    exact = np.array([1.0, 2.0])
    assert_close(np.array([1.0, 2.1]), exact, 0.11)
    for found in ([1.0, 2.2], [np.nan, 2.0], [np.inf, 2.0]):
        with pytest.raises(AssertionError, match="1 of 2 values differ"):
            assert_close(np.array(found), exact, 0.11)
