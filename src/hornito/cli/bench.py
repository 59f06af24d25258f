"""`hornito bench MODEL`: prompt and generation speed, as llama-bench names them."""

from __future__ import annotations

import argparse
import time

from hornito.cli.model import add_model, load_model
from hornito.cli.options import add_option, one_of, positive_int, whole_numbers
from hornito.cli.output import print_json
from hornito.progress import TerminalProgress

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
        type=one_of(FORMATS),
        default="md",
        metavar="FORMAT",
        help=f"output: {', '.join(FORMATS)} (default md)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Loads the model, measures, and prints the report."""
    from hornito.diag.bench import bench

    began = time.perf_counter()
    with TerminalProgress() as progress, load_model(arguments, progress) as llm:
        loaded = time.perf_counter() - began
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
        )
    if arguments.o == "json":
        print_json(report.to_dict())
    else:
        print(report.to_markdown() if arguments.o == "md" else report.to_csv())
    return 0
