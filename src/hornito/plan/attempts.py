"""Which kernel a process is busy with, noted on disk: a driver may end the process over a shader.

A note names the kernel whose pipeline is being made, or that is being tested. One that a process
has left behind when it ended is a strike against the kernel, which the next process counts
(`hornito.plan.records`). An exception, Ctrl-C among them, leaves none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hornito.processes import runs, this_host

log = logging.getLogger("hornito")


class Attempts:
    """The notes of this process about one device.

    Args:
        records: the file of the device's records, beside which the notes lie.
    """

    def __init__(self, records: Path) -> None:
        self._path = records.with_name(f"{records.stem}-{this_host()}-{os.getpid()}.trying")

    @contextmanager
    def trying(self, mark: str) -> Iterator[None]:
        """Note something until the block ends; where that can't be written, there is no note."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(mark, encoding="utf-8")
        except OSError as error:
            log.debug("no note of an attempt: %s", error)
        try:
            yield
        finally:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                log.debug("the note of an attempt stays: %s", error)


def left_behind(records: Path) -> list[str]:
    """The notes of processes of this machine that have ended; they are removed."""
    found = []
    for path in sorted(records.parent.glob(f"{records.stem}-{this_host()}-*.trying")):
        pid = path.stem.rpartition("-")[2]
        if not pid.isascii() or not pid.isdigit() or runs(int(pid)):
            continue
        try:
            found.append(path.read_text(encoding="utf-8"))
            path.unlink()
        except (OSError, ValueError) as error:
            log.debug("the note %s can't be read: %s", path, error)
    return found
