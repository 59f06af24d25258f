"""Progress of long work, shown on stderr and never on stdout.

Code that takes a while accepts a `Progress`; the command line passes a `TerminalProgress`, and a
caller that wants silence passes `NullProgress()` or None where that is allowed.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    import rich.progress


_COUNTED = 10_000_000  # larger totals are bytes, of which the share says more


class Progress(Protocol):
    """One piece of work after another: start, advance as often as wanted, finish."""

    def start(self, label: str, total: int) -> None:
        """Begins a piece of work of `total` units (bytes, tensors, pipelines)."""

    def advance(self, n: int = 1) -> None:
        """Reports `n` more units done."""

    def finish(self) -> None:
        """Ends the piece of work, complete or not; harmless when none was started."""


class NullProgress:
    """Shows nothing."""

    def start(self, label: str, total: int) -> None:
        """Ignored."""

    def advance(self, n: int = 1) -> None:
        """Ignored."""

    def finish(self) -> None:
        """Ignored."""


class TerminalProgress:
    """A bar on a terminal; elsewhere lines for work that takes over a second.

    Elsewhere there is a line with the units done (`prompt 256/1200`) after a second and then every
    five, as the work advances, and one with units and time at the end.
    """

    def __init__(self, stream: TextIO | None = None, *, slow_seconds: float = 1.0) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._slow_seconds = slow_seconds
        self._label = ""
        self._done = 0
        self._total = 0
        self._started = 0.0
        self._next_line = 0.0
        self._active = False
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()

    def start(self, label: str, total: int) -> None:
        """Begins a piece of work; one that is still open is finished first."""
        self.finish()
        self._label, self._total, self._done = label, total, 0
        self._started = time.monotonic()
        self._next_line = self._started + self._slow_seconds
        self._active = True
        if self._stream.isatty():
            self._open_bar()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TaskProgressColumn as Percent
        from rich.progress import TimeElapsedColumn as Elapsed

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn() if self._total < _COUNTED else Percent(),
            Elapsed(),
            console=Console(file=self._stream),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._label, total=self._total)

    def advance(self, n: int = 1) -> None:
        """Reports `n` more units done."""
        self._done += n
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, n)
            return
        now = time.monotonic()
        if self._active and self._next_line <= now and self._done < self._total:
            self._next_line = now + 5 * self._slow_seconds
            print(f"{self._label}{self._part()}", file=self._stream, flush=True)

    def _part(self) -> str:
        """How much is done, behind a space; '' for nothing."""
        if not self._done:
            return ""
        if self._total < _COUNTED:
            return f" {self._done}/{self._total}"
        return f" {self._done / self._total:.0%}"

    def finish(self) -> None:
        """Closes the bar, or prints the line of a slow piece of work."""
        if not self._active:
            return
        self._active = False
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._task = None
            return
        seconds = time.monotonic() - self._started
        if seconds >= self._slow_seconds:
            print(f"{self._label}{self._part()}: {seconds:.1f} s", file=self._stream, flush=True)
