"""Prompts from standard input."""

from __future__ import annotations

import os
import stat
import sys

from hornito.errors import UsageError


def on_terminal() -> bool:
    """Whether someone can type."""
    return sys.stdin is not None and sys.stdin.isatty()


def stdin_text() -> str:
    """The prompt that stdin is, without one newline at its end.

    Raises:
        UsageError: it is empty, or not UTF-8.
    """
    text = _read()
    if not text.strip():
        raise UsageError(
            "there is no prompt: stdin is empty. Give PROMPT, --prompt-file or --ids, or a text on "
            "stdin; on a terminal a chat begins"
        )
    return text


def text_waits() -> bool:
    """Whether a pipe or a file has text for us, which a prompt beside it leaves unread.

    It is not read then: who starts programs may leave a pipe open that never ends.
    """
    try:
        file = sys.stdin.fileno()
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode):
            return os.lseek(file, 0, os.SEEK_CUR) < status.st_size
        if not stat.S_ISFIFO(status.st_mode):
            return False
        import fcntl  # not on every system; neither is FIONREAD
        import termios

        ready = fcntl.ioctl(file, termios.FIONREAD, b"\0" * 4)
    except (AttributeError, ImportError, OSError):  # it is closed, or stands for no file
        return False
    return any(ready)


def _read() -> str:
    if sys.stdin is None:
        return ""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8: {error}") from error
