"""Names of packages that are being written, and which of them nobody writes any more.

`.NAME.HOST-PID-RANDOM.tmp` lies beside the package that it becomes. A process that is killed leaves
it behind.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from pathlib import Path

DAY = 86400.0
_NAME = re.compile(r"\..+\.(?:([0-9a-f]{8})-(\d{1,10})-)?[0-9a-f]{8}\.tmp")
_NAME_BYTES = 120  # of the target's name, so that a name that the file system takes gets a partial


def partial_path(target: Path) -> Path:
    """A new name beside `target` for its content until that is complete."""
    stem = target.name.encode(errors="surrogateescape")[:_NAME_BYTES].decode(errors="ignore")
    return target.with_name(f".{stem}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")


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
    return pid is not None and host == _host() and not _runs(int(pid))


def _host() -> str:
    """Eight digits that stand for this machine."""
    import platform

    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _runs(pid: int) -> bool:
    """Whether a process of that number runs; where that can't be asked, it is taken to."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # another user's
    return True
