"""Files of processes that may have ended: whose they are, and whether that process runs."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import IO, Any

if sys.platform != "win32":
    import fcntl


def this_host() -> str:
    """Eight digits that stand for this machine, or container."""
    import platform  # most commands do without it

    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def runs(pid: int) -> bool:
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


def lock(file: IO[Any], *, wait: bool = False) -> bool:
    """Lock an open file until it is closed or its process ends; False where another has it.

    Args:
        wait: until it is free.

    Raises:
        OSError: this file system, or this platform, has no locks.
    """
    if sys.platform == "win32":
        raise OSError("no file locks on this platform")
    else:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    return True
