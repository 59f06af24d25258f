"""The self-test: no kernel is used on a device before it has given the right answer there.

Every kernel that a plan uses and that is no plain twin runs at the plan's own shapes, with the
model's own weights, on random and on edge data, and is compared with its plain twin on the same
device. One that gives other numbers, or other bits from run to run, is dropped for this device and
driver. Verdicts are kept on disk (`hornito.plan.records`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hornito.errors import DeviceLostError, DeviceMemoryError, VulkanError
from hornito.ops.base import Dispatch
from hornito.ops.variants import Choices
from hornito.plan.plan import Plan
from hornito.plan.records import (
    FAILED,
    GOOD,
    STRIKES,
    UNSTABLE,
    WRONG,
    DeviceRecords,
    Verdict,
    pipeline_mark,
    verdict_key,
)
from hornito.plan.stand import DATA, Stand
from hornito.plan.units import Unit, twin_dispatches

if TYPE_CHECKING:
    from hornito.vk.caps import Caps

logger = logging.getLogger("hornito")

RUNS = 20
"""Runs on the first kind of data, whose bits must all be the same; the others have EDGE_RUNS."""

EDGE_RUNS = 2

TOLERANCE, ROUGH_TOLERANCE = 1e-3, 2e-2
"""Largest difference from the twin (see `difference`): where both sum in fp32, and where operands
are rounded to fp16 first."""

BUDGET_SECONDS = 3.0
"""Time that a load spends on tests."""

UNPROVEN = "unproven: no time for its test yet"
"""Why a kernel is not used that was tested at no shape; an idle moment or the next load goes on."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What is known of the kernels of a plan.

    Attributes:
        verdicts: of every unit that was tested, now or before, by its title.
        unproven: titles of units that no test was made of, because time was up.
        exempt: whether this class of device takes its kernels without a test.
        dropped: kernels that are not used, and why.
    """

    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    unproven: tuple[str, ...] = ()
    exempt: bool = False
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Kernels that are not used until there is time for their test."""
        return tuple(kernel for kernel, why in self.dropped.items() if why == UNPROVEN)

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to test."""
        return self.exempt or not (self.unproven or self.waiting)

    @property
    def line(self) -> str:
        """For people: how many kernels were proved, which were dropped."""
        if self.exempt:
            text = "the variants of a software device count as plain twins"
        else:
            good = len({v.kernel for v in self.verdicts.values() if v.verdict == GOOD})
            text = f"{good} proved on this device"
        if self.waiting:
            text += f", {len(self.waiting)} unproven"
        if self.unproven:
            text += f", {len(self.unproven)} shapes unproven"
        for kernel, why in self.dropped.items():
            text += f"; {kernel} is not used ({why})"
        return text


def exempt(caps: Caps) -> bool:
    """Whether a device's variants count as plain twins at load.

    A software device compiles every twin anew with a general-purpose compiler, which takes longer
    than the answers are worth: its variants are what this project's own tests run on. `hornito
    doctor --full` tests them all the same.
    """
    return caps.device_kind == "software"


class SelfTest:
    """Tests the units of one plan after another on one device.

    Args:
        stand: where they run.
        records: the device's verdicts; new ones are added, and saved by `save`.
        plain: makes the plan of plain twins, when it is first needed.
        budget_s: seconds that all tests together may take; None for as long as they need.
    """

    def __init__(
        self,
        stand: Stand,
        records: DeviceRecords,
        plain: Callable[[], Plan],
        budget_s: float | None = BUDGET_SECONDS,
    ) -> None:
        self.stand = stand
        self.records = records
        self._make_plain = plain
        self._plain: Plan | None = None
        self._budget = budget_s
        self._spent = 0.0
        self._found: dict[str, Verdict] = {}
        self.tested = 0

    def run(
        self,
        found: Sequence[Unit],
        *,
        only: Collection[str] | None = None,
        again: bool = False,
        tell: Callable[[int, int], object] | None = None,
    ) -> Trust:
        """Test what has no verdict yet, one shape of every kernel before the second of any.

        A kernel that fails at one shape is used at none. What earlier calls found is in the result.

        Args:
            found: the units of a plan.
            only: kernels to test; None for all.
            again: test what has a verdict too.
            tell: called with (done, all) after each unit.

        Raises:
            DeviceLostError: a kernel took the device with it, or another program did: a strike.
        """
        unproven: list[str] = []
        everything = _firsts_first(found)
        fallen: set[str] = set()
        for count, unit in enumerate(everything):
            if unit.kernel in fallen:
                continue
            key = verdict_key(unit.kernel, unit.shape)
            known = None if again else self.records.verdicts.get(key)
            wanted = only is None or unit.kernel in only
            if known is None and not (wanted and self._time_left()):
                unproven.append(unit.title)
                continue
            if known is None:
                try:
                    known = self._test(unit, key)
                except DeviceMemoryError as error:
                    logger.warning("%s can't be tested: %s", unit.title, error)
                    unproven.append(unit.title)
                    continue
            self._found[unit.title] = known
            if known.verdict != GOOD:
                fallen.add(unit.kernel)
            if tell is not None:
                tell(count + 1, len(everything))
        dropped = self.records.dropped({unit.kernel for unit in everything})
        proved = {v.kernel for v in self._found.values() if v.verdict == GOOD}
        waiting = {u.kernel for u in everything if u.title in unproven} - proved
        dropped |= dict.fromkeys(waiting, UNPROVEN)
        return Trust(dict(self._found), tuple(unproven), False, dropped)

    def _time_left(self) -> bool:
        return self._budget is None or self._spent < self._budget

    def _test(self, unit: Unit, key: str) -> Verdict:
        self.tested += 1
        began = time.monotonic()
        try:
            if self._plain is None:
                self._plain = self._make_plain()
            twin = twin_dispatches(self._plain, unit)
            for dispatch in (*unit.dispatches, *twin):
                self.stand.take_turn()
                self.stand.pipelines.of(dispatch)  # compiling is no testing
            began = time.monotonic()
            with self.stand.pipelines.trying(key):
                verdict = self._judge(unit, twin)
        except DeviceLostError as error:
            self.records.strike(key)
            self.records.save()
            raise DeviceLostError(
                f"{self.stand.device.info.name} was lost while {unit.kernel} was tested "
                f"({unit.title}); load again: when that happens {STRIKES} times, the kernel is "
                "not used any more",
                code=error.code,
            ) from error
        except VulkanError as error:
            verdict = Verdict(unit.kernel, unit.title, FAILED, str(error), 0, 0.0)
        finally:
            self._spent += time.monotonic() - began
        self.records.verdicts[key] = verdict
        if verdict.verdict == GOOD:
            self.records.forgive([key, *map(pipeline_mark, unit.dispatches)])
        else:
            logger.warning(
                "kernel %s is not used on %s: %s (%s)",
                *(unit.kernel, self.stand.device.info.name, verdict.verdict, verdict.detail),
            )
        return verdict

    def _judge(self, unit: Unit, twin: Sequence[Dispatch]) -> Verdict:
        """Run a unit and its twin on every kind of data."""
        layout = self.stand.layout(unit, unit.dispatches, twin)
        compared = _compared(unit, twin)
        bound = ROUGH_TOLERANCE if unit.site.taken.inexact else TOLERANCE
        runs, worst = 0, 0.0

        def verdict(kind: str, detail: str) -> Verdict:
            return Verdict(unit.kernel, unit.title, kind, detail, runs, worst)

        for data in _kinds_of_data(unit):
            self.stand.prepare(unit, layout, (twin, unit.dispatches), data)
            want = self.stand.results(layout, twin, compared, 1)[0]
            count = RUNS if data == DATA[0] else EDGE_RUNS
            got = self.stand.results(layout, unit.dispatches, compared, count)
            runs += count
            other = sum(bits != got[0] for bits in got)
            if other:
                return verdict(UNSTABLE, f"{other} of {count} runs have other bits ({data})")
            halves = [name for name in compared if self._half(name)]
            at = 0
            for name in compared:
                size = layout.places[name][1]
                error = difference(
                    got[0][at : at + size], want[at : at + size], half=name in halves
                )
                at += size
                worst = max(worst, error)
                # Two fp32 sums that differ in their last bits may be different fp16 numbers.
                if not error <= (ROUGH_TOLERANCE if name in halves else bound):
                    where = f"{name.rpartition('/')[2]}, {data}"
                    return verdict(WRONG, f"differs by {error:.2g} of the result ({where})")
        return verdict(GOOD, f"{runs} runs, difference {worst:.1e}")

    def _half(self, name: str) -> bool:
        """Whether a place holds fp16 numbers."""
        if not name.startswith("kv:"):
            return name in self.stand.plan.halves
        layer = int(name[3:])
        return any(kind.half for kind in self.stand.plan.kinds if layer in kind.layers)

    def save(self) -> None:
        """Keep the verdicts, when there are new ones."""
        if self.tested:
            self.records.save()


def with_dropped(choices: Choices, dropped: Mapping[str, str]) -> Choices:
    """The choices without these kernels either."""
    return replace(choices, dropped={**choices.dropped, **dropped})


def without_waiting(choices: Choices) -> Choices:
    """The choices with the kernels that only wait for their test."""
    known = {kernel: why for kernel, why in choices.dropped.items() if why != UNPROVEN}
    return replace(choices, dropped=known)


def difference(got: bytes, want: bytes, *, half: bool = False) -> float:
    """The largest difference of two results: of any number, in parts of its own size and the root
    mean square of the second result together.

    Words that are the same count as equal, whatever they are; infinite where one is a number and
    the other is none.
    """
    words, others = (np.frombuffer(data, np.uint32) for data in (got, want))
    if np.array_equal(words, others):
        return 0.0
    a: npt.NDArray[np.float32] = words.view(np.float32)
    b: npt.NDArray[np.float32] = others.view(np.float32)
    if half:
        a, b = (side.view(np.float16).astype(np.float32) for side in (words, others))
    finite = np.isfinite(b)
    if not finite.all():
        changed = words != others
        changed = np.repeat(changed, 2) if half else changed
        if (np.isfinite(a) != finite)[changed].any():
            return float("inf")
        a, b = a[finite], b[finite]
    elif not np.isfinite(a).all():
        return float("inf")
    if not len(b):
        return 0.0
    scale = max(float(np.sqrt(np.mean(np.square(b, dtype=np.float64)))), 1e-6)
    return float((np.abs(a - b) / (np.abs(b) + np.float32(scale))).max())


def _kinds_of_data(unit: Unit) -> list[str]:
    """All, but for attention with operands in fp16: where scores are in the hundreds, the rounding
    of an outlier in q decides between keys."""
    cached = any(o.name.startswith("kv:") for d in unit.dispatches for o in d.reads)
    rough = unit.site.taken.inexact and cached
    return [data for data in DATA if not (rough and data == "outliers")]


def _firsts_first(found: Sequence[Unit]) -> list[Unit]:
    """The smallest shape of every kernel, so that each is soon known; then all others."""
    least: dict[str, Unit] = {}
    for unit in sorted(found, key=lambda unit: unit.rows):
        least.setdefault(unit.kernel, unit)
    firsts = list(least.values())
    return firsts + [unit for unit in found if all(unit is not first for first in firsts)]


def _compared(unit: Unit, twin: Sequence[Dispatch]) -> list[str]:
    """Places that the kernel under test and its twin's both write, in the same form.

    Those are results and caches, in a tail its scratch as well. What other kernels of the node make
    of them is left out: a rounding may change an order or a choice there.
    """
    ours, theirs = _own_writes(unit.dispatches, twin), _own_writes(twin, unit.dispatches)
    body = unit.part == "body"
    # Scratch of a body is a kernel's own affair.
    return sorted(
        name
        for name, size in ours.items()
        if theirs.get(name) == size and (not body or name.startswith("kv:") or ":" not in name)
    )


def _own_writes(dispatches: Sequence[Dispatch], others: Sequence[Dispatch]) -> dict[str, int]:
    """What kernels that are not among the others write: names and bytes."""
    shared = {d.kernel for d in others}
    written = [operand for d in dispatches if d.kernel not in shared for operand in d.writes]
    sizes: dict[str, int] = {}
    for operand in written:
        sizes[operand.name] = max(sizes.get(operand.name, 0), operand.offset + operand.size)
    return sizes
