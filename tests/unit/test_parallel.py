"""Threads change neither bytes nor errors, and stop when they are told to."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hornito import parallel
from hornito.compiler import build_graph, write_graph
from hornito.diag.random_model import RandomTensor, random_source, write_random_model
from hornito.errors import FormatError
from hornito.graph import weights as graph_weights
from hornito.parallel import Workers, workers_or_own
from hornito.quant import matrix
from hornito.quant.formats import weight_format
from hornito.quant.matrix import quantise_matrix

COLUMNS, ROWS = 128, 4000


class Counted:
    """Rows of ones; says how often it was read, and fails at a row."""

    shape = (ROWS, COLUMNS)
    source_names = ("w",)

    def __init__(self, fails_at: int = ROWS) -> None:
        self.reads = 0
        self._fails_at = fails_at
        self._lock = threading.Lock()

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        with self._lock:
            self.reads += 1
        if start <= self._fails_at < stop:
            raise FormatError(f"w: row {self._fails_at} can't be read")
        return np.ones((stop - start, COLUMNS), np.float32)


def test_results_keep_the_order_of_the_items() -> None:
    gate = threading.Event()

    def late(item: int) -> int:
        if item == 0:
            assert gate.wait(60)
        elif item == 1:
            gate.set()
        return item * item

    with Workers(3) as workers:
        assert list(workers.in_order(late, range(50))) == [i * i for i in range(50)]
        assert list(workers.in_order(late, iter([]))) == []
        with workers_or_own(workers) as same:
            assert same is workers
    with workers_or_own(None) as own:
        assert list(own.in_order(str, [1, 2])) == ["1", "2"]


def test_an_error_of_a_task_is_raised_and_the_rest_is_dropped() -> None:
    begun = []

    def task(item: int) -> None:
        begun.append(item)
        if item == 5:
            raise FormatError("item 5")

    with pytest.raises(FormatError, match="item 5"), Workers(2) as workers:
        list(workers.in_order(task, range(1000)))
    assert len(begun) < 15, "those that were asked for before the error was seen"


def test_a_row_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "TASK_ELEMENTS", 8 * COLUMNS)
    data = Counted(fails_at=100)
    with pytest.raises(FormatError, match="w: row 100 can't be read"), Workers(4) as workers:
        quantise_matrix(weight_format("int4"), data, workers=workers)
    assert data.reads < ROWS // 8 // 2


def test_an_interrupt_stops_the_rounding_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is raised in the thread that waits."""
    monkeypatch.setattr(matrix, "TASK_ELEMENTS", 8 * COLUMNS)
    data = Counted()

    def interrupted(rows: int) -> None:
        assert rows == 8
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Workers(2) as workers:
        quantise_matrix(weight_format("int4"), data, advance=interrupted, workers=workers)
    assert data.reads <= 4, "of 500: what two threads have begun, or were given ahead"


@pytest.mark.parametrize("weights", ["fp16", "int8", "int4", "int4m"])
def test_packages_do_not_depend_on_threads(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "TASK_ELEMENTS", 1 << 15)
    monkeypatch.setattr(graph_weights, "BLOCK_ELEMENTS", 1 << 15)
    found = set()
    for threads in (1, 4):
        monkeypatch.setattr(parallel, "THREADS", threads)
        path = tmp_path / f"{threads}.vxm"
        write_random_model("tiny", path, weights=weights)
        found.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(found) == 1


@pytest.mark.parametrize("weights", ["fp16", "int4"])
@pytest.mark.parametrize("error", [FormatError("a tensor is cut off"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_package_that_fails(
    weights: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_source("tiny", 64)
    graph, before, passes = build_graph(source, weights)
    rows, reads = RandomTensor.rows, []

    def failing(self: RandomTensor, start: int, stop: int) -> npt.NDArray[np.float32]:
        reads.append(self.shape)
        if len(reads) == 9:
            raise error
        return rows(self, start, stop)

    monkeypatch.setattr(RandomTensor, "rows", failing)
    with pytest.raises(type(error)) as raised:
        write_graph(tmp_path / "out.vxm", source, graph, weights, before, passes)
    assert raised.value is error
    assert list(tmp_path.iterdir()) == []
