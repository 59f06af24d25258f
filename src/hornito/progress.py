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
    """A bar on a terminal; on any other stream one line for each work that took over a second."""

    def __init__(self, stream: TextIO | None = None, *, slow_seconds: float = 1.0) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._slow_seconds = slow_seconds
        self._label = ""
        self._done = 0
        self._total = 0
        self._started = 0.0
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
        self._active = True
        if self._stream.isatty():
            self._open_bar()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            Elapsed(),
            console=Console(file=self._stream),
        )
        self._bar.start()
        self._task = self._bar.add_task(self._label, total=self._total)

    def advance(self, n: int = 1) -> None:
        """Reports `n` more units done."""
        self._done += n
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, n)

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
            print(f"{self._label}: {seconds:.1f} s", file=self._stream, flush=True)
