"""Settling a plan on a device: kernels that can be made and are proved, variants that are fastest.

An engine's first plan is made from what is on record for the device. Here it gets its pipelines,
and its kernels their self-test; whenever one falls out, the plan is made again without it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hornito.errors import VulkanError
from hornito.graph.graph import Graph
from hornito.ops.variants import Choices, Variant
from hornito.plan.plan import Plan, PlanOptions, build_plan
from hornito.plan.records import STRIKES, DeviceRecords, pipeline_mark
from hornito.plan.selftest import (
    BUDGET_SECONDS,
    SelfTest,
    Trust,
    exempt,
    with_dropped,
)
from hornito.plan.stand import Stand
from hornito.plan.tune import measure, recorded_winners
from hornito.plan.units import units
from hornito.progress import Progress

if TYPE_CHECKING:
    from hornito.runtime.engine import Engine
    from hornito.vk.device import Device

logger = logging.getLogger("hornito")


@dataclass(frozen=True, slots=True)
class KernelPolicy:
    """How kernels are chosen and proved at load.

    Attributes:
        tune: None takes the winners that `hornito tune` put on record; `off` the defaults; `fast`
            measures what is not on record for single steps and the largest chunk; `full` measures
            everything anew.
        budget_s: seconds for self-tests; None for as long as they need.
        thorough: test on devices that are exempt too, and what has a verdict already.
    """

    tune: str | None = None
    budget_s: float | None = BUDGET_SECONDS
    thorough: bool = False


def first_plan(
    graph: Graph, device: Device, options: PlanOptions, policy: KernelPolicy
) -> tuple[PlanOptions, Plan]:
    """The plan, and its options with what is on record: dropped kernels, winners."""
    plan = build_plan(graph, device.caps, options)
    records = DeviceRecords.load(device.info)
    variants = _variants(plan)
    kernels = [variant.kernel for variant in variants if not variant.plain]
    dropped = records.fatal(kernels, STRIKES + policy.thorough)  # that is how one comes back
    if not policy.thorough:
        dropped |= records.dropped({variant.kernel for variant in variants})
    if dropped:
        options = replace(options, choices=with_dropped(options.choices, dropped))
        plan = build_plan(graph, device.caps, options)
    # Winners are of the variants that took part, without those that were dropped.
    if policy.tune != "off" and (winners := recorded_winners(plan, records)):
        choices = replace(options.choices, winners={**options.choices.winners, **winners})
        options = replace(options, choices=choices)
        plan = build_plan(graph, device.caps, options)
    return options, plan


def settle(engine: Engine, progress: Progress, policy: KernelPolicy) -> Trust:
    """Build the engine's pipelines, prove and measure its kernels, and plan again where needed.

    Raises:
        VulkanError: a pipeline that has no alternative can't be made.
        DeviceLostError: a kernel took the device with it.
    """
    records = DeviceRecords.load(engine.device.info)
    _make_pipelines(engine, progress)
    if policy.tune in ("fast", "full"):
        with_stand = _stand(engine)
        try:
            winners = measure(
                with_stand, engine.graph, engine.options, records, progress, policy.tune == "full"
            )
        finally:
            with_stand.free()
        choices = replace(engine.options.choices, winners=winners)
        if choices != engine.options.choices:
            _replan(engine, choices, progress)
    if exempt(engine.device.caps) and not policy.thorough:
        trust = Trust(exempt=True, dropped=dict(engine.options.choices.dropped))
    else:
        trust = _prove(engine, progress, policy, records)
    if records.forgive(map(pipeline_mark, engine.plan.distinct())):
        records.save()
    return trust


def _prove(
    engine: Engine, progress: Progress, policy: KernelPolicy, records: DeviceRecords
) -> Trust:
    stand = _stand(engine)
    test = SelfTest(stand, records, lambda: plain_plan(engine), policy.budget_s)
    drawn = False
    unproven: dict[str, None] = {}  # of all plans: those of a dropped kernel are in no later one

    def tell(done: int, total: int) -> None:
        nonlocal drawn
        if test.tested and not drawn:
            progress.start("testing kernels", total)
            progress.advance(done - 1)
            drawn = True
        if drawn:
            progress.advance(1)

    try:
        while True:
            again = policy.thorough and not drawn
            trust = test.run(units(engine.plan), again=again, tell=tell)
            unproven |= dict.fromkeys(trust.unproven)
            new = set(trust.dropped) - set(engine.options.choices.dropped)
            if not new:
                break
            _replan(engine, with_dropped(engine.options.choices, trust.dropped), progress)
            stand.plan = engine.plan
    finally:
        stand.free()
        test.save()
        if drawn:
            progress.finish()
    return replace(trust, unproven=tuple(unproven), dropped=dict(engine.options.choices.dropped))


def _stand(engine: Engine) -> Stand:
    return Stand(
        engine.device,
        engine.plan,
        engine.pipelines,
        engine.weight_address,
        engine.options.slots,
    )


def _replan(engine: Engine, choices: Choices, progress: Progress) -> None:
    engine.replan(replace(engine.options, choices=choices))
    _make_pipelines(engine, progress)


def _make_pipelines(engine: Engine, progress: Progress) -> None:
    """Build every pipeline; kernels that can't be made are dropped while there are others."""
    while dropped := failing(engine.plan, engine.pipelines.build(engine.plan, progress)):
        choices = with_dropped(engine.options.choices, dropped)
        engine.replan(replace(engine.options, choices=choices))


def failing(plan: Plan, failed: Mapping[str, VulkanError]) -> dict[str, str]:
    """Kernels of a plan that can't be made, and why.

    Raises:
        VulkanError: one of them has no other that could take its place.
    """
    taken = [site.taken for bucket in plan.buckets.values() for site in bucket.sites]
    chosen = {variant.kernel for variant in taken}
    plain = {variant.kernel for variant in taken if variant.plain}
    for kernel, error in failed.items():
        if kernel not in chosen or kernel in plain:
            raise error
        logger.warning("%s; another variant takes its place", error)
    return {kernel: f"failed: {error}" for kernel, error in failed.items()}


def plain_plan(engine: Engine) -> Plan:
    """The plan of plain twins that kernels are compared with."""
    options = replace(engine.options, choices=Choices(plain=True))
    return build_plan(engine.graph, engine.device.caps, options)


def _variants(plan: Plan) -> list[Variant]:
    """Every variant that some site of the plan could take."""
    return [v for bucket in plan.buckets.values() for site in bucket.sites for v in site.admitted]
