"""What a process is busy with, noted on disk: a driver may end the process over a shader.

A note names the act that goes on: making a pipeline, or testing a kernel. It is locked while its
process lives, whatever its number and in whichever container, so that one that is free was left by
a process that ended in the act: a strike, which the next process counts (`hornito.plan.records`).
Exceptions, Ctrl-C, SIGTERM and SIGHUP leave none; a crash does, and so does SIGKILL.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from hornito.processes import lock, this_host

log = logging.getLogger("hornito")

_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]

_notes: dict[Path, TextIO] = {}  # of this process; open, for they are locked
_changing = threading.RLock()  # a signal's handler may come amid a change
_over = threading.Event()  # the process is ending: nothing is noted any more


class Attempts:
    """The notes of this process about one device.

    Args:
        records: the file of the device's records, beside which the notes lie.
    """

    def __init__(self, records: Path) -> None:
        self._records = records

    @contextmanager
    def trying(self, mark: str) -> Iterator[None]:
        """Note an act until the block ends; where that can't be written, there is no note."""
        name = f"{_stem(self._records)}{os.getpid()}-{secrets.token_hex(4)}.trying"
        path = self._records.with_name(name)
        with notes_end_with_signals():
            try:
                _write(path, mark)
                yield
            finally:
                _remove(path)


@contextmanager
def notes_end_with_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP remove this process's notes before they end it, inside the block.

    Where someone else handles or ignores them, and outside of the main thread, this is nothing: a
    program that tests kernels in other threads only wraps its main thread in it, as `hornito` does.
    """
    mine: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        mine = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def left_behind(records: Path) -> list[str]:
    """The notes of processes of this machine that have ended; they are removed."""
    found = []
    for path in sorted(records.parent.glob(f"{_stem(records)}*.trying")):
        try:
            with path.open("r+", encoding="utf-8") as file:
                if not lock(file) or not os.fstat(file.fileno()).st_nlink:
                    continue  # its process lives, or another one has just counted it
                mark = file.read()
                path.unlink()
        except (OSError, ValueError) as error:
            log.debug("the note %s can't be read: %s", path, error)
            continue
        if mark:
            found.append(mark)
    return found


def _stem(records: Path) -> str:
    return f"{records.stem}-{this_host()}-"


def _write(path: Path, mark: str) -> None:
    with _changing:
        if _over.is_set():
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _notes[path] = file = path.open("x", encoding="utf-8")
            if lock(file):
                file.write(mark)
                file.flush()
        except OSError as error:
            log.debug("no note of an attempt: %s", error)


def _remove(path: Path) -> None:
    with _changing:
        if (file := _notes.get(path)) is None:
            return
        try:
            path.unlink(missing_ok=True)
            file.close()
        except OSError as error:
            log.debug("the note of an attempt stays: %s", error)
        _notes.pop(path, None)


@atexit.register
def _remove_all() -> None:
    """Of threads that the process does not wait for, and where a second Ctrl-C broke in."""
    with _changing:
        _over.set()
        for path in list(_notes):
            _remove(path)


def _end(number: int, frame: FrameType | None) -> None:
    with _changing:
        _remove_all()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
