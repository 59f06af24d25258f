"""Names of packages that are being written, and which of them nobody writes any more.

`.NAME.HOST-PID-RANDOM.tmp` lies beside the package that it becomes. A process that is killed leaves
it behind.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path

from hornito.processes import runs, this_host

DAY = 86400.0
_NAME = re.compile(r"\..+\.(?:([0-9a-f]{8})-(\d{1,10})-)?[0-9a-f]{8}\.tmp")
_NAME_BYTES = 120  # of the target's name, so that a name that the file system takes gets a partial


def partial_path(target: Path) -> Path:
    """A new name beside `target` for its content until that is complete."""
    stem = target.name.encode(errors="surrogateescape")[:_NAME_BYTES].decode(errors="ignore")
    return target.with_name(f".{stem}.{this_host()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")


def abandoned(folder: Path) -> list[Path]:
    """Partial packages in a folder that nobody writes: their process is gone, or a day passed."""
    found = []
    for path in sorted(folder.glob(".*.tmp")):
        match = _NAME.fullmatch(path.name)
        try:
            if match and path.is_file() and _is_abandoned(path, match[1], match[2]):
                found.append(path)
        except FileNotFoundError:
            continue  # its writer finished just now
    return found


def _is_abandoned(path: Path, host: str | None, pid: str | None) -> bool:
    if time.time() - path.stat().st_mtime > DAY:
        return True
    # The number of a process means nothing on another machine, or in another container.
    return pid is not None and host == this_host() and not runs(int(pid))
