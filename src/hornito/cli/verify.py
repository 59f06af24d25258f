"""`hornito verify FILE`: every tensor against its sha256."""

from __future__ import annotations

import argparse
import sys

from hornito.cli.files import PACKAGE, expect
from hornito.cli.options import add_json
from hornito.cli.output import megabytes, print_json
from hornito.package import open_package
from hornito.progress import TerminalProgress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    parser.add_argument("package", metavar="FILE.vxm")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 when all is well and 1 when a tensor is damaged."""
    expect(arguments.package, PACKAGE)
    with open_package(arguments.package) as package, TerminalProgress() as progress:
        bad = package.verify(progress)
        count = len(package.tensors) + len(package.blobs)
        size = package.size
    if arguments.json:
        print_json({"path": arguments.package, "tensors": count, "bytes": size, "bad": bad})
    elif bad:
        print(f"{arguments.package}: {len(bad)} damaged: {', '.join(bad)}")
        print(
            "copy or download the file again, or compile its source again (`hornito compile`)",
            file=sys.stderr,
        )
    else:
        print(f"{arguments.package}: ok, {count} tensors and files, {megabytes(size)}")
    return 1 if bad else 0
