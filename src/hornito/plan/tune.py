"""Tuning: which variant of a kernel is the fastest at the plan's shapes, by measurement.

Variants are timed on the device with the model's own weights, with a barrier between repetitions,
each behind work of its own that raises the device's clock. One displaces the default only where its
median is 3 % better. Winners are kept on disk for the device, its driver and the SPIR-V of all
variants that took part (`hornito.plan.records`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from hornito.errors import DeviceLostError, DeviceMemoryError, UnsupportedError, VulkanError
from hornito.graph.graph import Graph
from hornito.ops.base import Dispatch
from hornito.ops.variants import Site
from hornito.plan.plan import BucketPlan, Plan, PlanOptions, Program, build_plan
from hornito.plan.records import DeviceRecords, Winner, winner_key
from hornito.plan.stand import Stand
from hornito.plan.units import Unit
from hornito.progress import Progress

MARGIN = 0.03
"""Part by which a variant must be faster than the default to take its place."""

REPEATS = 9
"""Timed runs of a variant, of which the median counts."""

BATCH_NODES, CHUNK_NODES = 24, 4
"""Nodes of the same shapes that one run launches, one after another: each has weights of its own,
which come from memory then, as in a real step, and not from a cache."""


def recorded_winners(plan: Plan, records: DeviceRecords) -> dict[str, str]:
    """By site, the variants on record that are not the plan's own choice."""
    return {
        site.key: winner.variant
        for site, winner in on_record(plan, records)
        if winner.variant != site.taken.name
    }


def on_record(plan: Plan, records: DeviceRecords) -> list[tuple[Site, Winner]]:
    """The sites of a plan of defaults that were measured, and what won."""
    found = [(site, records.winners.get(_key(site))) for site in _sites(plan)]
    return [(site, winner) for site, winner in found if winner is not None]


def measure(
    stand: Stand,
    graph: Graph,
    options: PlanOptions,
    records: DeviceRecords,
    progress: Progress,
    again: bool,
) -> dict[str, str]:
    """Time the variants of every site that has more than one; returns the winners by site.

    Args:
        again: measure every site, even those on record; else single steps and the largest chunk.

    Raises:
        UnsupportedError: the device has no timestamps.
        DeviceLostError: the device was lost.
    """
    device = stand.device
    if not device.caps.timestamp_bits:
        raise UnsupportedError(f"{device.info.name} has no timestamps: nothing can be tuned on it")
    usual = replace(options, choices=replace(options.choices, winners={}))
    plan = build_plan(graph, device.caps, usual)
    units = _units(plan, everything=again)
    if not again:
        units = {k: unit for k, unit in units.items() if _key(unit.site) not in records.winners}
    most = max((len(unit.site.admitted) for unit in units.values()), default=0)
    plans = []
    for index in range(most):
        winners = {
            key: unit.site.admitted[index % len(unit.site.admitted)].name
            for key, unit in units.items()
        }
        choices = replace(usual.choices, winners=winners)
        plans.append(build_plan(graph, device.caps, replace(usual, choices=choices)))
    progress.start("measuring kernels", len(units))
    try:
        for key, unit in units.items():
            records.winners[_key(unit.site)] = _race(stand, unit, key, plans)
            progress.advance(1)
    finally:
        progress.finish()
        records.save()
    return recorded_winners(plan, records)


def _race(stand: Stand, unit: Unit, key: str, plans: list[Plan]) -> Winner:
    """The fastest variant of a unit's site."""
    times: dict[str, float] = {}
    for index, variant in enumerate(unit.site.admitted):
        dispatches, nodes = _dispatches(plans[index], unit)
        layout = stand.layout(unit, dispatches)
        stand.plan = plans[index]
        try:
            measured = stand.nanoseconds(unit, layout, dispatches, REPEATS)
        except DeviceLostError:
            raise
        except (VulkanError, DeviceMemoryError):  # no pipeline or no room: it takes no part
            continue
        times[variant.name] = statistics.median(measured) / nodes
    usual = times.get(unit.site.taken.name, float("inf"))
    best = min(times, key=lambda name: times[name], default=unit.site.taken.name)
    if not times or times[best] > usual * (1 - MARGIN):
        best = unit.site.taken.name
    return Winner(best, times.get(best, 0.0), usual if times else 0.0)


def _key(site: Site) -> str:
    return winner_key(site.key, (variant.kernel for variant in site.admitted))


def _sites(plan: Plan) -> list[Site]:
    """One site of each key."""
    found: dict[str, Site] = {}
    for bucket in plan.buckets.values():
        for site in bucket.sites:
            found.setdefault(site.key, site)
    return list(found.values())


def _units(plan: Plan, *, everything: bool) -> Mapping[str, Unit]:
    """By site, the first node that has it, where there is a choice."""
    largest = max((rows for kind, rows in plan.buckets if kind == "chunk"), default=0)
    found: dict[str, Unit] = {}
    for (kind, rows), bucket in plan.buckets.items():
        if not everything and (kind, rows) not in (("batch", 1), ("chunk", largest)):
            continue
        for site in bucket.sites:
            if len(site.admitted) > 1 and site.key not in found:
                unit = _unit(bucket, site)
                if unit is not None:
                    found[site.key] = unit
    return found


def _unit(bucket: BucketPlan, site: Site) -> Unit | None:
    parts: dict[str, Program] = {"body": bucket.body, **bucket.tails}
    for part, program in parts.items():
        own = tuple(d for d in program.dispatches if d.node == site.node)
        if any(d.kernel == site.taken.kernel for d in own):
            return Unit(
                *(bucket.kind, bucket.rows, part, bucket.selected.get(part, 1), site.node, site),
                own,
            )
    return None


def _dispatches(plan: Plan, unit: Unit) -> tuple[tuple[Dispatch, ...], int]:
    """The launches of several nodes like the unit's, its own first, and how many nodes they are."""
    bucket = plan.buckets[unit.kind, unit.rows]
    program = bucket.body if unit.part == "body" else bucket.tails[unit.part]
    most = BATCH_NODES if unit.kind == "batch" else CHUNK_NODES
    alike = [unit.node, *(site.node for site in bucket.sites if site.key == unit.site.key)]
    nodes = list(dict.fromkeys(alike))[:most]
    found = {node: [d for d in program.dispatches if d.node == node] for node in nodes}
    launched = [node for node in nodes if found[node]]
    return tuple(d for node in launched for d in found[node]), len(launched)
