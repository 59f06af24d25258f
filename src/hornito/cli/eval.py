"""`hornito eval tool-calls FILE MODEL`: how a model calls tools behind a shared catalogue."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hornito.cli.model import add_model_options, load_model
from hornito.cli.options import add_json, one_of, positive_int
from hornito.cli.output import print_fields, print_json, print_table
from hornito.errors import UsageError
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.diag.eval_tools import CallResult, Suite, ToolReport

KINDS = ("tool-calls",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    parser.add_argument("kind", metavar="tool-calls", type=one_of(KINDS))
    parser.add_argument(
        "file", metavar="FILE", help="catalogue and cases; 'builtin' is a small set of our own"
    )
    parser.add_argument("model", metavar="MODEL", help="package, source, or a cached name")
    parser.add_argument(
        "--reference",
        metavar="SRC",
        help="what the tokens are compared with, at fp32 and high; by default MODEL itself",
    )
    parser.add_argument(
        "--no-reference", action="store_true", help="don't compare tokens with the fp32 tier"
    )
    parser.add_argument(
        "--max-tokens", type=positive_int, default=96, metavar="N", help="of a call (default 96)"
    )
    add_model_options(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answers all cases, once more at fp32, and prints the report."""
    from hornito.diag.eval_tools import read_suite, report

    if arguments.reference is not None and arguments.no_reference:
        raise UsageError("--reference and --no-reference contradict each other")
    suite = read_suite(arguments.file)
    reference = None if arguments.no_reference else _reference(arguments, suite)
    facts, tokens, results = _run(arguments, suite)
    found = report(facts, tokens, results, reference)
    if arguments.json:
        print_json(found.to_dict())
    else:
        _print(found)
    return 0


def _run(
    arguments: argparse.Namespace, suite: Suite
) -> tuple[tuple[str, str, str], int, list[CallResult]]:
    from hornito.diag.eval_tools import run_suite

    with TerminalProgress() as progress, load_model(arguments, progress) as llm:
        tokens, results = run_suite(llm, suite, progress, max_tokens=arguments.max_tokens)
        return (arguments.model, llm.device_line, llm.precision), tokens, results


def _reference(arguments: argparse.Namespace, suite: Suite) -> list[CallResult]:
    """The same cases in the fp32 tier: a load of its own, closed before the other begins."""
    changed = argparse.Namespace(**vars(arguments))
    changed.model = arguments.reference or arguments.model
    changed.weights, changed.precision, changed.kv = "fp32", "high", None
    try:
        return _run(changed, suite)[2]
    except UsageError as error:
        if "compile its source again" not in str(error):
            raise
        raise UsageError(
            f"{error}. The tokens are compared with the fp32 tier: give the model's source with "
            "--reference, or --no-reference"
        ) from error


def _print(found: ToolReport) -> None:
    identity = found.identity
    print_fields(
        [
            ("model", found.model),
            ("device", found.device),
            ("catalogue", f"{found.catalogue_tokens} tokens"),
            ("complete calls", f"{found.complete:.0%}"),
            ("exact calls", f"{found.exact:.0%}"),
            (
                "same as fp32",
                "not compared"
                if identity is None
                else f"{identity.answers:.0%} of answers, {identity.tokens:.1%} of tokens",
            ),
            ("restore + chunk + decode", _seconds(found)),
        ]
    )
    print()
    rows = [
        (
            "exact" if one.exact else "complete" if one.call is not None else "-",
            f"{1e3 * one.seconds:.1f} ms",
            len(one.token_ids),
            one.utterance if len(one.utterance) <= 60 else f"{one.utterance[:57]}...",
        )
        for one in found.results
    ]
    print_table(("call", "time", "tokens", "utterance"), rows)


def _seconds(found: ToolReport) -> str:
    return f"p50 {1e3 * found.p50_seconds:.1f} ms, max {1e3 * found.max_seconds:.1f} ms"
