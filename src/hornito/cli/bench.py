"""`hornito bench MODEL`: prompt and generation speed, as llama-bench names them."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from hornito.cli.model import add_model, load_model
from hornito.cli.options import add_option, one_of, positive_int, whole_numbers
from hornito.cli.output import print_json
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.diag.bench import BenchRow

FORMATS = ("md", "json", "csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    add_model(parser)
    parser.add_argument(
        "-p", type=whole_numbers, default=[512], metavar="N,N", help="prompt lengths (default 512)"
    )
    parser.add_argument(
        "-n", type=whole_numbers, default=[128], metavar="N,N", help="tokens to generate (128)"
    )
    parser.add_argument(
        "-d", type=whole_numbers, default=[0], metavar="N,N", help="context before them (0)"
    )
    parser.add_argument("-r", type=positive_int, default=5, metavar="N", help="runs of each (5)")
    add_option(parser, "--steps", type=positive_int, help="decode steps a submission", metavar="N")
    parser.add_argument(
        "-o",
        dest="o",
        type=one_of(FORMATS),
        default="md",
        metavar="FORMAT",
        help=f"output: {', '.join(FORMATS)} (default md)",
    )
    parser.add_argument(
        "--json", dest="o", action="store_const", const="json", help="the same as -o json"
    )
    parser.epilog = (
        "Rows: pp512 evaluates a prompt of 512 tokens, tg128 generates 128 tokens, @d4096 does so "
        "behind 4096 tokens. Columns: tok/s is the median of the runs, least the slowest run, p90 "
        "the run that nine of ten do not exceed, ms the time to the first token (pp) or of each "
        "token (tg), and host share this process's processor time over wall time (above 100 % on "
        "a software device, which computes in it)."
    )


def run(arguments: argparse.Namespace) -> int:
    """Loads the model, measures, and prints the report."""
    from hornito.diag.bench import bench

    began = time.perf_counter()
    with TerminalProgress() as progress, load_model(arguments, progress) as llm:
        loaded = time.perf_counter() - began
        _warn_of_length(arguments, llm)
        if arguments.steps:
            llm.steps_per_submission = arguments.steps
        report = bench(
            llm,
            model=arguments.model,
            load_seconds=loaded,
            prompts=[n for n in arguments.p if n],
            generate=[n for n in arguments.n if n],
            depths=arguments.d,
            runs=arguments.r,
            progress=progress,
            done=_show,
        )
    if arguments.o == "json":
        print_json(report.to_dict())
    else:
        print(report.to_markdown() if arguments.o == "md" else report.to_csv())
    return 0


def _warn_of_length(arguments: argparse.Namespace, llm: LLM) -> None:
    """On a software device, say how much is to be done before it begins."""
    if llm.device_kind != "software":
        return
    per_run = sum(d + n for d in arguments.d for n in (*arguments.p, *arguments.n) if n)
    runs = arguments.r + 1
    print(
        f"hornito: a software device evaluates {per_run * runs:,} tokens here ({per_run:,} in each "
        f"of {runs} runs), which may take many minutes; shorter: -p 64 -n 16 -r 1",
        file=sys.stderr,
        flush=True,
    )


def _show(row: BenchRow) -> None:
    """A row as soon as it is there, where no bar is drawn."""
    if not sys.stderr.isatty():
        print(f"{row.test}: {row.median:.1f} tok/s", file=sys.stderr, flush=True)
