"""Fetching models from the Hugging Face hub, through its own client (`huggingface_hub`).

The client's settings hold: HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, proxies.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hornito.cache import MARKER, hub_directory, is_repository
from hornito.errors import HornitoError, UsageError

#: What a safetensors checkpoint needs; everything else of a repository stays there.
PATTERNS = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a download brought.

    Attributes:
        folder: where the files lie.
        revision: the commit.
        files: their names, relative to `folder`.
        bytes: their size.
    """

    folder: Path
    revision: str
    files: list[str]
    bytes: int


def pull(repository: str, *, file: str | None = None, revision: str | None = None) -> Pulled:
    """Fetch a model into the cache; files that are there already are not fetched again.

    Args:
        repository: ORG/REPO.
        file: one GGUF file of it; by default the safetensors checkpoint, or the only GGUF file.
        revision: branch, tag or commit.

    Raises:
        UsageError: no such repository or file, several GGUF files and no choice, or
            `huggingface_hub` is not installed.
        HornitoError: the hub did not answer.
    """
    if not is_repository(repository):
        raise UsageError(f"'{repository}' is no repository name; it has the form ORG/REPO")
    client = _client()
    folder = hub_directory() / repository
    try:
        info = client.model_info(repository, revision=revision)
        wanted = choose_files(repository, [s.rfilename for s in info.siblings or ()], file)
        _fetch(repository, str(info.sha), wanted, folder)
    except HornitoError:
        raise
    except Exception as error:
        raise _explained(error, repository, revision, client.endpoint) from error
    sizes = [(folder / name).stat().st_size for name in wanted]
    everything = sorted({*_fetched(folder), *wanted})
    note = {"repository": repository, "revision": info.sha, "files": everything}
    (folder / MARKER).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    return Pulled(folder, str(info.sha), wanted, sum(sizes))


def choose_files(repository: str, files: Sequence[str], file: str | None) -> list[str]:
    """The files of a repository to fetch.

    Raises:
        UsageError: the one that is wanted is not there, or it is not clear which is.
    """
    models = sorted(name for name in files if name.endswith(".gguf"))
    if file is not None:
        if file not in files:
            raise UsageError(f"{repository} has no file {file}; GGUF files: {_some(models)}")
        if not file.endswith(".gguf"):
            raise UsageError(f"--file takes a GGUF file, not {file}")
        return [file]
    if "config.json" in files and any(fnmatch.fnmatch(n, "*.safetensors") for n in files):
        # Folders hold other forms of the same model.
        top = [name for name in files if "/" not in name]
        return sorted(n for n in top if any(fnmatch.fnmatch(n, p) for p in PATTERNS))
    if len(models) == 1:
        return models
    if models:
        raise UsageError(
            f"{repository} has {len(models)} GGUF files; choose one with --file: {_some(models)}"
        )
    raise UsageError(f"{repository} has neither safetensors with a config.json nor a GGUF file")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20]) or "none"
    return f"{shown} and {len(names) - 20} more" if len(names) > 20 else shown


def _client() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(
            "hornito pull needs the package huggingface_hub; run: pip install 'hornito[hub]'"
        ) from error
    return huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def _fetch(repository: str, revision: str, files: Sequence[str], folder: Path) -> None:
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    # The client's own bars show bytes; on anything but a terminal they would fill a log.
    bars = sys.stderr.isatty()
    (enable_progress_bars if bars else disable_progress_bars)()
    for number, name in enumerate(files, 1):
        if not bars:
            print(f"fetching {number}/{len(files)} {name}", file=sys.stderr, flush=True)
        huggingface_hub.hf_hub_download(
            repository,
            name,
            revision=revision,
            local_dir=folder,
            endpoint=os.environ.get("HF_ENDPOINT"),
        )


def _fetched(folder: Path) -> list[str]:
    """Files that earlier pulls brought."""
    try:
        note = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return [name for name in note["files"] if (folder / name).is_file()]


def _explained(
    error: Exception, repository: str, revision: str | None, endpoint: str
) -> HornitoError:
    """The client's error in the words of someone who wants a model."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return UsageError(
            f"{repository} is gated: accept its licence at {endpoint}/{repository}, and set "
            "HF_TOKEN to a token of yours"
        )
    if kind == "RepositoryNotFoundError":
        return UsageError(
            f"{endpoint} has no repository {repository} that you can see; for a private one set "
            "HF_TOKEN"
        )
    if kind == "RevisionNotFoundError":
        return UsageError(f"{repository} has no revision {revision}")
    text = " ".join(str(error).split())[:300]
    return HornitoError(
        f"{repository} could not be fetched from {endpoint}: {kind}: {text}. What arrived is kept; "
        f"check the network (HF_ENDPOINT, HTTPS_PROXY) and run `hornito pull {repository}` again"
    )
