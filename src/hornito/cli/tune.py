"""`hornito tune MODEL`: which kernels, and with --precision which precision, are best here."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hornito.cli.options import WEIGHTS, add_json, add_option, one_of
from hornito.cli.output import print_json, print_table
from hornito.errors import UsageError
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.diag.tune_precision import PrecisionReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    parser.add_argument("model", metavar="MODEL", help="package, source, or a cached name")
    parser.add_argument(
        "--precision",
        action="store_true",
        help="measure the precisions, high, normal and low, and recommend one",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="compare them on this text (default: a small one of our own)"
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="kernels: only those of single steps and the largest chunk that were never measured",
    )
    add_option(parser, "--device", help="index, name part, vendor, pci:..., UUID or 'software'")
    add_option(
        parser,
        "--weights",
        type=one_of(WEIGHTS),
        help=f"weights, when MODEL is no package: {', '.join(WEIGHTS)}",
        metavar="TYPE",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures kernels, whose winners later loads use; or precisions, of which one is advised."""
    if arguments.precision:
        if arguments.fast:
            raise UsageError("--fast is about kernels, --precision is not")
        return _precision(arguments)
    if arguments.text:
        raise UsageError("--text goes with --precision")
    return _kernels(arguments)


def _kernels(arguments: argparse.Namespace) -> int:
    from hornito.diag.tune_kernels import tune_kernels

    with TerminalProgress() as progress:
        report = tune_kernels(
            arguments.model,
            device=arguments.device,
            weights=arguments.weights,
            everything=not arguments.fast,
            progress=progress,
        )
    if arguments.json:
        print_json(report.to_dict())
        return 0
    changed = [row for row in report.rows if row.changed]
    print(
        f"{report.device}: {len(report.rows)} shapes measured, {len(changed)} with a variant at "
        "least 3 % faster than the default; later loads use it"
    )
    rows = [
        (row.site, row.default, f"{row.default_us:.1f}", row.winner, f"{row.winner_us:.1f}")
        for row in changed
    ]
    if rows:
        print_table(("shape", "default", "us", "winner", "us"), rows)
    for kernel, why in report.dropped.items():
        print(f"not used: kernel {kernel} ({why})")
    return 0


def _precision(arguments: argparse.Namespace) -> int:
    from hornito.diag.quality_models import package_of
    from hornito.diag.tune_precision import tune_precision

    with TerminalProgress() as progress:
        package = package_of(arguments.model, arguments.weights, progress)
        report = tune_precision(
            package,
            model=arguments.model,
            device=arguments.device,
            text=arguments.text,
            progress=progress,
        )
    if arguments.json:
        print_json(report.to_dict())
    else:
        _print(report)
    return 0


def _print(report: PrecisionReport) -> None:
    print(f"{report.model}: {report.weights} weights; {report.device}; {report.tokens} tokens\n")
    print("| precision | KV | prompt tok/s | decode tok/s | mean KL | 99 % KL | top-1 |")
    print("|---|---|---|---|---|---|---|")
    for tier in report.tiers:
        quality = tier.quality
        against = ("-", "-", "-")
        if quality is not None:
            against = (f"{quality.kl_mean:.3g}", f"{quality.kl_p99:.3g}", f"{quality.top1:.2%}")
        cells = (tier.precision, tier.kv, f"{tier.prompt:.1f}", f"{tier.decode:.1f}", *against)
        print(f"| {' | '.join(cells)} |")
    print(f"\nrecommended: --precision {report.recommended} ({report.reason})")
