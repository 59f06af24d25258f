"""A real dispatch with a known answer: does this device compute what it should, every time?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.graph.graph import FLOAT, Graph, Weight
from hornito.graph.shapes import T
from hornito.ops import registry
from hornito.ops.base import Lowering, Tail
from hornito.ops.variants import Choices
from hornito.plan.attempts import Attempts
from hornito.plan.plan import Program
from hornito.plan.recording import Pipelines, record
from hornito.plan.records import DeviceRecords, pipeline_mark
from hornito.vk.device import Device
from hornito.vk.memory import Arena

#: Largest error that counts as right, as a part of the largest result.
TOLERANCE = 1e-5

_N, _K = 192, 512


@dataclass(frozen=True, slots=True)
class DispatchCheck:
    """What repeated runs of one kernel gave.

    Attributes:
        kernel: its name.
        rows: rows of the product.
        runs: how often it ran.
        error: largest error against float64, as a part of the largest result.
        different: runs whose bits were not those of the first.
    """

    kernel: str
    rows: int
    runs: int
    error: float
    different: int

    @property
    def passed(self) -> bool:
        """Whether the device computed the right thing, and the same thing each time."""
        return self.error <= TOLERANCE and self.different == 0


def check_dispatch(device: Device, records: DeviceRecords, runs: int = 100) -> list[DispatchCheck]:
    """Matrix products of random numbers, of one row (as in decoding) and of many (as in a prompt).

    Kernels that ended processes are left out, as in a load.

    Args:
        records: the device's.

    Raises:
        HornitoError: the kernel could not be compiled or run.
    """
    return [_check(device, records, rows, runs) for rows in (1, 64)]


def _check(device: Device, records: DeviceRecords, rows: int, runs: int) -> DispatchCheck:
    rng = np.random.default_rng(20240613)
    x = rng.standard_normal((rows, _K), np.float32)
    w = rng.standard_normal((_N, _K), np.float32)
    graph = Graph()
    graph.add_input("x", FLOAT, (T, _K))
    graph.add_weight("w", Weight((_N, _K), "fp32", matrix=True))
    graph.add("linear", "y", ["x", "w", "", ""])
    low = _lowered(graph, device, rows, Choices())
    variants = [v.kernel for site in low.sites for v in site.admitted if not v.plain]
    if fatal := records.fatal(variants):
        low = _lowered(graph, device, rows, Choices(fatal))
    sizes = {"w": w.nbytes, **low.buffers, low.call.name: low.call.size}
    arena = Arena(device, "doctor", list(sizes.items()), kind="device")
    try:
        call = np.asarray([rows, 1, 0, 0], np.uint32)
        given = {low.operand("x").name: x, "w": w, low.call.name: call}
        device.upload((*arena[name], data) for name, data in given.items())
        results = _run(device, records, low, arena, runs)
    finally:
        arena.free()
    want = x.astype(np.float64) @ w.astype(np.float64).T
    got = np.frombuffer(results[0], np.float32).reshape(want.shape)
    error = _relative_error(got, want)
    different = sum(result != results[0] for result in results)
    return DispatchCheck(low.dispatches[0].kernel, rows, runs, error, different)


def _lowered(graph: Graph, device: Device, rows: int, choices: Choices) -> Lowering:
    """The launches of the graph's only node."""
    low = Lowering(
        graph,
        device.caps,
        kind="chunk",
        rows=rows,
        selected=1,
        kv={},
        table_blocks=1,
        weight_bytes={"w": 4 * _N * _K},
        tail=Tail("none"),
        choices=choices,
    )
    registry.op("linear").lower(graph.nodes[0], low)
    return low


def _run(
    device: Device, records: DeviceRecords, low: Lowering, arena: Arena, runs: int
) -> list[bytes]:
    """The bytes of the result after each run; NaNs lie there before it."""
    target = low.operand("y")
    buffer, offset = arena[target.name]
    program = Program(tuple(low.dispatches), (False,) * len(low.dispatches))
    pipelines = Pipelines(device, Attempts(records.path))
    recorders = record(
        device, pipelines, program, lambda o: arena.address(o.name) + o.offset, "doctor"
    )
    if records.forgive(map(pipeline_mark, low.dispatches)):
        records.save()
    poison = device.command_buffer("doctor.poison")
    poison.fill(buffer, offset, target.size, 0x7FC00000)
    poison.end()
    results = []
    try:
        for _ in range(runs):
            device.wait(device.submit([poison, *recorders]))
            results.append(device.download(buffer, offset, target.size))
    finally:
        for recorder in [poison, *recorders]:
            recorder.free()
    return results


def _relative_error(got: npt.NDArray[Any], want: npt.NDArray[np.float64]) -> float:
    """Infinite where something is not finite."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - want).max() / np.abs(want).max())
