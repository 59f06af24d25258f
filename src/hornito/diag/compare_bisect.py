"""Who is guilty of a divergence: graph passes, kernels and roundings are switched off until it is
gone.

Each is switched off alone first; where none of them helps alone, all are, and then as many as
possible are switched on again. What is left is the smallest set found that makes the run equal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hornito.diag.compare import differences, first_divergence, trial
from hornito.diag.compare_bench import Workbench
from hornito.diag.compare_decoder import DeviceSide, Run, Side
from hornito.diag.compare_values import Difference
from hornito.diag.compare_weights import WEIGHTS

KERNEL = "kernel"
PASS = "pass"
ROUNDING = "rounding:"
REASON = "switched off to find a fault"


@dataclass(frozen=True, slots=True)
class Switch:
    """A pass, a kernel that has a twin, or a rounding to fp16; `used` says whether the run took the
    kernel."""

    kind: str
    name: str
    used: bool = True

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Bisection:
    """What was tried on one run, and what came of it.

    Attributes:
        run: the schedule of the first divergence.
        tried: everything that was switched off.
        alone: what makes the run equal when it alone is off.
        culprits: the guilty: kernels rather than passes, which lead to them, and passes rather than
            roundings; where nothing helps alone, the smallest set found; empty when nothing helps.
        verdict: the same in words.
    """

    run: str
    tried: tuple[Switch, ...]
    alone: tuple[Switch, ...]
    culprits: tuple[Switch, ...]
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {
            "run": self.run,
            "tried": [str(switch) for switch in self.tried],
            "equal_without": [str(switch) for switch in self.alone],
            "culprits": [str(switch) for switch in self.culprits],
            "verdict": self.verdict,
        }


def bisect(bench: Workbench, first: Difference) -> Bisection:
    """Find what makes the run of a divergence differ."""
    if first.run == WEIGHTS:
        verdict = f"the stored weights, beginning with {first.value}: nothing makes up for them"
        return Bisection(WEIGHTS, (), (), (), verdict)
    switches = _switches(bench, first.run)
    useful = [switch for switch in switches if switch.used]
    bench.progress.start("switching off", len(useful) + 1)
    try:
        return _bisect(bench, first, switches, useful)
    finally:
        bench.progress.finish()


def _bisect(
    bench: Workbench, first: Difference, switches: list[Switch], useful: list[Switch]
) -> Bisection:
    alone = []
    for switch in useful:
        if _equal(bench, first.run, [switch]):
            alone.append(switch)
        bench.progress.advance(1)
    # A wrong kernel is also gone when the pass is off that makes the op it runs, or the type is
    # another that it reads.
    kinds = [[s for s in alone if s.kind == kind] for kind in (KERNEL, PASS, ROUNDING)]
    guilty = next((found for found in kinds if found), [])
    if guilty:
        verdict = f"{' or '.join(map(str, guilty))}: without it {first.run} equals the reference"
        return _result(first, useful, alone, guilty, verdict)
    if len(switches) > 1 and _equal(bench, first.run, switches):
        needed = _smallest(bench, first.run, switches)
        verdict = f"{' and '.join(map(str, needed))} together: {first.run} differs with any of them"
        return _result(first, switches, alone, needed, verdict)
    verdict = (
        "no pass and no kernel with a twin: what is left is what all of them share (the importer, "
        "the weights, the plain kernels, the reference)"
    )
    return _result(first, switches, alone, [], verdict)


def _result(
    first: Difference,
    tried: Sequence[Switch],
    alone: Sequence[Switch],
    culprits: Sequence[Switch],
    verdict: str,
) -> Bisection:
    return Bisection(first.run, tuple(tried), tuple(alone), tuple(culprits), verdict)


def _smallest(bench: Workbench, run: str, switches: Collection[Switch]) -> list[Switch]:
    """A set from which none can be taken away."""
    needed = list(switches)
    for switch in switches:
        fewer = [other for other in needed if other != switch]
        if _equal(bench, run, fewer):
            needed = fewer
    return needed


def _switches(bench: Workbench, run: str) -> list[Switch]:
    """Passes that have matched something, and kernels with a twin that the run could take."""
    found = []
    if bench.has_source:
        counts = bench.package.manifest.support.get("passes") or {}
        found = [Switch(PASS, name) for name, count in counts.items() if count]
    with bench.side() as side:
        if isinstance(side, DeviceSide):
            taken, offered = side.kernels_with_twins(_run(bench, side, run))
            found += [Switch(KERNEL, name, name in taken) for name in offered]
            found += [Switch(ROUNDING, name) for name in bench.roundings]
    return found


def _run(bench: Workbench, side: Side, label: str) -> Run:
    return next(run for run in bench.runs(side) if run.label == label)


def _equal(bench: Workbench, label: str, off: Collection[Switch]) -> bool:
    """Whether a run equals the reference with these switched off."""
    passes = [switch.name for switch in off if switch.kind == PASS]
    kernels = {switch.name: REASON for switch in off if switch.kind == KERNEL}
    exact = [switch.name for switch in off if switch.kind == ROUNDING]
    disabled = (*bench.settings.disabled_passes, *passes)
    with bench.side(disabled, kernels, exact) as side:
        trace, reference = trial(bench, side, _run(bench, side, label))
        found = differences(side, trace, reference, bench.tolerance)
    return first_divergence([found]) is None
