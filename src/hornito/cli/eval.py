"""`hornito eval tool-calls FILE MODEL`: how a model calls tools behind a shared catalogue; and
`hornito eval quality MODEL...`: what its storage type costs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hornito.cli import eval_quality
from hornito.cli.model import add_model_options, load_model
from hornito.cli.options import add_json, one_of, positive_int
from hornito.cli.output import print_fields, print_json, print_table
from hornito.errors import UsageError
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.diag.eval_tools import CallResult, Suite, ToolReport

KINDS = ("tool-calls", "quality")
TOOL_OPTIONS = ("no_reference", "max_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    parser.add_argument(
        "kind",
        metavar="tool-calls|quality",
        type=one_of(KINDS),
        help="tool-calls FILE MODEL, or quality MODEL... --text FILE",
    )
    parser.add_argument(
        "paths",
        metavar="FILE MODEL | MODEL",
        nargs="+",
        help="FILE: catalogue and cases ('builtin' is a small set of our own); MODEL: package, "
        "source, or a cached name",
    )
    parser.add_argument(
        "--reference",
        "--ref",
        metavar="MODEL",
        help="what is compared with, at fp32 and high; by default the source of MODEL",
    )
    parser.add_argument(
        "--no-reference",
        action="store_const",
        const=True,
        help="tool-calls: don't compare tokens with the fp32 tier",
    )
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="tool-calls: of a call (96)"
    )
    eval_quality.add_arguments(parser)
    add_model_options(parser, precision=None)
    add_json(parser)
    parser.epilog = "The precision is normal for tool-calls, and high for quality by default."


def run(arguments: argparse.Namespace) -> int:
    """Does what the kind says."""
    quality = arguments.kind == "quality"
    for name in TOOL_OPTIONS if quality else eval_quality.OPTIONS:
        if getattr(arguments, name) is not None:
            other = KINDS[0 if quality else 1]
            raise UsageError(f"--{name.replace('_', '-')} goes with `hornito eval {other}`")
    if quality:
        return eval_quality.run(arguments)
    if len(arguments.paths) != 2:
        raise UsageError("give FILE and MODEL: `hornito eval tool-calls builtin MODEL`")
    arguments.file, arguments.model = arguments.paths
    arguments.precision = arguments.precision or "normal"
    return _run_tool_calls(arguments)


def _run_tool_calls(arguments: argparse.Namespace) -> int:
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
    from hornito.diag.eval_tools import MAX_TOKENS, run_suite

    most = arguments.max_tokens or MAX_TOKENS
    with TerminalProgress() as progress, load_model(arguments, progress) as llm:
        tokens, results = run_suite(llm, suite, progress, max_tokens=most)
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
