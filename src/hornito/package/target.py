"""What may be written under a name; asked before any work is done."""

from __future__ import annotations

import os
from pathlib import Path

from hornito.errors import UsageError
from hornito.package.format import SUFFIX
from hornito.package.reader import holds_package


def check_target(out: str | os.PathLike[str]) -> None:
    """Raise UsageError unless a package may be written to `out`.

    Its folder must be there and take new files, and a file of that name must be a package, which is
    replaced as a whole when the new one is complete, or empty: sources and documents stay.
    """
    path = Path(out)
    if path.is_dir():
        raise UsageError(
            f"{path} is a directory: give the file to write, such as {path / ('model' + SUFFIX)}"
        )
    folder = path.parent
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise UsageError(f"can't write {path}: {folder} {what}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"can't write {path}: no permission to write in {folder.resolve()}")
    if path.exists() and not holds_package(path) and not _is_empty(path):
        raise UsageError(
            f"{path} exists and is no Hornito package, so it is not replaced: give another name, "
            f"such as {path.with_name(path.stem + '-new' * (path.suffix == SUFFIX) + SUFFIX)}"
        )


def _is_empty(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == 0
