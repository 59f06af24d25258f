"""Where a chat reads and writes: a terminal, or pipes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

HISTORY_LINES = 1000
"""Lines of earlier chats that the arrow keys reach."""

METER_SECONDS = 0.25
"""Time between two updates of the speed."""


class Screen:
    """Where a chat reads and writes. Answers go to stdout, everything else to stderr.

    Attributes:
        interactive: whether a person is typing (input and output are a terminal).
        stats: whether each answer is followed by its speed.
    """

    def __init__(self, source: TextIO, out: TextIO, err: TextIO, *, stats: bool = False) -> None:
        self._source, self._out, self._err = source, out, err
        self.interactive = source.isatty() and out.isatty()
        self.stats = stats or self.interactive
        if self.interactive:
            _keep_history()

    def read(self, prompt: str) -> str | None:
        """A line without its end, or None at the end of the input."""
        if self.interactive:
            try:
                return input(prompt)
            except EOFError:
                print(file=self._out)
                return None
        line = self._source.readline()
        return line.removesuffix("\n").removesuffix("\r") if line else None

    def write(self, text: str) -> None:
        """Text of an answer, at once."""
        self._out.write(text)
        self._out.flush()

    def note(self, text: str) -> None:
        """A line that is no answer; dim on a terminal."""
        self._out.flush()
        if self._err.isatty():
            from rich.console import Console
            from rich.text import Text

            Console(file=self._err, highlight=False).print(Text(text, style="dim"))
        else:
            print(text, file=self._err, flush=True)

    def error(self, message: str) -> None:
        """An error that does not end the chat."""
        self._out.flush()
        print(f"hornito: error: {message}", file=self._err, flush=True)

    @contextmanager
    def metered(self) -> Iterator[Callable[[int], None]]:
        """What to call with each number of new tokens: the terminal's title shows their speed.

        The title moves nothing on the screen, however narrow; where there is none, nothing happens.
        """
        titled = self.interactive and os.environ.get("TERM", "dumb") not in ("dumb", "linux")
        began: float | None = None
        tokens, shown = 0, 0.0

        def count(new: int) -> None:
            nonlocal began, tokens, shown
            now = time.monotonic()
            if began is None:  # the first token ends the prompt
                began = now
                return
            tokens += new
            if titled and now - shown >= METER_SECONDS and now > began:
                shown = now
                self.write(f"\x1b]2;{tokens / (now - began):.1f} tok/s\x07")

        try:
            yield count
        finally:
            if shown:
                self.write("\x1b]2;\x07")


def _keep_history() -> None:
    """Line editing for `input`, with the lines of earlier chats, where the system has it."""
    try:
        import readline
    except ImportError:
        return
    import atexit

    from hornito.vk.pipeline import cache_directory

    path = cache_directory() / "chat_history"
    with suppress(OSError):  # there is none yet
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)

    def write() -> None:
        with suppress(OSError):  # a chat without a home has no history
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)

    atexit.register(write)
