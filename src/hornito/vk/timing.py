"""GPU time of whole submissions, by the device's own clock, and work that raises it first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hornito.vk.record import Recorder

if TYPE_CHECKING:
    from hornito.vk.device import Device


BUSY_SECONDS = 0.15
"""How long a GPU works before something is timed: idle ones run at a part of their clock, and take
0.1 to 0.3 s of work to raise it."""

WAIT_SECONDS = 60.0
"""A submission that takes longer counts as a lost device."""


def keep_busy(device: Device, submit: Callable[[], int]) -> None:
    """Submit the work that is about to be timed for `BUSY_SECONDS`, two submissions at a time.

    It leaves the device idle, and a measurement should follow at once. On a software device it does
    nothing: its clock is the processor's.

    Args:
        submit: submits the work once; returns the ticket.
    """
    if device.caps.device_kind == "software":
        return
    began = time.perf_counter()
    before = submit()
    while time.perf_counter() - began < BUSY_SECONDS:
        ticket = submit()
        device.wait(before, WAIT_SECONDS)
        before = ticket
    device.wait(before, WAIT_SECONDS)


class SubmissionTimer:
    """Puts a timestamp before and after every submission; made by `Device.time_submissions`.

    Both are written when all work before them is done, so time in which the device had nothing to
    do does not count, and work that waits behind other work is not counted twice.
    """

    def __init__(
        self, device: Device, note: Callable[[Sequence[Recorder], int], object] | None = None
    ) -> None:
        """Begin; `note` is called with each submission's recordings and its nanoseconds."""
        self._device = device
        self._note = note
        self._lock = threading.Lock()
        self._free: list[tuple[Recorder, Recorder]] = []
        self._running: list[tuple[Recorder, Recorder, Sequence[Recorder]]] = []
        self._nanoseconds = 0
        self.submissions = 0

    def around(self, recordings: Sequence[Recorder]) -> list[Recorder]:
        """The recordings between two timestamps."""
        with self._lock:
            if len(self._running) >= 64:
                self._collect(self._device.completed())
            first, last = self._free.pop() if self._free else (self._stamp(), self._stamp())
            self._running.append((first, last, recordings if self._note else ()))
            self.submissions += 1
        return [first, *recordings, last]

    def collect(self) -> None:
        """Read the submissions that are done, without waiting for any."""
        with self._lock:
            if self._running:
                self._collect(self._device.completed())

    def seconds(self) -> float:
        """GPU time of every submission since the timer was made; waits for the last one.

        Of a device that was lost or closed, what was read until then.
        """
        with self._lock:
            if self._device.usable:
                self._collect(None)
            return self._nanoseconds / 1e9

    def _stamp(self) -> Recorder:
        recorder = self._device.command_buffer("timer")
        recorder.timestamp(0)
        recorder.end()
        return recorder

    def _collect(self, done: int | None) -> None:
        """Read the submissions up to ticket `done`, or all of them."""
        device = self._device
        left = []
        for first, last, recordings in self._running:
            if last.last_ticket == 0 or (done is not None and last.last_ticket > done):
                left.append((first, last, recordings))
                continue
            begin, end = device.read_timestamps(first)[0], device.read_timestamps(last)[0]
            if end < begin:  # the counter wrapped in between
                wrap = (1 << device.caps.timestamp_bits) * device.caps.timestamp_period_ns
                end += round(wrap)
            self._nanoseconds += end - begin
            if self._note is not None:
                self._note(recordings, end - begin)
            self._free.append((first, last))
        self._running = left
