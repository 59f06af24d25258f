"""`hornito doctor`: is everything there, does the device compute right, and what to do next."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from hornito.cli.options import add_json, add_option, positive_int
from hornito.cli.output import print_json
from hornito.errors import UsageError
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.diag.conformance import Conformance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="with --full, also test at this model's shapes"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="test every kernel at all shapes, time it, and compare tokens with the reference",
    )
    parser.add_argument(
        "-o", "--report", metavar="FILE", help="with --full, write the conformance report here"
    )
    add_option(parser, "--device", help="with --full: the device (as for run)")
    add_option(
        parser,
        "--context",
        type=positive_int,
        default=1024,
        help="with MODEL: positions to hold (default 1024)",
        metavar="N",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; 0 all is well, 1 a device computes wrong, 4 no device."""
    from hornito.diag.doctor import examine, judge, to_dict, to_text

    if not arguments.full and (arguments.model or arguments.report):
        raise UsageError("MODEL and --report go with --full")
    facts = examine()
    verdict = judge(facts)
    report: Conformance | None = None
    if arguments.full and verdict.exit_code == 0:
        report = _conformance(arguments)
    if arguments.report and report is not None:
        text = json.dumps(report.to_dict(), indent=1)
        Path(arguments.report).write_text(text + "\n", encoding="utf-8")
    if arguments.json:
        more = {} if report is None else {"conformance": report.to_dict()}
        print_json({**to_dict(facts, verdict), **more})
    else:
        print(to_text(facts, verdict))
        if report is not None:
            print(report.to_text())
    return 1 if report is not None and not report.usable else verdict.exit_code


def _conformance(arguments: argparse.Namespace) -> Conformance:
    from hornito.cache import resolve_model
    from hornito.compiler import compile_cached
    from hornito.diag.conformance import examine_device
    from hornito.package import is_package, open_package
    from hornito.vk.device import open_device

    with TerminalProgress() as progress, open_device(arguments.device) as device:
        if arguments.model is None:
            return examine_device(device, progress)
        path = resolve_model(arguments.model, None)
        if not is_package(path):
            path = compile_cached(path, None, progress)
        with open_package(path) as package:
            return examine_device(device, progress, package, arguments.context)
