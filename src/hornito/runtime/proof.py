"""Proving what a load had no time for: at once (`prove`), or slice by slice while nothing runs.

The engine goes on with the plan that it has. Kernels are tested in the plan that it would have if
all were proved; whenever one passes, the engine takes a plan that uses it. Its KV blocks, sessions
and snapshots stay, for their layout is no kernel's affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from hornito.errors import SessionError
from hornito.plan.plan import Plan, PlanOptions, build_plan
from hornito.plan.records import DeviceRecords
from hornito.plan.selftest import UNPROVEN, SelfTest, Trust, with_dropped, without_waiting
from hornito.plan.stand import Stand
from hornito.plan.units import Unit, units
from hornito.progress import NullProgress
from hornito.runtime.settle import failing, plain_plan

if TYPE_CHECKING:
    from hornito.runtime.engine import Engine


class Turn(Protocol):
    """Who has the device: the proof, between `take` and `give`, or others."""

    def take(self) -> None:
        """Wait until the proof may use the device; to be called again before each use."""

    def give(self) -> None:
        """Leave the device to others for as long as they like."""


class _Alone:
    """Nobody else wants the device."""

    def take(self) -> None:
        """It is free."""

    def give(self) -> None:
        """Nobody takes it."""


def prove(engine: Engine, budget_s: float | None) -> Trust:
    """Test what no time was left for at load; what passes is used from then on.

    Args:
        budget_s: seconds for it; None for as long as it takes.

    Raises:
        SessionError: sessions or snapshots are open, whose numbers would change in their last bits.
        DeviceLostError: a kernel took the device with it.
    """
    with engine.lock:
        if engine.closed:
            raise SessionError("this model is closed; load it again")
        if engine.trust.complete:
            return engine.trust
        if engine.sessions or engine.snapshots:
            raise SessionError("kernels can be proved while no session and no snapshot is open")
        Proof(engine, _Alone(), budget_s).run(each=False)
        return engine.trust


class Proof:
    """Tests the kernels of an engine that have no verdict yet.

    Args:
        turn: asked before each use of the device.
        budget_s: seconds that tests may take; None for as long as they need.
    """

    def __init__(self, engine: Engine, turn: Turn, budget_s: float | None = None) -> None:
        self._engine = engine
        self._turn = turn
        self._stand = Stand(
            engine.device,
            engine.plan,
            engine.pipelines,
            engine.weight_address,
            engine.options.slots,
            turn.take,
        )
        records = DeviceRecords.load(engine.device.info)
        self._test = SelfTest(self._stand, records, self._plain, budget_s)
        self._kept = 0  # tests whose verdicts are on disk

    def run(self, *, each: bool) -> None:
        """Test everything, until all is known or time is up.

        Args:
            each: all shapes of one kernel after another, and use each when it is known; else one
                shape of every kernel first, and use them all at the end.

        Raises:
            DeviceLostError: a kernel took the device with it; it has its verdict.
            DeviceMemoryError: there is no room for the plan that uses it all; the engine goes on
                with the one that it has.
            VulkanError: a pipeline that has no alternative can't be made.
        """
        try:
            while self._run_plan(each=each):
                pass
        finally:
            self._stand.free()
            self._turn.give()

    def _run_plan(self, *, each: bool) -> bool:
        """Test the plan that would be taken if all were proved; whether there is another one."""
        _, plan, found = self._planned(self._engine.options, {})
        self._stand.plan = plan
        left = set(self._test.run(found, only=()).unproven)
        kernels = dict.fromkeys(unit.kernel for unit in found if unit.title in left)
        for only in [{kernel} for kernel in kernels] if each and kernels else [set(kernels)]:
            self._turn.take()
            trust = self._test.run(found, only=only, tell=self._keep)
            self._adopt(trust)
            if any(why != UNPROVEN for why in trust.dropped.values()):
                return True  # others take the place of what fell
        return False

    def _keep(self, done: int, total: int) -> None:
        """Save each verdict when it is there: the process may be killed at any time."""
        if self._test.tested > self._kept:
            self._kept = self._test.tested
            self._test.save()

    def _adopt(self, trust: Trust) -> None:
        """Have the engine take the plan that uses all that is proved, and nothing else."""
        engine = self._engine
        while True:
            base = engine.options
            dropped, unproven = dict(trust.dropped), dict.fromkeys(trust.unproven)
            while True:
                options, plan, found = self._planned(base, dropped)
                looked = self._test.run(found, only=())
                unproven |= dict.fromkeys(looked.unproven)
                failed = engine.pipelines.build(plan, NullProgress(), self._turn.take)
                new = {**looked.dropped, **failing(plan, failed)}
                if not new:
                    break
                dropped |= new
            self._turn.take()
            if engine.options is base:
                break  # else someone took another plan meanwhile
        if options != base:
            engine.wait(engine.last_ticket)
            engine.claim_batch()
            self._stand.free()  # the new plan may need the memory
            engine.take_plan(options, plan)
        verdicts = {**engine.trust.verdicts, **trust.verdicts}
        engine.trust = Trust(verdicts, tuple(unproven), False, dict(options.choices.dropped))

    def _planned(
        self, base: PlanOptions, dropped: Mapping[str, str]
    ) -> tuple[PlanOptions, Plan, Sequence[Unit]]:
        """The plan without what is known to be bad and without `dropped`, and its units.

        The device is free meanwhile.
        """
        self._turn.give()
        options = replace(base, choices=with_dropped(without_waiting(base.choices), dropped))
        plan = build_plan(self._engine.graph, self._engine.device.caps, options)
        found = units(plan)
        self._turn.take()
        return options, plan, found

    def _plain(self) -> Plan:
        self._turn.give()
        plan = plain_plan(self._engine)
        self._turn.take()
        return plan
