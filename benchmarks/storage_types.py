"""Speed of packages of one model in turn, all loaded: what a storage type gives on this device.

python benchmarks/storage_types.py fp16.vxm int8.vxm int4.vxm --rounds 3

Kernels are proved first. Each round measures every package once, so that what changes with time
(the clock, other work) falls on all of them. Prints tokens a second, the GB/s of weights that
decoding reads, and how many times as fast as the first package each is: the median of the rounds'
ratios. Other options are those with which `hornito bench` loads a model, such as --tune fast.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from beside_peer import loading

from hornito.cli.model import load_model
from hornito.cli.options import positive_int
from hornito.diag.bench import bench, tests_of
from hornito.errors import HornitoError
from hornito.progress import NullProgress


def measure(arguments: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """Tokens a second of each package by round."""
    found: dict[str, Any] = {"packages": {}}
    with ExitStack() as stack:
        loaded = {}
        for path in arguments.packages:
            llm = stack.enter_context(load_model(loading(path, more), NullProgress()))
            llm.prove()
            loaded[path.name] = llm
            found["device"] = llm.device_line
            found["packages"][path.name] = {"tokens_per_second": []}
        tests = tests_of([], [arguments.n], [arguments.d])
        for _ in range(arguments.rounds):
            for name, llm in loaded.items():
                report = bench(
                    llm,
                    model=name,
                    load_seconds=0.0,
                    tests=tests,
                    runs=arguments.r,
                    progress=NullProgress(),
                )
                entry = found["packages"][name]
                entry["step_bytes"] = report.step_bytes
                entry["tokens_per_second"].append(report.rows[0].median)
    first = found["packages"][arguments.packages[0].name]["tokens_per_second"]
    for entry in found["packages"].values():
        speeds = entry["tokens_per_second"]
        entry["gbps"] = median(speeds) * entry["step_bytes"] / 1e9
        entry["ratio"] = median(a / b for a, b in zip(speeds, first, strict=True))
    return found


def table(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = ["| package | tok/s | GB/s | times the first |", "|---|---|---|---|"]
    for name, entry in found["packages"].items():
        rounds = ", ".join(f"{speed:.1f}" for speed in entry["tokens_per_second"])
        middle = median(entry["tokens_per_second"])
        figures = f"{middle:.1f} ({rounds}) | {entry['gbps']:.1f} | {entry['ratio']:.3f}"
        lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="+", type=Path)
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("-n", type=positive_int, default=64, help="tokens to generate (64)")
    parser.add_argument("-d", type=positive_int, default=32, help="context before them (32)")
    parser.add_argument("-r", type=positive_int, default=2, help="runs of a round (2)")
    parser.add_argument("-o", "--out", type=Path, help="keep the figures as JSON")
    arguments, more = parser.parse_known_args()
    try:
        found = measure(arguments, more)
    except HornitoError as error:
        print(f"storage_types.py: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(found["device"])
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
