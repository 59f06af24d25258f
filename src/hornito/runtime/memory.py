"""The bytes of an engine, known before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hornito.errors import DeviceMemoryError, size_text
from hornito.graph.graph import Graph
from hornito.ops.base import (
    BLOCK_POSITIONS,
    MOST_BIASES,
    MOST_TOP,
    ROW_BYTES,
    SAMPLING_BYTES,
    counter_bytes,
)
from hornito.ops.head import RECORD_BYTES
from hornito.ops.sampling import mask_bytes
from hornito.plan.plan import RING, Plan, PlanOptions, build_plan
from hornito.runtime.kv_cache import pool_sizes

if TYPE_CHECKING:
    from hornito.vk.device import Device

MEMORY_MARGIN = 0.95
"""Part of the free device memory that a default context may fill."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, known before anything is allocated."""

    weights: int
    kv: int
    activations: int
    state: int
    readback: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.activations + self.state + self.readback


def kv_pool_sizes(plan: Plan, options: PlanOptions) -> list[int]:
    """Blocks of each kind's pool."""
    return pool_sizes(
        plan.kinds,
        slots=options.slots,
        table_blocks=plan.table_blocks,
        advance=max(RING, *(rows for _, rows in plan.buckets)),
        rewind_budget=options.rewind_budget,
        kv_bytes=options.kv_bytes,
    )


def full_cache_bytes(plan: Plan, options: PlanOptions) -> int:
    """What the KV pools would take if no layer had a window."""
    kinds = [replace(kind, window=0) for kind in plan.kinds]
    return kv_bytes(replace(plan, kinds=tuple(kinds)), replace(options, kv_bytes=None))


def kv_bytes(plan: Plan, options: PlanOptions) -> int:
    """What the KV pools take."""
    return sum(
        count * _aligned(kind.block_bytes)
        for kind, count in zip(plan.kinds, kv_pool_sizes(plan, options), strict=True)
    )


def memory_plan(plan: Plan, options: PlanOptions) -> MemoryPlan:
    """Every byte that an engine of this plan allocates, alignment included."""
    return MemoryPlan(
        weights=sum(_aligned(size) for size in plan.weight_bytes.values()),
        kv=kv_bytes(plan, options),
        activations=plan.arena.total,
        state=sum(_aligned(size) for _, size in state_items(plan, options)),
        readback=sum(_aligned(size) for _, size in readback_items(plan)),
    )


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


def state_items(plan: Plan, options: PlanOptions) -> list[tuple[str, int]]:
    """What the host writes between submissions: name and bytes."""
    items = [
        ("tables", options.slots * len(plan.kinds) * plan.table_blocks * 8),
        ("eos", max(1, options.eos_count) * 4),
        ("counts", options.slots * plan.vocabulary * 4),
        ("counters", counter_bytes(max(rows for _, rows in plan.buckets), plan.heads)),
    ]
    for kind, rows, _ in _kind_sizes(plan):
        items += [
            (f"{kind}.rows", rows * ROW_BYTES),
            (f"{kind}.call", 16),
            (f"{kind}.selection", rows * 4),
            (f"{kind}.next_ids", rows * 4),
            (f"{kind}.embedded", rows * plan.width * 4),
            (f"{kind}.sampling", _sampled(plan, kind) * SAMPLING_BYTES),
            (f"{kind}.biases", _sampled(plan, kind) * MOST_BIASES * 8),
            (f"{kind}.masks", _sampled(plan, kind) * mask_bytes(plan.vocabulary)),
        ]
    return items


def readback_items(plan: Plan) -> list[tuple[str, int]]:
    """What the host reads: name and bytes."""
    items = []
    most = 0
    for kind, rows, selected in _kind_sizes(plan):
        items += [
            (f"{kind}.records", rows * RING * RECORD_BYTES),
            (f"{kind}.given_logprob", rows * 4),
            (f"{kind}.top", _sampled(plan, kind) * RING * MOST_TOP * 8),
        ]
        most = max(most, selected)
    items.append(("logits", most * plan.vocabulary * 4))
    return items


def _sampled(plan: Plan, kind: str) -> int:
    """Most rows of a kind's `sample` tail."""
    return max(b.selected["sample"] for (of, _), b in plan.buckets.items() if of == kind)


def _kind_sizes(plan: Plan) -> list[tuple[str, int, int]]:
    """(kind, most rows, most selected rows of the logits tail)."""
    sizes: dict[str, tuple[int, int]] = {}
    for (kind, rows), bucket in plan.buckets.items():
        a, b = sizes.get(kind, (0, 0))
        sizes[kind] = (max(a, rows), max(b, bucket.selected["logits"]))
    return [(kind, rows, selected) for kind, (rows, selected) in sizes.items()]


def fit_context(
    graph: Graph, device: Device, options: PlanOptions, *, requested: bool
) -> PlanOptions:
    """The options with a context that fits the device's free memory.

    A context that the caller asked for is never shortened.

    Raises:
        DeviceMemoryError: not even 64 positions fit.
    """
    if requested:
        return options
    available = int(device.heap_budget()[0] * MEMORY_MARGIN)
    context = options.context
    while True:
        trial = replace(options, context=context)
        needed = memory_plan(build_plan(graph, device.caps, trial), trial).total
        if needed <= available:
            return trial
        if context <= BLOCK_POSITIONS:
            raise DeviceMemoryError(
                f"the model needs {size_text(needed)} at a context of {context}; "
                f"{device.info.name} has {size_text(available)} left. Compile it with smaller "
                "weights (--weights int8 or int4)",
                needed=needed,
                available=available,
            )
        context = max(BLOCK_POSITIONS, context // 2 // BLOCK_POSITIONS * BLOCK_POSITIONS)


def check_memory(device: Device, memory: MemoryPlan, options: PlanOptions) -> None:
    """Raise DeviceMemoryError when a plan does not fit what the device has left."""
    available, _ = device.heap_budget()
    if memory.total > available:
        ways = []
        if options.context > BLOCK_POSITIONS:
            ways.append(f"load with a context below {options.context} (--context)")
        if not options.kv_half:
            ways.append("keep the KV cache in fp16 (--kv fp16, or kv='fp16')")
        if options.slots > 1:
            ways.append(f"load with fewer than {options.slots} slots")
        ways.append("compile with smaller weights (--weights int8 or int4)")
        raise DeviceMemoryError(
            f"the plan needs {size_text(memory.total)} (weights {size_text(memory.weights)}, KV "
            f"{size_text(memory.kv)}, activations {size_text(memory.activations)}); "
            f"{device.info.name} has {size_text(available)} left. What helps: {', or '.join(ways)}",
            needed=memory.total,
            available=available,
        )
