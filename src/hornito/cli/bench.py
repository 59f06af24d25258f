"""`hornito bench MODEL`: prompt and generation speed, as llama-bench names them."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from hornito.cli.model import add_model, load_model, prove_kernels
from hornito.cli.options import add_option, one_of, positive_int, whole_numbers
from hornito.cli.output import note, print_json
from hornito.errors import UsageError
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.diag.bench import Test
    from hornito.diag.bench_report import BenchReport, BenchRow, PeerRun

FORMATS = ("md", "json", "csv")
DEPTH = 4096
"""Context of the deep row that is measured when no depths are given."""
_SHORT = 2 * (64 + 16)
"""Tokens of the short run that is advised on software devices."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    add_model(parser)
    parser.add_argument(
        "-p", type=whole_numbers, metavar="N,N", help="prompt lengths (default 512)"
    )
    parser.add_argument("-n", type=whole_numbers, metavar="N,N", help="tokens to generate (128)")
    parser.add_argument(
        "-d",
        type=whole_numbers,
        metavar="N,N",
        help="context before them (default 0, and prompts behind 4096 where they fit)",
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
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw decode speed by context and time to first token by prompt (needs matplotlib)",
    )
    parser.add_argument(
        "--compare", metavar="FILE", help="JSON of another run (benchmarks/peer), put beside ours"
    )
    parser.add_argument(
        "--no-start", action="store_true", help="don't measure cold and warm starts"
    )
    parser.epilog = (
        "Rows: pp512 evaluates a prompt of 512 tokens, tg128 generates 128 tokens, @d4096 does so "
        "behind 4096 tokens. Columns: tok/s is the median of the runs, beside the slowest "
        "run and the p90, which nine of ten do not exceed; ms the time to the first token (pp) or "
        "of each token (tg), beside the fastest and the p90; GB/s the weights that a step reads "
        "times the median, host share this process's processor time over wall time (above 100 % "
        "on a software device, which computes in it), host us/token the processor time of the "
        "calling thread, "
        "and objects kept/token what Python still holds."
    )


def run(arguments: argparse.Namespace) -> int:
    """Loads the model, measures, and prints the report."""
    from hornito.diag.bench import bench
    from hornito.diag.bench_plot import check_matplotlib, plot
    from hornito.diag.bench_report import PeerRun, compared

    _check(arguments)
    peer: PeerRun | None = PeerRun.read(arguments.compare) if arguments.compare else None
    if arguments.plot:
        check_matplotlib()
    began = time.perf_counter()
    with TerminalProgress() as progress, load_model(arguments, progress) as llm:
        loaded = time.perf_counter() - began
        prove_kernels(llm, progress)
        if arguments.steps:
            llm.steps_per_submission = arguments.steps
        tests = _tests(arguments, llm)
        _warn_of_length(tests, arguments.r, llm)
        report = bench(
            llm,
            model=arguments.model,
            load_seconds=loaded,
            tests=tests,
            runs=arguments.r,
            progress=progress,
            done=_show,
        )
        if not arguments.no_start:
            report = _with_starts(report, llm, progress)
    if peer is not None:
        report = compared(report, peer)
    if arguments.plot:
        plot(report, arguments.plot, peer)
    if arguments.o == "json":
        print_json(report.to_dict())
    else:
        print(report.to_markdown() if arguments.o == "md" else report.to_csv())
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse, before a model is loaded, what can't be measured."""
    from hornito.runtime.decode import MOST_STEPS

    if not any(arguments.p or [512]) and not any(arguments.n or [128]):
        raise UsageError("-p 0 -n 0 leaves nothing to measure")
    if arguments.steps and arguments.steps > MOST_STEPS:
        raise UsageError(f"--steps takes 1 to {MOST_STEPS}, not {arguments.steps}")


def _tests(arguments: argparse.Namespace, llm: LLM) -> list[Test]:
    """What was asked for; else the usual rows, and those of the picture."""
    from hornito.diag.bench import tests_of
    from hornito.diag.bench_plot import DEPTHS, PROMPTS

    prompts = [n for n in (arguments.p or [512]) if n]
    generate = [n for n in (arguments.n or [128]) if n]
    if arguments.d is not None:
        return tests_of(prompts, generate, arguments.d)
    tests = tests_of(prompts, generate, [0])
    if arguments.plot:
        most = max(generate, default=0)
        depths = [d for d in DEPTHS if d and d + most <= llm.context]
        tests += tests_of([], generate, depths)
        if arguments.p is None:
            tests = tests_of([n for n in PROMPTS if n <= llm.context], [], [0]) + tests[1:]
    usual = arguments.p is None and not arguments.plot
    if usual and llm.context >= DEPTH + max(prompts):
        if llm.device_kind != "software":
            return [*tests, *tests_of(prompts, [], [DEPTH])]
        note(f"pp512@d{DEPTH} is left out on a software device; -d 0,{DEPTH} measures it")
    elif usual:
        note(f"pp512@d{DEPTH} is left out: the context has {llm.context} positions (--context)")
    return tests


def _with_starts(report: BenchReport, llm: LLM, progress: TerminalProgress) -> BenchReport:
    from hornito.diag.starts import measure_starts

    progress.start("cold and warm starts", 1)
    cold, warm = measure_starts(
        llm.package_path,
        device=llm.engine.device.info.uuid,
        context=llm.context,
        precision=llm.precision,
    )
    progress.finish()
    return replace(report, cold_start_seconds=cold, warm_start_seconds=warm)


def _warn_of_length(tests: list[Test], runs: int, llm: LLM) -> None:
    """On a software device, say how much is to be done before it begins."""
    if llm.device_kind != "software":
        return
    per_run = sum(depth + n for depth, _, n in tests)
    if per_run * (runs + 1) > _SHORT:
        note(
            f"a software device evaluates {per_run * (runs + 1):,} tokens here ({per_run:,} in "
            f"each of {runs + 1} runs); shorter: -p 64 -n 16 -r 1"
        )


def _show(row: BenchRow) -> None:
    """A row as soon as it is there, where no bar is drawn."""
    if not sys.stderr.isatty():
        print(f"{row.test}: {row.median:.1f} tok/s", file=sys.stderr, flush=True)
