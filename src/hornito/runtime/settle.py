"""Settling a plan on a device: kernels that can be made and are proved, variants that are fastest.

An engine's first plan is made from what is on record for the device. Here it gets its pipelines,
and its kernels their self-test; whenever one falls out, the plan is made again without it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hornito.errors import SessionError
from hornito.graph.graph import Graph
from hornito.ops.variants import Choices
from hornito.plan.plan import Plan, PlanOptions, build_plan
from hornito.plan.records import DeviceRecords
from hornito.plan.selftest import (
    BUDGET_SECONDS,
    UNPROVEN,
    SelfTest,
    Trust,
    exempt,
    with_dropped,
)
from hornito.plan.stand import Stand
from hornito.plan.tune import measure, recorded_winners
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


def first_options(
    graph: Graph, device: Device, options: PlanOptions, policy: KernelPolicy
) -> PlanOptions:
    """The options with what is on record for the device: dropped kernels, winners."""
    records = DeviceRecords.load(device.info)
    if not records.verdicts and not records.winners:
        return options
    plan = build_plan(graph, device.caps, options)
    dropped: Mapping[str, str] = {}
    if not policy.thorough:
        dropped = records.dropped(_kernels(plan))
    winners = {} if policy.tune == "off" else recorded_winners(plan, records)
    if not dropped and not winners:
        return options
    choices = with_dropped(options.choices, dropped)
    return replace(options, choices=replace(choices, winners={**choices.winners, **winners}))


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
        return Trust(exempt=True, dropped=dict(engine.options.choices.dropped))
    return _prove(engine, progress, policy, records)


def prove(engine: Engine, progress: Progress, budget_s: float | None) -> Trust:
    """Test what no time was left for at load; what passes is used from then on.

    Args:
        budget_s: seconds for it; None for as long as it takes.

    Raises:
        SessionError: sessions or snapshots are open, whose plan must not change.
        DeviceLostError: a kernel took the device with it.
    """
    with engine.lock:
        if engine.closed:
            raise SessionError("this model is closed; load it again")
        if engine.trust.exempt or not engine.trust.unproven:
            return engine.trust
        if engine.sessions or engine.snapshots:
            raise SessionError("kernels can be proved while no session and no snapshot is open")
        choices = engine.options.choices
        left = {kernel: why for kernel, why in choices.dropped.items() if why != UNPROVEN}
        _replan(engine, replace(choices, dropped=left), progress)
        records = DeviceRecords.load(engine.device.info)
        engine.trust = _prove(engine, progress, KernelPolicy(budget_s=budget_s), records)
        return engine.trust


def _prove(
    engine: Engine, progress: Progress, policy: KernelPolicy, records: DeviceRecords
) -> Trust:
    options = engine.options
    stand = _stand(engine)
    test = SelfTest(
        stand,
        records,
        lambda: build_plan(
            engine.graph,
            engine.device.caps,
            replace(options, choices=Choices(plain=True)),
        ),
        policy.budget_s,
    )
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
            trust = test.run(engine.plan, again=policy.thorough and not drawn, tell=tell)
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
    while failed := engine.pipelines.build(engine.plan, progress):
        chosen = {site.taken.kernel for b in engine.plan.buckets.values() for site in b.sites}
        plain = {
            site.taken.kernel
            for bucket in engine.plan.buckets.values()
            for site in bucket.sites
            if site.taken.plain
        }
        for kernel, error in failed.items():
            if kernel not in chosen or kernel in plain:
                raise error
            logger.warning("%s; another variant takes its place", error)
        dropped = {kernel: f"failed: {error}" for kernel, error in failed.items()}
        choices = with_dropped(engine.options.choices, dropped)
        engine.replan(replace(engine.options, choices=choices))


def _kernels(plan: Plan) -> set[str]:
    """Every kernel that some site of the plan could take."""
    return {
        variant.kernel
        for bucket in plan.buckets.values()
        for site in bucket.sites
        for variant in site.admitted
    }
