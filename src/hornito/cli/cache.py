"""`hornito cache save|info|rm`: evaluated prefixes on disk."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hornito.cli.files import SNAPSHOT, expect, read_text_file
from hornito.cli.model import add_model_options, load_model
from hornito.cli.options import add_json, one_of, token_ids
from hornito.cli.output import megabytes, print_fields, print_json
from hornito.errors import UsageError
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.runtime.snapshot import Snapshot

ACTIONS = ("save", "info", "rm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    parser.add_argument(
        "action",
        metavar="save|info|rm",
        type=one_of(ACTIONS),
        help="save MODEL OUT, info FILE, rm FILE...",
    )
    parser.add_argument("paths", metavar="MODEL OUT | FILE", nargs="+")
    parser.add_argument(
        "--text-file", metavar="FILE", help="save: text as it is, for `run --raw --prefix`"
    )
    parser.add_argument(
        "--system-file",
        metavar="FILE",
        help="save: a system message, for chats and `run --prefix`",
    )
    parser.add_argument("--ids", type=token_ids, metavar="IDS", help="save: token ids: 1,2,3")
    add_model_options(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Does what the action says."""
    given = [
        name for name in ("text_file", "system_file", "ids") if getattr(arguments, name) is not None
    ]
    if arguments.action != "save" and given:
        option = given[0].replace("_", "-")
        raise UsageError(f"--{option} goes with `hornito cache save`")
    if arguments.action == "save":
        return _save(arguments, given)
    return _info(arguments) if arguments.action == "info" else _remove(arguments)


def _save(arguments: argparse.Namespace, given: list[str]) -> int:
    """Evaluates a prefix and writes its snapshot."""
    if len(arguments.paths) != 2:
        raise UsageError("give MODEL and OUT: `hornito cache save MODEL OUT --system-file FILE`")
    if len(given) != 1:
        raise UsageError("give one of --text-file FILE, --system-file FILE and --ids")
    arguments.model, out = arguments.paths
    text = None
    if given != ["ids"]:
        option = "--" + given[0].replace("_", "-")
        text = read_text_file(option, getattr(arguments, given[0]))
    with TerminalProgress() as progress, load_model(arguments, progress) as llm:
        progress.finish()
        with _evaluate(llm, given[0], text, arguments) as snapshot:
            size = snapshot.save(out)
            tokens = snapshot.position
    if arguments.json:
        print_json({"path": out, "tokens": tokens, "bytes": size})
    else:
        print(f"{out}: {tokens} tokens, {megabytes(size)}")
    return 0


def _evaluate(llm: LLM, kind: str, text: str | None, arguments: argparse.Namespace) -> Snapshot:
    if text is None:
        return llm.prefill(arguments.ids)
    if kind == "text_file":
        return llm.prefill(text)
    return llm.prefill_chat([{"role": "system", "content": text}])


def _info(arguments: argparse.Namespace) -> int:
    """Prints what files say about themselves; their tensors are not read."""
    from hornito.runtime.snapshot_file import read_facts

    for path in arguments.paths:
        expect(path, SNAPSHOT)
    reports = [_report(path, read_facts(path)) for path in arguments.paths]
    if arguments.json:
        print_json(reports[0] if len(reports) == 1 else reports)
        return 0
    for number, report in enumerate(reports):
        if number:
            print()
        identity = report.pop("identity")
        report["bytes"] = megabytes(report["bytes"])
        for message in report.pop("messages"):
            text = message["content"].replace("\n", " ")
            report[message["role"]] = text if len(text) <= 60 else f"{text[:57]}..."
        print_fields([*report.items(), *identity.items()])
    return 0


def _report(path: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "path": path,
        "bytes": Path(path).stat().st_size,
        "tokens": len(facts["ids"]),
        "blocks": [len(own) for own in facts["present"]],
        "pending": facts["pending"],
        "sampler": facts["sampler"],
        "messages": facts["messages"],
        "identity": facts["identity"],
    }


def _remove(arguments: argparse.Namespace) -> int:
    """Deletes snapshot files; when one is none, nothing is deleted."""
    from hornito.runtime.snapshot_file import read_facts

    sizes = {}
    for path in arguments.paths:
        expect(path, SNAPSHOT)
        read_facts(path)
        sizes[path] = Path(path).stat().st_size
    for path in sizes:
        Path(path).unlink()
    if arguments.json:
        print_json({"removed": [{"path": path, "bytes": size} for path, size in sizes.items()]})
        return 0
    for path, size in sizes.items():
        print(f"removed {path} ({megabytes(size)})")
    return 0
