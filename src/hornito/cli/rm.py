"""`hornito rm NAME...`: deletes models from the cache."""

from __future__ import annotations

import argparse

from hornito.cli.options import add_json
from hornito.cli.output import megabytes, print_json
from hornito.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="as `hornito list` shows it")
    parser.add_argument("--all", action="store_true", help="every cached model")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Deletes the named models; an unknown name deletes nothing."""
    from hornito.cache import list_models, remove, remove_leftovers

    if bool(arguments.names) == arguments.all:
        raise UsageError("give either NAMEs or --all; `hornito list` shows what there is")
    names = [model.name for model in list_models()] if arguments.all else arguments.names
    removed = remove(names)
    killed = remove_leftovers() if arguments.all else []
    if arguments.json:
        found = [(m.name, m.bytes) for m in removed] + [(p.name, size) for p, size in killed]
        print_json({"removed": [{"name": name, "bytes": size} for name, size in found]})
        return 0
    for model in removed:
        print(f"removed {model.name} ({megabytes(model.bytes)})")
    if killed:
        size = megabytes(sum(size for _, size in killed))
        print(f"removed {len(killed)} unfinished file(s) of killed compiles ({size})")
    if not removed and not killed:
        print("the cache holds no models")
    return 0
