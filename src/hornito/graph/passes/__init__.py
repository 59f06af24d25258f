"""Graph passes: small rewrites that keep the meaning, each in a file of its own.

A pass module has `NAME`, a docstring that says what it looks for, and `run(graph) -> list[str]`,
which rewrites in place and names the nodes it made. Every pass can be switched off by name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from dataclasses import dataclass

from hornito.errors import UsageError
from hornito.graph.graph import Graph

ORDER = (
    "select_in_norm",
    "merge_qkv",
    "merge_gate_up",
    "activation_in_linear",
    "residual_in_linear",
    "residual_in_norm",
    "norm_in_linear",
    "append_in_linear",
)


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did: its name and the nodes it made; `matched` is None when switched off."""

    name: str
    matched: tuple[str, ...] | None


def pass_names() -> tuple[str, ...]:
    """Every pass, in the order in which they run."""
    return ORDER


def run_passes(graph: Graph, disabled: Collection[str] = ()) -> list[PassReport]:
    """Run every pass that is not disabled, then drop weights that nothing reads.

    Raises:
        UsageError: a disabled name is no pass.
    """
    unknown = sorted(set(disabled) - set(ORDER))
    if unknown:
        raise UsageError(f"no pass named {', '.join(unknown)}; there are: {', '.join(ORDER)}")
    reports = []
    for name in ORDER:
        if name in disabled:
            reports.append(PassReport(name, None))
            continue
        module = importlib.import_module(f"hornito.graph.passes.{name}")
        reports.append(PassReport(name, tuple(module.run(graph))))
    graph.drop_unused_weights()
    graph.check()
    return reports


def modules() -> tuple[str, ...]:
    """The pass modules that exist; a test holds ORDER to them."""
    return tuple(m.name for m in pkgutil.iter_modules(__path__))
