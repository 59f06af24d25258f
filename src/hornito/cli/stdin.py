"""Prompts from standard input."""

from __future__ import annotations

import os
import stat
import sys
from threading import Timer

from hornito.errors import UsageError

_PATIENCE = 2.0  # seconds until it is said what is being waited for


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


def piped_text() -> str:
    """What comes from a pipe or a file beside a prompt, without newlines at its end; '' if nothing.

    Other kinds of stdin are not read: who starts programs through a socket may never close it.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError):  # it is closed, or stands for no file
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    note = Timer(_PATIENCE, _say_waiting)
    note.daemon = True
    note.start()
    try:
        return _read().rstrip("\n")
    finally:
        note.cancel()


def _say_waiting() -> None:
    print(
        "hornito: reading the text before the prompt from stdin (</dev/null: none)",
        file=sys.stderr,
        flush=True,
    )


def _read() -> str:
    if sys.stdin is None:
        return ""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8: {error}") from error
