"""The support report: for every node of a source, what runs it on the GPU, or why nothing does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hornito.errors import FormatError, UnsupportedError
from hornito.graph.graph import Graph
from hornito.importers.source import SourceNode
from hornito.ops import registry

SUPPORTED, UNSUPPORTED = "SUPPORTED", "UNSUPPORTED"
BACKEND = "vulkan"
#: Nodes that an error names; the report has all.
SHOWN = 12


@dataclass(frozen=True, slots=True)
class Problem:
    """A node of a source that has no counterpart."""

    node: str
    op: str
    reason: str


class UnsupportedNodesError(UnsupportedError):
    """Nodes of a source that Hornito can't run, all of them.

    Attributes:
        problems: every one, in the source's order.
        nodes: how many nodes the source has.
    """

    def __init__(self, where: str, problems: Sequence[Problem], nodes: int) -> None:
        self.problems = list(problems)
        self.nodes = nodes
        lines = [f"  {p.node} ({p.op}): {p.reason}" for p in problems[:SHOWN]]
        if len(problems) > SHOWN:
            lines.append(f"  and {len(problems) - SHOWN} more (hornito check lists all)")
        count = f"{len(problems)} node{'' if len(problems) == 1 else 's'}"
        super().__init__(f"{where}: {count} can't run on the GPU:\n" + "\n".join(lines))


def support_report(
    graph: Graph,
    nodes: Sequence[SourceNode],
    *,
    before: int,
    passes: Mapping[str, int | None],
    patterns: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The report of a graph after passes. Every op in it has kernels: the registry refuses others.

    Args:
        nodes: of the source, when it is a graph itself (ONNX); coverage is counted in them.
        before: nodes of the graph before passes.
        passes: matches by pass, None when switched off.
        patterns: what was recognised in the source, and how often.

    Raises:
        FormatError: a node of the source is neither raised nor folded.
    """
    stands_for: dict[str, list[str]] = {}
    ops: dict[str, str] = {}
    for node in graph:
        registry.op(node.op)
        ops[node.name] = node.op
        for name in dict.fromkeys(node.covers):
            stands_for.setdefault(name, []).append(node.name)
    rows = []
    for source in nodes:
        into = stands_for.get(source.name, [])
        if not into and not source.folded:
            raise FormatError(f"node {source.name} ({source.op}) is neither raised nor folded")
        rows.append(
            {
                "name": source.name,
                "op": source.op,
                "raised_into": into,
                "kernels": list(dict.fromkeys(ops[name] for name in into)),
                "backend": BACKEND if into else "none",
                "reason": "" if into else f"folded at import: {source.folded}",
            }
        )
    raised = sum(bool(row["raised_into"]) for row in rows)
    return {
        "verdict": SUPPORTED,
        "backend": BACKEND,
        "summary": {
            "source_nodes": len(rows),
            "raised": raised,
            "folded": len(rows) - raised,
            "unsupported": 0,
            "coverage": 1.0,
            "graph_nodes_before_passes": before,
            "graph_nodes": len(graph.nodes),
            "graph_nodes_per_layer": nodes_per_layer(graph),
        },
        "patterns": dict(patterns or {}),
        "passes": dict(passes),
        "nodes": [
            {"name": n.name, "op": n.op, "backend": BACKEND, "covers": list(n.covers)}
            for n in graph
        ],
        "source_nodes": rows,
    }


def nodes_per_layer(graph: Graph) -> int:
    """Nodes of the largest layer; those of a layer are named `layerN.*`."""
    layers = Counter(node.name.partition(".")[0] for node in graph if node.name.startswith("layer"))
    return max(layers.values(), default=0)


def unsupported_report(error: UnsupportedError) -> dict[str, Any]:
    """The report of a source that was refused."""
    problems = error.problems if isinstance(error, UnsupportedNodesError) else []
    total = error.nodes if isinstance(error, UnsupportedNodesError) else 0
    return {
        "verdict": UNSUPPORTED,
        "backend": BACKEND,
        "summary": {"source_nodes": total, "unsupported": len(problems)},
        "message": str(error),
        "source_nodes": [
            {
                "name": p.node,
                "op": p.op,
                "raised_into": [],
                "kernels": [],
                "backend": "none",
                "reason": p.reason,
            }
            for p in problems
        ],
    }


def missing(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """`(name, op, reason)` of the nodes of a report that nothing runs.

    Raises:
        FormatError: it is no support report.
    """
    rows, verdict = report.get("source_nodes"), report.get("verdict")
    if not isinstance(rows, list) or verdict not in (SUPPORTED, UNSUPPORTED):
        raise FormatError("not a support report: it has no verdict or no source_nodes")
    found = []
    for row in rows:
        if not isinstance(row, dict):
            raise FormatError("not a support report: a source node is no object")
        folded = str(row.get("reason", "")).startswith("folded at import")
        if row.get("backend") != BACKEND and not folded:
            found.append((str(row.get("name")), str(row.get("op")), str(row.get("reason"))))
    for row in report.get("nodes", []):
        if not isinstance(row, dict) or row.get("backend") != BACKEND:
            name = row.get("name") if isinstance(row, dict) else row
            found.append((str(name), "", "its backend is not vulkan"))
    return found
