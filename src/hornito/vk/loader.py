"""Variables of the Vulkan loader that can hide every driver."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FILES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")  # the first wins where both are set
_FILTERS = ("VK_LOADER_DRIVERS_SELECT", "VK_LOADER_DRIVERS_DISABLE")


@dataclass(frozen=True, slots=True)
class VariableAtFault:
    """A variable that keeps the loader from its drivers.

    Attributes:
        name: of the variable.
        text: what is wrong with it, as the end of a sentence.
    """

    name: str
    text: str

    @property
    def fix(self) -> str:
        """The command that undoes it."""
        return f"unset {self.name}"


def variable_at_fault(
    environ: Mapping[str, str] | None = None, root: Path | None = None
) -> VariableAtFault | None:
    """Why the loader finds no driver, as far as its variables are the reason.

    Ask only where no device was found: the variables are of use otherwise.

    Args:
        environ: by default the process's.
        root: where absolute paths begin (tests); by default the system's.
    """
    environ = os.environ if environ is None else environ
    for name in _FILES:
        value = environ.get(name)
        if not value:
            continue
        entries = [entry for entry in value.split(os.pathsep) if entry]
        missing = [entry for entry in entries if not _exists(entry, root)]
        if missing:
            plural = "do" if len(missing) > 1 else "does"
            return VariableAtFault(
                name, f"{name} names {', '.join(missing)}, which {plural} not exist"
            )
        break
    for name in _FILTERS:
        if environ.get(name):
            return VariableAtFault(name, f"{name}={environ[name]} hides the drivers it filters out")
    return None


def explain(message: str) -> str:
    """The message of an error that says that there is no driver, or the variable that is why."""
    fault = variable_at_fault()
    if fault is None:
        return message
    return f"no Vulkan driver was loaded: {fault.text}. Run: {fault.fix}"


def _exists(entry: str, root: Path | None) -> bool:
    return (Path(entry) if root is None else root / entry.lstrip("/")).exists()
