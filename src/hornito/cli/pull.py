"""`hornito pull ORG/REPO`: fetches a model from the Hugging Face hub into the cache."""

from __future__ import annotations

import argparse

from hornito.cli.options import add_json
from hornito.cli.output import megabytes, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    parser.add_argument("repository", metavar="ORG/REPO")
    parser.add_argument("--file", metavar="X.gguf", help="fetch this one GGUF file")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit (default main)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Fetches what Hornito needs of a repository and says how to run it."""
    from hornito.hub import pull

    pulled = pull(arguments.repository, file=arguments.file, revision=arguments.revision)
    name = f"{arguments.repository}/{arguments.file}" if arguments.file else arguments.repository
    if arguments.json:
        print_json(
            {
                "name": name,
                "path": str(pulled.folder),
                "revision": pulled.revision,
                "files": pulled.files,
                "bytes": pulled.bytes,
            }
        )
        return 0
    print(f"{name}: {len(pulled.files)} files, {megabytes(pulled.bytes)}, in {pulled.folder}")
    print(f"next: hornito run {name}")
    return 0
