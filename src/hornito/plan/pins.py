"""Nodes that keep fp32 operands whatever the precision is, by patterns of names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from hornito.errors import UsageError
from hornito.graph.graph import Graph


def matching(patterns: Sequence[str], names: Iterable[str], flag: str) -> list[str]:
    """The names that any of the patterns (`*`, `?`, `[...]`) matches, in their order.

    Raises:
        UsageError: a pattern matches nothing.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:6])
            raise UsageError(
                f"{flag} {pattern!r} matches none of {len(names)} names; they are like {some}"
            )
    return [n for n in names if any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns)]


def pinned_nodes(graph: Graph, patterns: Sequence[str]) -> list[str]:
    """The nodes that patterns name, by their own name, a result's or a weight's.

    Raises:
        UsageError: a pattern matches nothing.
    """
    names = [n for node in graph for n in (node.name, *node.outputs, *node.inputs) if n]
    found = set(matching(patterns, dict.fromkeys(names), "--fp32-tensors"))
    return [
        node.name for node in graph if found.intersection((node.name, *node.outputs, *node.inputs))
    ]
