"""The model cache: packages compiled from sources, and models that `hornito pull` fetched.

Under `cache_directory()`: `models/NAME-WEIGHTS-DIGEST.vxm` with a small `.json` beside it (where it
came from; its time is that of the last use), and `hub/ORG/REPO/` with a marker file that is
written when a download is complete.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hornito.errors import HornitoError, UsageError
from hornito.package.partial import abandoned
from hornito.vk.pipeline import cache_directory

log = logging.getLogger("hornito")

MARKER = ".hornito.json"
DEFAULT = "default"
"""The weights in the name of a package that was compiled without a choice of them: `keep` of
sources with quantised tensors, `fp16` of others."""

_COMPILED = re.compile(r"(.+)-([a-z0-9_]+)-([0-9a-f]{16})")
_REPO = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One entry of the cache.

    Attributes:
        name: the shortest name that means only this entry; works wherever a MODEL is taken. The
            name of the source alone means the package of the default weights, whatever else is
            there of the same source.
        other_names: longer ones that mean it as well.
        path: a package, or the folder of a download.
        kind: 'compiled' or 'downloaded'.
        bytes: size on disk.
        weights: storage type of a package; '' for a download.
        source: the path that was compiled, or the repository.
        last_use: Unix time.
    """

    name: str
    path: Path
    kind: str
    bytes: int
    weights: str
    source: str
    last_use: float
    other_names: tuple[str, ...] = ()


def models_directory() -> Path:
    """Where compiled packages lie."""
    return cache_directory() / "models"


def hub_directory() -> Path:
    """Where downloads lie."""
    return cache_directory() / "hub"


def is_repository(name: str) -> bool:
    """Whether a text has the form ORG/REPO."""
    return _REPO.fullmatch(name) is not None and ".." not in name


def note_use(package: Path, source: Path) -> None:
    """Remember that a cached package was used now, and where it came from.

    A cache that can't be written is still good to read from: then there is just no note.
    """
    note = _note_of(package)
    try:
        note.write_text(json.dumps({"source": str(source)}) + "\n", encoding="utf-8")
    except OSError as error:
        log.debug("no note of the use of %s: %s", package, error)


def prepare_models_directory() -> Path:
    """The folder of compiled packages, there and writable; what killed compiles left is deleted.

    Raises:
        HornitoError: it can't be made or written; names it and HORNITO_CACHE.
    """
    folder = models_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it is read-only")
    except OSError as error:
        raise HornitoError(
            f"can't keep compiled models in {folder}: {error.strerror or error}. Set HORNITO_CACHE "
            "to a folder that can be written, or compile to a file of your own with "
            "`hornito compile MODEL OUT.vxm`"
        ) from error
    remove_leftovers()
    return folder


def leftovers() -> list[tuple[Path, int]]:
    """Files of killed compiles in the cache, with their sizes."""
    return [(path, path.stat().st_size) for path in abandoned(models_directory())]


def remove_leftovers() -> list[tuple[Path, int]]:
    """Delete the files of killed compiles; returns those that are gone, with their sizes."""
    gone = []
    for path, size in leftovers():
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("can't delete %s, left by a killed compile: %s", path, error)
            continue
        gone.append((path, size))
    return gone


def list_models() -> list[CachedModel]:
    """Every entry, the one used last first."""
    found = [*_compiled(), *_downloads()]
    return sorted(found, key=lambda entry: (-entry.last_use, entry.name))


def _compiled() -> list[CachedModel]:
    entries = []
    for path in sorted(models_directory().glob("*.vxm")):
        match = _COMPILED.fullmatch(path.stem)
        note = _note_of(path)
        entry = CachedModel(
            name=path.stem,
            path=path,
            kind="compiled",
            bytes=path.stat().st_size,
            weights=match[2] if match else "",
            source=_source(note),
            last_use=(note if note.exists() else path).stat().st_mtime,
        )
        entries.append(entry)
    holders: dict[str, list[CachedModel]] = {}
    for entry in entries:
        for alias in _aliases(entry):
            holders.setdefault(alias, []).append(entry)
    named = []
    for entry in entries:
        name, *more = (alias for alias in _aliases(entry) if _meant(holders[alias]) == [entry])
        named.append(replace(entry, name=name, other_names=tuple(more)))
    return named


def _meant(found: list[CachedModel]) -> list[CachedModel]:
    """Of the entries that a name fits, those of the default weights when that is one alone."""
    usual = [entry for entry in found if entry.weights == DEFAULT]
    return usual if len(usual) == 1 else found


def _aliases(entry: CachedModel) -> list[str]:
    """Names that an entry goes by, the shortest first; the last one is its own alone."""
    stem = entry.path.stem if entry.kind == "compiled" else entry.name
    match = _COMPILED.fullmatch(stem) if entry.kind == "compiled" else None
    return [match[1], f"{match[1]}-{match[2]}", stem] if match else [stem]


