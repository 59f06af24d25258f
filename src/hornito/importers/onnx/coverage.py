"""Which nodes of the file each raised operation stands for, and what became of all others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hornito.importers.onnx.dag import Dag, Raised
from hornito.importers.onnx.lift import Lift
from hornito.importers.onnx.values import Const, Matrix, Opaque
from hornito.support import Problem


@dataclass(slots=True)
class Coverage:
    """By raised id, the nodes that it stands for; the reasons of folded ones; what is left."""

    covers: dict[str, list[str]] = field(default_factory=dict)
    folded: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def live_nodes(dag: Dag, ends: Iterable[str]) -> dict[str, Raised]:
    """The operations that some end needs."""
    found: dict[str, Raised] = {}
    stack = list(ends)
    while stack:
        name = stack.pop()
        if name in dag.nodes and name not in found:
            found[name] = dag.nodes[name]
            stack += dag.nodes[name].inputs
    return found


def coverage(cx: Lift, live: dict[str, Raised]) -> Coverage:
    """Walks back from every raised operation to those before it, and names what lies between."""
    result = Coverage()
    roots = {index for node in live.values() for index in node.roots}
    seen: set[int] = set()
    for raised in live.values():
        found = _between(cx, raised, roots)
        seen |= found
        names = dict.fromkeys(cx.nodes[i].source for i in sorted(found))
        result.covers[raised.id] = list(names)
    evaluated = {node.source for node in cx.nodes}
    for name, _ in cx.model.source_nodes:
        if name not in evaluated:
            result.folded[name] = "in a branch that is not taken"
    reached = _reached(cx)
    covered = {cx.nodes[i].source for i in seen}
    for index, node in enumerate(cx.nodes):
        if node.source in covered:
            continue
        if _is_number(cx, index):
            constant = node.op == "Constant"
            result.folded[node.source] = "constant" if constant else "constants and sizes, computed"
        elif node.op == "If":
            result.folded[node.source] = "its condition is known"
        elif index not in reached:
            result.folded.setdefault(node.source, "only its shape is used, or nothing of it")
        else:
            reason = "its result is used in a way that is not understood"
            result.problems.append(Problem(node.source, node.key, reason))
    result.problems = [p for p in result.problems if p.node not in result.folded]
    return result


def _between(cx: Lift, node: Raised, roots: set[int]) -> set[int]:
    found: set[int] = set()
    stack = [i for i in node.roots if i >= 0]
    while stack:
        index = stack.pop()
        if index in found:
            continue
        found.add(index)
        for name in cx.nodes[index].inputs:
            maker = cx.makers.get(name)
            if maker is None or isinstance(cx.env[name], Const | Matrix):
                continue
            if maker not in roots or maker in node.roots:
                stack.append(maker)
    return found


def _is_number(cx: Lift, index: int) -> bool:
    """Whether all results of a node are numbers known at import."""
    values = [cx.env[name] for name in cx.nodes[index].outputs if name in cx.env]
    return bool(values) and all(isinstance(v, Const | Matrix) for v in values)


def _reached(cx: Lift) -> set[int]:
    """Nodes whose results (not only sizes) some output of the model needs."""
    found: set[int] = set()
    stack = [cx.makers[name] for name in cx.model.outputs if name in cx.makers]
    while stack:
        index = stack.pop()
        if index in found:
            continue
        found.add(index)
        for name in cx.nodes[index].inputs:
            maker = cx.makers.get(name)
            if maker is not None and not isinstance(cx.env[name], Const | Matrix):
                stack.append(maker)
    return found


def problems(cx: Lift, live: dict[str, Raised]) -> list[Problem]:
    """Nodes that were not understood: those that lie before an output."""
    found: dict[int, Problem] = {}
    needed = _reached(cx)
    for node in cx.dag.nodes.values():
        if node.op != "unsupported":
            continue
        facts = node.attrs
        index = int(facts["at"])  # type: ignore[arg-type]
        if node.id in live or index in needed:
            found[index] = Problem(
                str(facts["node"]), str(facts["source_op"]), str(facts["reason"])
            )
    for value in cx.env.values():
        if isinstance(value, Opaque) and value.node in needed:
            node_at = cx.nodes[value.node]
            found[value.node] = Problem(node_at.name, node_at.key, value.reason)
    for name in cx.model.outputs:
        end = cx.env.get(name)
        if isinstance(end, Opaque) and end.node < 0:
            found[-1] = Problem(name, "output", f"it needs {end.reason}, which has no role here")
    return [found[i] for i in sorted(found)]
