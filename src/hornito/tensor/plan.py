"""The plan of a tensor graph: its dispatches, their barriers, and where every value lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hornito.ops.base import Operand
from hornito.plan.arena import Layout, LiveRange, pack
from hornito.plan.hazards import Range, barriers
from hornito.plan.plan import Program
from hornito.tensor.graph import TensorGraph
from hornito.tensor.kernels import TensorLowering


class GroupLimits(Protocol):
    """The one fact of a device that lowering asks for (`hornito.vk.caps.Caps` has it)."""

    @property
    def max_workgroup_count(self) -> tuple[int, int, int]: ...


@dataclass(frozen=True, slots=True)
class Least:
    """What every Vulkan device allows."""

    max_workgroup_count: tuple[int, int, int] = (65535, 65535, 65535)


def memory_facts(graph: TensorGraph) -> dict[str, int]:
    """Bytes on a device, by purpose; lowers the graph as for one with the least limits.

    Raises:
        FormatError: a node does not fit its operands.
    """
    plan = build_tensor_plan(graph, Least())
    return {
        "constants": sum(plan.constants.values()) + plan.tables.nbytes,
        "inputs": sum(plan.inputs.values()),
        "activations": plan.arena.total,
        "dispatches": len(plan.program.dispatches),
    }


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What is decided before memory is allocated.

    Attributes:
        program: dispatches and barriers.
        arena: places of the values that nodes make.
        inputs, constants: bytes of each.
        tables: the words that kernels read beside their operands.
        outputs: by name, the value whose memory holds it.
        nodes: how many nodes have a status word.
    """

    program: Program
    arena: Layout
    inputs: Mapping[str, int]
    constants: Mapping[str, int]
    tables: npt.NDArray[np.uint32]
    outputs: Mapping[str, str]
    nodes: int


def build_tensor_plan(
    graph: TensorGraph,
    caps: GroupLimits,
    *,
    guard: int = 0,
    barrier_everywhere: bool = False,
    keep_values: bool = False,
) -> TensorPlan:
    """Lower a graph and place its values.

    Args:
        guard: bytes of guard band behind every value (tests).
        barrier_everywhere: a barrier before every dispatch (tests).
        keep_values: give every value memory of its own, so that all can be read after a run.

    Raises:
        FormatError: a node does not fit its operands.
    """
    low = TensorLowering(graph, caps).run()
    outputs = {name: graph.base(value, low.aliases) for name, value in graph.outputs.items()}
    arena = pack(_live_ranges(graph, low, outputs), guard=guard, share=not keep_values)

    def place(operand: Operand) -> Range:
        start = arena.offsets.get(operand.name)
        if start is None:
            return operand.name, operand.offset, operand.offset + operand.size
        return "arena", start + operand.offset, start + operand.offset + operand.size

    found = barriers(low.dispatches, place)
    if barrier_everywhere:
        found = (True,) * len(found)
    return TensorPlan(
        Program(tuple(low.dispatches), found),
        arena,
        {name: max(4, graph.values[name].size * 4) for name in graph.inputs},
        {name: max(4, words.nbytes) for name, words in graph.constants.items()},
        np.concatenate([*low.tables, np.zeros(1, np.uint32)]),
        outputs,
        max(1, len(graph.nodes)),
    )


def _live_ranges(
    graph: TensorGraph, low: TensorLowering, outputs: Mapping[str, str]
) -> list[LiveRange]:
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for step, dispatch in enumerate(low.dispatches):
        for operand in (*dispatch.reads, *dispatch.writes):
            if operand.name not in graph.inputs and operand.name not in graph.constants:
                first.setdefault(operand.name, step)
                last[operand.name] = step
                sizes[operand.name] = max(sizes.get(operand.name, 0), operand.size)
    end = len(low.dispatches)
    for name in outputs.values():
        if name in first:
            last[name] = end
    return [LiveRange(name, sizes[name], first[name], last[name]) for name in first]
