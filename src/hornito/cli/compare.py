"""`hornito compare MODEL --ref REF`: the device against a reference, value by value."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hornito.cli.model import add_fp32_tensors, add_model
from hornito.cli.options import (
    WEIGHTS,
    add_backend,
    add_json,
    number,
    one_of,
    positive_int,
    token_ids,
    whole,
)
from hornito.cli.output import print_json, print_table
from hornito.cli.tensors import add_inputs
from hornito.errors import UsageError
from hornito.precision import default_kv
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.diag.compare import Comparison
    from hornito.diag.compare_bench import Settings
    from hornito.diag.compare_bisect import Bisection
    from hornito.diag.compare_values import Difference, Tolerance

DIFFERS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    add_model(parser)
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="text, as it is; by default ids of no meaning"
    )
    parser.add_argument("--ids", type=token_ids, help="prompt as token ids: 1,2,3", metavar="IDS")
    parser.add_argument(
        "--ref",
        required=True,
        metavar="REF",
        help="cpu (the numpy evaluator on MODEL itself), or another file or directory of the model",
    )
    add_backend(parser)
    parser.add_argument(
        "--ref-backend",
        type=one_of(("cpu", "vulkan")),
        default="cpu",
        help="what runs REF: cpu, the numpy evaluator (default), or vulkan",
        metavar="NAME",
    )
    parser.add_argument(
        "--ref-weights",
        type=one_of(WEIGHTS),
        help="weights of REF, when it is no package",
        metavar="TYPE",
    )
    parser.add_argument(
        "--steps", type=whole, default=4, help="tokens to decode (default 4)", metavar="N"
    )
    parser.add_argument(
        "--slots",
        type=positive_int,
        default=1,
        help="sequences of a call; more than one brings the batch buckets (default 1)",
        metavar="N",
    )
    parser.add_argument(
        "--tolerance",
        type=number,
        help="largest relative error of a row that counts as equal (default by precision and "
        "weights)",
        metavar="X",
    )
    parser.add_argument(
        "--min-cosine",
        type=number,
        help="smallest cosine that counts as equal (default so, too; 1 - X with --tolerance X)",
        metavar="X",
    )
    parser.add_argument(
        "--dump",
        action="append",
        default=[],
        nargs=2,
        help="write the values that PATTERN names, of both sides, to DIR as .npy; may be repeated",
        metavar=("PATTERN", "DIR"),
    )
    parser.add_argument(
        "--bisect",
        action="store_true",
        help="name the graph pass or kernel that makes them differ, by switching each off",
    )
    parser.add_argument(
        "--disable-pass",
        action="append",
        default=[],
        help="leave a graph pass out of MODEL; may be repeated",
        metavar="NAME",
    )
    add_fp32_tensors(parser)
    parser.add_argument("--summary", action="store_true", help="don't list every value")
    add_inputs(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compares, prints what was found, and returns 0 when all is equal, else 1."""
    from hornito.cli.compare_tensors import is_tensors, run_tensors

    if is_tensors(arguments):
        return run_tensors(arguments)
    return _run_decoder(arguments)


def _settings(arguments: argparse.Namespace) -> Settings:
    from hornito.diag.compare_bench import Settings

    kv = arguments.kv or default_kv(arguments.precision)
    for flag in ("tolerance", "min_cosine"):
        value = getattr(arguments, flag)
        if value is not None and not 0 <= value <= 1e9:
            raise UsageError(f"--{flag.replace('_', '-')} must be a number from 0, not {value}")
    return Settings(
        device=arguments.device,
        context=arguments.context,
        precision=arguments.precision,
        kv_half=kv == "fp16",
        weights=arguments.weights,
        backend=arguments.backend,
        ref_backend=arguments.ref_backend,
        ref_weights=arguments.ref_weights,
        disabled_passes=tuple(arguments.disable_pass),
        fp32_tensors=tuple(arguments.fp32_tensors),
        slots=arguments.slots,
        verify=arguments.verify,
        tune=arguments.tune,
        submission_ms=arguments.submission_ms,
        disable_features=tuple(arguments.disable_feature or ()),
        steps=arguments.steps,
        relative=arguments.tolerance,
        cosine=arguments.min_cosine,
        dumps=tuple((pattern, folder) for pattern, folder in arguments.dump),
    )


