"""What a loaded model says about its plan: context, memory, dispatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hornito.ops.rope import original_max
from hornito.plan.records import DeviceRecords
from hornito.runtime.memory import full_cache_bytes

if TYPE_CHECKING:
    from hornito.api import LLM


def context_warning(context: int, facts: Mapping[str, Any]) -> str:
    """That a context is above the model's own, by its package's facts; '' when it is not."""
    most = facts.get("context_length")
    if not isinstance(most, int) or context <= most:
        return ""
    return (
        f"a context of {context} is more than the {most} positions that this model was made for: "
        f"what stands behind position {most} may make no sense to it"
    )


def _tuned(llm: LLM) -> str:
    """Whether variants were measured on this device, and how many displaced the default."""
    winners = len(llm.engine.options.choices.winners)
    if winners:
        return f"{winners} shapes with a variant that was measured faster than the default"
    if DeviceRecords.load(llm.engine.device.info).winners:
        return "defaults, none of which a measured variant beats by 3 %"
    return "defaults, never measured on this device (hornito tune MODEL, or --tune fast)"


def plan_summary(llm: LLM) -> str:
    """Where the work and the memory go, in a few lines."""
    engine, memory = llm.engine, llm.engine.memory
    kv = "fp16" if engine.options.kv_half else "fp32"
    step = engine.plan.buckets["batch", 1]
    count = len(step.body.dispatches) + len(step.tails["argmax"].dispatches)
    slots = engine.options.slots
    lines = [
        f"context: {llm.context} positions, precision {llm.precision}, KV in {kv}, "
        f"{slots} slot{'' if slots == 1 else 's'}",
        f"memory: {memory.total / 1e6:.1f} MB (weights {memory.weights / 1e6:.1f}, "
        f"KV {memory.kv / 1e6:.1f}, activations {memory.activations / 1e6:.1f}, state and results "
        f"{(memory.state + memory.readback) / 1e6:.1f})",
        f"dispatches: {engine.plan.dispatches_per_layer():g} a layer, {count} a token, "
        f"{engine.pipeline_count} pipelines; every tensor operation on the device",
        f"kernels: {engine.trust.line}; {_tuned(llm)}",
    ]
    if llm.context_warning:
        lines.insert(1, f"warning: {llm.context_warning}")
    windows = sorted({kind.window for kind in engine.plan.kinds if kind.window})
    if windows:
        full = full_cache_bytes(engine.plan, engine.options)
        lines.append(
            f"windows: of {', '.join(map(str, windows))} positions, KV {memory.kv:,} bytes; a "
            f"full cache would take {full:,}"
        )
    longest = original_max(engine.graph)
    if longest is not None:
        factors = "long" if llm.context > longest else "short"
        lines.append(
            f"rope: {factors} factors, for every length (short for a context of up to {longest} "
            "positions)"
        )
    return "\n".join(lines)
