"""`hornito list`: the models in the cache."""

from __future__ import annotations

import argparse
import time

from hornito.cli.options import add_json
from hornito.cli.output import megabytes, print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the cached models, the one used last first."""
    from hornito.cache import leftovers, list_models
    from hornito.vk.pipeline import cache_directory

    models, killed = list_models(), leftovers()
    if arguments.json:
        print_json(
            {
                "cache": str(cache_directory()),
                "models": [
                    {
                        "name": model.name,
                        "kind": model.kind,
                        "bytes": model.bytes,
                        "weights": model.weights or None,
                        "source": model.source,
                        "last_use": model.last_use,
                        "path": str(model.path),
                    }
                    for model in models
                ],
                "leftovers": [{"path": str(path), "bytes": size} for path, size in killed],
            }
        )
        return 0
    if killed:
        size = megabytes(sum(size for _, size in killed))
        print(
            f"{len(killed)} unfinished file(s) of killed compiles take {size}; the next compile "
            "into the cache or `hornito rm --all` deletes them"
        )
    if not models:
        print(
            f"no models in {cache_directory()}; "
            "`hornito run` of a GGUF file or a directory puts one there"
        )
        return 0
    now = time.time()
    rows = [
        (
            model.name,
            model.kind,
            megabytes(model.bytes),
            model.weights or "-",
            ago(now - model.last_use),
            model.source,
        )
        for model in models
    ]
    print_table(("name", "kind", "size", "weights", "last use", "source"), rows, records=True)
    total = sum(model.bytes for model in models)
    print(f"\n{megabytes(total)} in {cache_directory()}; `hornito rm NAME` frees it")
    return 0


def ago(seconds: float) -> str:
    """'3 hours ago' for an age in seconds."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // size)
        if count >= 1:
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"
