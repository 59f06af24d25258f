"""Files of processes that may have ended: whose they are, and whether that process runs."""

from __future__ import annotations

import hashlib
import os
import platform


def this_host() -> str:
    """Eight digits that stand for this machine, or container."""
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
