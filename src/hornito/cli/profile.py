"""`hornito profile MODEL`: GPU time by kernel."""

from __future__ import annotations

import argparse

from hornito.cli.model import add_model, load_model, prove_kernels
from hornito.cli.options import add_json, add_option, positive_int
from hornito.cli.output import print_json, print_table
from hornito.progress import TerminalProgress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    add_model(parser)
    text = "context (default 512, or what the model has room for)"
    add_option(parser, "--depth", type=positive_int, help=text, metavar="N")
    parser.add_argument("--trace", metavar="FILE", help="also write a Chrome trace")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Loads the model, times one chunk and one step, and prints where the time went."""
    from hornito.diag.profile import copy_bandwidth, profile, write_trace

    with TerminalProgress() as progress, load_model(arguments, progress) as llm:
        progress.finish()
        prove_kernels(llm, progress)
        found = profile(llm, arguments.depth or min(512, llm.context - 1), progress)
        progress.start("measuring copies", 1)
        bandwidth = copy_bandwidth(llm.engine.device)
        progress.finish()
        device = llm.device_line
    if arguments.trace:
        write_trace(found, arguments.trace)
    if arguments.json:
        print_json(
            {
                "device": device,
                "copy_gbps": bandwidth,
                "calls": [row.to_dict(bandwidth) for row in found],
            }
        )
        return 0
    print(f"{device}; a copy runs at {bandwidth:.1f} GB/s")
    for call in found:
        print(f"\n{call.call} at {call.depth} tokens: {call.milliseconds:.3f} ms of kernels")
        rows = [
            (
                row.kernel,
                row.role,
                f"{row.milliseconds:.3f}",
                row.launches,
                f"{row.gbps:.1f}",
                f"{row.gbps / bandwidth:.0%}",
            )
            for row in call.kernels
        ]
        print_table(("kernel", "role", "ms", "launches", "GB/s", "of a copy"), rows)
    return 0
