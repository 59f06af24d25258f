"""Nodes that keep fp32 operands whatever the precision is, by patterns of names."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Sequence

from hornito.errors import UsageError
from hornito.graph.graph import Graph, Node

logger = logging.getLogger("hornito")


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


def pinned_nodes(graph: Graph, patterns: Sequence[str], precision: str) -> list[str]:
    """The nodes that patterns name, by their own name, a result's or a weight's.

    A value or a tensor that fusion took into a node names that node: such a value never leaves the
    kernel's registers, which are fp32. A warning says which those are.

    Raises:
        UsageError: a pattern matches nothing, or the precision is `low`: a kernel has one form of
            storage for all values that it reads.
    """
    if patterns and precision == "low":
        raise UsageError(
            "--fp32-tensors does not go with precision low, which stores every value as fp16; "
            "take precision normal"
        )
    names = [n for node in graph for n in (*_own(node), *_taken_in(node)) if n]
    found = set(matching(patterns, dict.fromkeys(names), "--fp32-tensors"))
    existing = {n for node in graph for n in _own(node)}
    for name in sorted(found - existing):
        inside = ", ".join(node.name for node in graph if name in _taken_in(node))
        logger.warning("%s is part of %s, which keeps fp32 operands as a whole", name, inside)
    return [node.name for node in graph if found.intersection((*_own(node), *_taken_in(node)))]


def _own(node: Node) -> tuple[str, ...]:
    return (node.name, *node.outputs, *node.inputs)


def _taken_in(node: Node) -> tuple[str, ...]:
    """What a node stands for without having it: results of fused nodes, tensors of the source."""
    return (*node.fused, *node.covers)
