"""What a file is, for verbs that were given the wrong kind."""

from __future__ import annotations

from pathlib import Path

from hornito.errors import UsageError

PACKAGE, SNAPSHOT, GGUF, ONNX = "a Hornito package", "a prefix snapshot", "a GGUF file", "ONNX"
CHECKPOINT, FOLDER, SAFETENSORS = "a model directory", "a directory", "a safetensors file"
TEXT, EMPTY = "a text file", "an empty file"

#: What to do with each, NAME being the file.
_VERBS = {
    PACKAGE: "`hornito inspect NAME` shows what it holds, `hornito run NAME` runs it",
    SNAPSHOT: "`hornito cache info NAME` shows what it holds, `hornito run MODEL --prefix NAME` "
    "starts from it",
    GGUF: "`hornito check NAME` says whether it runs, `hornito compile NAME OUT.vxm` makes a "
    "package of it",
    ONNX: "`hornito check NAME` says whether it runs, `hornito compile NAME OUT.vxm` makes a "
    "package of it",
    CHECKPOINT: "`hornito check NAME` says whether it runs, `hornito compile NAME OUT.vxm` makes a "
    "package of it",
    FOLDER: "a model directory has config.json, safetensors and tokenizer.json",
    SAFETENSORS: "give the model directory that it belongs to: `hornito compile DIRECTORY OUT.vxm`",
}


def kind_of(path: Path) -> str:
    """What is at a path, by its content; '' when that can't be told, or when nothing is there."""
    if path.is_dir():
        return CHECKPOINT if (path / "config.json").exists() else FOLDER
    try:
        with path.open("rb") as file:
            start = file.read(1 << 16)
    except OSError:  # its reader says why
        return ""
    if not start:
        return EMPTY
    if start.startswith(b"GGUF"):
        return GGUF
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32:
        return _safetensors(path)
    if path.suffix == ".onnx":
        return ONNX
    return TEXT if _is_text(start) else ""


def _safetensors(path: Path) -> str:
    """Which kind of safetensors file it is; '' when its header is damaged."""
    import json

    from hornito.package.format import MANIFEST_KEY
    from hornito.runtime.snapshot_file import KEY

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            metadata = json.loads(file.read(length)).get("__metadata__") or {}
        except (ValueError, AttributeError):
            return ""
    if MANIFEST_KEY in metadata:
        return PACKAGE
    return SNAPSHOT if KEY in metadata else SAFETENSORS


def _is_text(start: bytes) -> bool:
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        # A character may be cut in two at the end of what was read.
        return error.start > len(start) - 4 and len(start) == 1 << 16
    return b"\0" not in start


def expect(path: str, wanted: str) -> None:
    """Raise a UsageError that says what a file is and what it is for, when it is something else.

    What can't be told apart passes; its reader has the precise words.
    """
    kind = kind_of(Path(path))
    if kind in ("", wanted):
        return
    told = _VERBS.get(kind)
    use = f": {told.replace('NAME', path)}" if told else ""
    raise UsageError(f"{path} is {kind}, not {wanted}{use}")


def read_text_file(option: str, path: str) -> str:
    """The text of a file that an option names, without one newline at its end.

    Raises:
        UsageError: there is none, it can't be read, or it is not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode("utf-8").removesuffix("\n")
    except FileNotFoundError as error:
        raise UsageError(f"{option} {path}: no such file") from error
    except OSError as error:
        raise UsageError(f"{option} {path}: can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {path}: is not UTF-8: {error}") from error
