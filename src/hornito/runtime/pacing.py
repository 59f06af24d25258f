"""Pacing: how much work one submission may hold.

Watchdogs of drivers and systems end a submission that keeps the GPU for too long, and a display
stands still meanwhile. A submission is a run of recordings (segments); each is measured by the
device's own clock, and submissions are cut so that the sum stays below a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hornito.vk.timing import SubmissionTimer

if TYPE_CHECKING:
    from hornito.vk.device import Device
    from hornito.vk.record import Recorder

BOUND_MS = 200.0
"""Milliseconds of one submission where none were given; discrete GPUs have no bound."""

AIM = 0.75
"""Part of the bound that submissions are cut to: times grow with the context, and vary."""

FIRST_SEGMENT = 16
"""Dispatches of a segment of a prompt's chunk, before anything was measured."""


def usual_bound(device_kind: str) -> float | None:
    """The bound of a class of device in milliseconds; None for no bound."""
    return None if device_kind == "discrete" else BOUND_MS


class Pacer:
    """Cuts runs of recordings into submissions of bounded GPU time.

    Attributes:
        bound_ms: milliseconds of one submission; None for no bound.
        longest_ms: the longest submission measured so far.
    """

    def __init__(self, device: Device, bound_ms: float | None) -> None:
        self._device = device
        self.bound_ms = bound_ms
        self.longest_ms = 0.0
        self._timer: SubmissionTimer | None = None
        if bound_ms is not None and device.caps.timestamp_bits:
            self._timer = SubmissionTimer(device, self._note)

    def segment(self, kind: str, most: int) -> int:
        """Dispatches of one segment of a bucket that nothing is known of yet."""
        return most if self.bound_ms is None or kind == "batch" else min(most, FIRST_SEGMENT)

    def too_long(self, segments: Sequence[Recorder]) -> float:
        """How many times longer than it should be the longest segment is, of those that can be cut;
        0 when none is."""
        if self.bound_ms is None:
            return 0.0
        aim = AIM * self.bound_ms * 1e6
        factors = [r.gpu_ns / aim for r in segments if r.dispatch_count > 1]
        most = max(factors, default=0.0)
        return most if most > 1 else 0.0

    def cut(self, recordings: Sequence[Recorder]) -> list[list[Recorder]]:
        """The recordings in submissions, in order. One that was never measured goes alone."""
        if self.bound_ms is None:
            return [list(recordings)]
        bound = AIM * self.bound_ms * 1e6
        found: list[list[Recorder]] = []
        total = 0.0
        for recorder in recordings:
            # What holds no dispatch (updates, copies of blocks) takes next to no time.
            free = recorder.dispatch_count == 0
            cost = 0.0 if free else recorder.gpu_ns or bound
            if not found or total + cost > bound:
                found.append([])
                total = 0.0
            found[-1].append(recorder)
            total += cost
        return found

    def timed(self, recordings: Sequence[Recorder]) -> Sequence[Recorder]:
        """The recordings of one submission between two timestamps."""
        if self._timer is None:
            return recordings
        self._timer.collect()
        return self._timer.around(recordings)

    def _note(self, recordings: Sequence[Recorder], nanoseconds: int) -> None:
        """A submission took so long: spread it over its recordings by what was known of them."""
        self.longest_ms = max(self.longest_ms, nanoseconds / 1e6)
        work = [r for r in recordings if r.dispatch_count]
        if not work:
            return
        known = [r.gpu_ns or float(r.dispatch_count) for r in work]
        scale = nanoseconds / sum(known)
        for recorder, before in {id(r): (r, k) for r, k in zip(work, known, strict=True)}.values():
            now = before * scale
            # Quick to believe that something takes longer, slow to believe the opposite.
            recorder.gpu_ns = max(now, (recorder.gpu_ns + now) / 2)