def _downloads() -> list[CachedModel]:
    entries = []
    for folder in sorted(hub_directory().glob("*/*")):
        marker = folder / MARKER
        if not folder.is_dir():
            continue
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        name = f"{folder.parent.name}/{folder.name}"
        complete = marker.exists()
        entries.append(
            CachedModel(
                name=name,
                path=folder,
                kind="downloaded",
                bytes=size,
                weights="",
                source=name if complete else f"{name} (incomplete)",
                last_use=(marker if complete else folder).stat().st_mtime,
            )
        )
    return entries


def _note_of(package: Path) -> Path:
    return package.with_name(package.name + ".json")


def _source(note: Path) -> str:
    try:
        return str(json.loads(note.read_text(encoding="utf-8"))["source"])
    except FileNotFoundError:
        return "unknown"
    except (ValueError, KeyError, TypeError):
        return "unknown (damaged note)"


def find(name: str, weights: str | None = None) -> list[CachedModel]:
    """The entries that a name means; `weights` chooses among packages of one source.

    Without `weights`, a name that fits several means the package of the default weights.
    """
    entries = list_models()
    for rank in range(3):
        found = [e for e in entries if name in _aliases(e)[rank : rank + 1]]
        if weights is not None and len(found) > 1:
            found = [e for e in found if e.weights == weights]
        if weights is None:
            found = _meant(found)
        if found:
            return found
    return []


def remove(names: Sequence[str]) -> list[CachedModel]:
    """Delete entries by name; nothing is deleted when one of the names is unknown.

    Raises:
        UsageError: a name means no entry, or several.
        HornitoError: one can't be deleted.
    """
    entries: dict[Path, CachedModel] = {}
    for name in names:
        entry = _only(name, find(name))
        if entry is None:
            raise UsageError(f"no cached model is called '{name}'{_hint(name)}")
        entries[entry.path] = entry
    for entry in entries.values():
        try:
            _delete(entry.path)
        except OSError as error:
            raise HornitoError(f"can't delete {entry.path}: {error.strerror or error}") from error
    return list(entries.values())


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    else:
        _note_of(path).unlink(missing_ok=True)
        path.unlink()


def resolve_model(model: str | os.PathLike[str], weights: str | None = None) -> Path:
    """The file or folder that a MODEL argument means: a path, or a name from the cache.

    Raises:
        UsageError: there is neither; says what to do.
    """
    text = os.fspath(model)
    path = Path(text).expanduser()
    try:
        if path.exists():
            return path
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"can't look for the model {text[:60]!r}: {reason}") from error
    entry = _only(text, find(text, weights))
    if entry is not None and entry.kind == "compiled":
        return entry.path
    if entry is not None:
        return _downloaded(entry.name, entry.path)
    repository, _, file = _split_repository(text)
    folder = hub_directory() / repository if repository else None
    if folder is not None and file and (folder / file).is_file():
        return _used(folder, folder / file)
    if repository and folder is not None and folder.is_dir():
        present = ", ".join(sorted(p.name for p in folder.glob("*.gguf"))) or "no GGUF file"
        raise UsageError(
            f"{repository} was fetched, but holds no {file} (there is {present}); "
            f"run `hornito pull {repository} --file {file}`"
        )
    message = f"there is no file or folder {text}, and no cached model of that name"
    if repository:
        extra = f" --file {file}" if file else ""
        raise UsageError(f"{message}; to fetch it run `hornito pull {repository}{extra}`")
    raise UsageError(message + _hint(text))


def _split_repository(text: str) -> tuple[str, str, str]:
    """(ORG/REPO, '/', file) of ORG/REPO[/file], or empty strings."""
    parts = text.split("/", 2)
    repository = "/".join(parts[:2])
    if len(parts) < 2 or not is_repository(repository) or ".." in text:
        return "", "", ""
    if text.endswith((".gguf", ".vxm", ".onnx")) and len(parts) == 2:
        return "", "", ""  # folder/file.gguf is a path that is not there
    return repository, "/", parts[2] if len(parts) == 3 else ""


def _downloaded(name: str, folder: Path) -> Path:
    """What to open in the folder of a download."""
    if not (folder / MARKER).exists():
        raise UsageError(f"the download of {name} is incomplete; run `hornito pull {name}` again")
    if (folder / "config.json").exists():
        return _used(folder, folder)
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf"))
    if len(files) == 1:
        return _used(folder, folder / files[0])
    listing = ", ".join(f"{name}/{file}" for file in files) or "nothing that can be run"
    raise UsageError(f"{name} holds {len(files)} models; say which: {listing}")


def _used(folder: Path, path: Path) -> Path:
    now = time.time()
    if (folder / MARKER).exists():
        try:
            os.utime(folder / MARKER, (now, now))
        except OSError as error:
            log.debug("no note of the use of %s: %s", folder, error)
    return path


def _only(name: str, found: Sequence[CachedModel]) -> CachedModel | None:
    if len(found) > 1:
        names = ", ".join(f"{entry.name} (from {entry.source})" for entry in found)
        raise UsageError(f"'{name}' means {len(found)} cached models; say which: {names}")
    return found[0] if found else None


def _hint(name: str) -> str:
    names = [entry.name for entry in list_models()]
    close = difflib.get_close_matches(name, names, 1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return "; `hornito list` shows the cached ones" if names else "; the cache is empty"