def _run_decoder(arguments: argparse.Namespace) -> int:
    from hornito.cli.cpu import say_cpu
    from hornito.diag.compare import compare
    from hornito.diag.compare_bench import Workbench
    from hornito.diag.compare_bisect import bisect

    if arguments.prompt is not None and arguments.ids is not None:
        raise UsageError("give one of PROMPT and --ids")
    if arguments.input or arguments.dim or arguments.bucket:
        raise UsageError("--input, --dim and --bucket are for models of tensors")
    prompt = arguments.prompt if arguments.ids is None else arguments.ids
    settings = _settings(arguments)
    if settings.backend == "cpu":
        say_cpu()
    with ExitStack() as stack:
        progress = stack.enter_context(TerminalProgress())
        bench = Workbench(stack, arguments.model, arguments.ref, prompt, settings, progress)
        found = compare(bench)
        blame = bisect(bench, found.first) if arguments.bisect and found.first else None
    for name in found.pinned:
        print(f"hornito: fp32 operands in {name}", file=sys.stderr)
    for note in found.notes:
        print(f"hornito: {note}", file=sys.stderr)
    if arguments.json:
        data = found.to_dict()
        if arguments.bisect:
            data["bisect"] = None if blame is None else blame.to_dict()
        print_json(data)
    else:
        _print(found, arguments.summary)
        if arguments.bisect:
            _print_blame(blame)
    return 0 if found.equal else DIFFERS


def _print(found: Comparison, summary: bool) -> None:
    print(f"{found.model} ({found.weights} weights) on {found.device}")
    print(
        f"against {found.reference} ({found.reference_weights} weights): "
        f"{len(found.ids)} tokens, the last {len(found.ids) - found.prompt} of them decoded"
    )
    if not summary:
        print_values([run.values for run in found.runs])
    print()
    rows = []
    for run in found.runs:
        worst = max(run.values, key=lambda value: value.relative)
        wrong = sum(step.got != step.want for step in run.steps)
        rows.append(
            (
                run.run,
                sum(not value.equal for value in run.values),
                f"{worst.relative:.2e}",
                worst.value,
                f"{wrong} of {len(run.steps)}",
                f"{run.from_steps.relative:.2e}" if run.from_steps else "",
            )
        )
    print_table(("run", "differ", "relative", "of", "other tokens", "from step"), rows)
    _print_stored(found.stored)
    for label, names in (("MODEL", found.only_model), ("REF", found.only_reference)):
        if names:
            more = f", ... ({len(names)} in all)" if len(names) > 4 else ""
            print(f"only in {label}, not compared: {', '.join(names[:4])}{more}")
    if found.only_reference:
        print("(passes make one op of several; --disable-pass NAME leaves one out of MODEL)")
    print_end(found.first, found.tolerance, found.dumped, row="position")


def _print_stored(weights: list[Difference]) -> None:
    """What comparing the weights themselves found, where REF has its own."""
    if not weights:
        return
    wrong = [weight for weight in weights if not weight.equal]
    worst = max(weights, key=lambda weight: (not weight.equal, weight.relative))
    print(
        f"stored weights: {len(weights)} compared, {len(wrong)} differ; "
        f"relative {worst.relative:.2e} of {worst.value} @ {worst.position}"
    )
    for weight in wrong[:8]:
        print(f"  DIFFERS {weight.value}: from row {weight.first} on")
    if len(wrong) > 8:
        print(f"  ... ({len(wrong)} in all)")


def print_values(runs: list[tuple[Difference, ...]]) -> None:
    """A line for each value, in graph order: the worst of all runs."""
    print()
    rows = []
    for values in zip(*runs, strict=True):
        worst = max(values, key=lambda value: (not value.equal, value.relative))
        rows.append(
            (
                worst.value,
                worst.op,
                f"{min(value.cosine for value in values):.6f}",
                f"{max(value.max_abs for value in values):.2e}",
                f"{worst.relative:.2e}",
                f"{worst.run} @ {worst.position}".strip(),
                "" if all(value.equal for value in values) else "DIFFERS",
            )
        )
    print_table(("value", "op", "cosine", "max abs", "relative", "worst at", ""), rows)


def print_end(
    first: Difference | None, tolerance: Tolerance, dumped: Iterable[str], row: str = "row"
) -> None:
    """What was written, and the verdict; `row` is what a row of a value stands for."""
    for path in dumped:
        print(f"wrote {path}")
    limits = f"relative error {tolerance.relative:g}, cosine {tolerance.cosine:g}"
    if first is None:
        print(f"EQUAL within {limits}")
        return
    from hornito.diag.compare_weights import WEIGHTS

    if first.run == WEIGHTS:
        print(
            f"DIFFERS: the stored weights are not the reference's\nfirst divergence: "
            f"{first.value}, from row {first.first} on: relative {first.relative:.3g}, max abs "
            f"{first.max_abs:.3g}"
        )
        return
    kernels = f" ({', '.join(first.kernels)})" if first.kernels else ""
    run = f" in {first.run}" if first.run else ""
    print(
        f"DIFFERS beyond {limits}\nfirst divergence: {first.value}, made by {first.op}{kernels}"
        f"{run}, from {row} {first.first} on: relative {first.relative:.3g}, cosine "
        f"{first.cosine:.6f}, max abs {first.max_abs:.3g}"
    )


def _print_blame(blame: Bisection | None) -> None:
    if blame is None:
        print("nothing differs: nobody to blame")
        return
    if blame.tried:
        print(f"switched off in {blame.run}, one by one: {', '.join(map(str, blame.tried))}")
    print(f"guilty: {blame.verdict}")
