"""Evaluates an ONNX decoder once over descriptions of tensors, and so raises it to Hornito's ops.

Nothing is frozen first: the rows of a call and the length of the past stay symbols. Every node is
either computed (constants, shapes), or becomes part of a description that a later node turns into a
raised operation, or is not understood and refused by name.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hornito.graph.shapes import Dim
from hornito.importers.onnx import registry
from hornito.importers.onnx.affine import N, simplified
from hornito.importers.onnx.dag import Dag
from hornito.importers.onnx.reader import Branch, Model, OpNode
from hornito.importers.onnx.registry import Handler
from hornito.importers.onnx.roles import Roles, bind_inputs
from hornito.importers.onnx.values import (
    Choice,
    Const,
    Longer,
    Opaque,
    Rows,
    Unmatched,
    Value,
    columns,
)
from hornito.progress import Progress

_MALFORMED = (
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)


@cache
def handlers() -> dict[str, Handler]:
    """Every op that has a handler."""
    for name in registry.MODULES:
        importlib.import_module(f"hornito.importers.onnx.match.{name}")
    return registry.HANDLERS


@dataclass(slots=True)
class Lift:
    """The state of an evaluation.

    Attributes:
        env: what every value of the file is.
        makers: the index of the node that makes a value.
        nodes: nodes as evaluated, those of chosen branches included.
        dag: raised operations.
        found: how often each pattern was found.
        roles: what the inputs are.
        now: index of the node being evaluated.
        paired: raised values whose heads have their lanes in another order than the file's, and
            which: (lanes of a head, turned ones); only attention may read them.
    """

    model: Model
    roles: Roles
    env: dict[str, Value] = field(default_factory=dict)
    makers: dict[str, int] = field(default_factory=dict)
    nodes: list[OpNode] = field(default_factory=list)
    dag: Dag = field(default_factory=Dag)
    found: Counter[str] = field(default_factory=Counter)
    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    now: int = 0
    paired: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def past(self) -> Dim:
        """Positions before this call's rows: P, or 0 for a model without a past."""
        return self.roles.past

    @property
    def total(self) -> Dim:
        """Positions after this call."""
        return N + self.roles.past

    def root(self, index: int) -> int:
        """The node that made input `index` of the current node (itself when an input did)."""
        return self.makers.get(self.nodes[self.now].inputs[index], self.now)

    def note(self, pattern: str) -> None:
        """Counts a pattern that was found."""
        self.found[pattern] += 1

    # -- evaluation -------------------------------------------------------------------------

    def run(self, progress: Progress) -> None:
        """Evaluate every node."""
        self.env.update(self.model.constants)
        self.env.update(bind_inputs(self.model, self.roles))
        for node in self.model.nodes:
            self.step(node)
            progress.advance(1)

    def step(self, node: OpNode) -> None:
        """Evaluate one node; its results are in `env` afterwards."""
        self.now = len(self.nodes)
        self.nodes.append(node)
        index = self.now
        if node.op == "If" and node.domain in ("", "ai.onnx"):
            self._branch(node)
            return
        results = self._results(node, index)
        for name, value in zip(node.outputs, results, strict=False):
            if name and value is not None:
                self.env[name] = value
                self.makers[name] = index
        for name in node.outputs[len(results) :]:
            if name:
                self.env[name] = Opaque(index, f"{node.key} gives no such output")
                self.makers[name] = index

    def _results(self, node: OpNode, index: int) -> Sequence[Value | None]:
        inputs = [self.env[name] if name else None for name in node.inputs]
        for value in inputs:
            if isinstance(value, Opaque):
                return [value] * len(node.outputs)
        handler = handlers().get(node.key)
        try:
            if handler is None:
                raise Unmatched(f"the op {node.key} is not supported")
            result = handler(self, node, inputs)
        except Unmatched as error:
            return self._unknown(node, index, inputs, str(error))
        except _MALFORMED as error:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            return self._unknown(node, index, inputs, reason)
        results = list(result) if isinstance(result, list | tuple) else [result]
        return [_plain(value) for value in results]  # type: ignore[arg-type]

    def _unknown(
        self, node: OpNode, index: int, inputs: Sequence[Value | None], reason: str
    ) -> Sequence[Value | None]:
        """Stand-ins that let the evaluation go on, so that every such node is found at once."""
        rows = [value for value in inputs if isinstance(value, Rows)]
        first = rows[0] if rows else None
        alike = first is not None and all(r.shape == first.shape for r in rows)
        keeps_shape = node.key not in handlers() or node.key in registry.ELEMENTWISE
        single = keeps_shape and len(node.outputs) == 1
        if first is not None and alike and single and first.plain:
            sizes = first.terms[0].cols.shape
            # What an unsupported node's result flows into may not be understood for that alone.
            tainted = node.key in handlers() and any(
                self.dag.nodes[r.value].op in ("unsupported", "tainted") for r in rows
            )
            made = self.dag.emit(
                "tainted" if tainted else "unsupported",
                [r.value for r in rows],
                {"node": node.name, "source_op": node.key, "reason": reason, "at": index},
                width=first.terms[0].cols.size,
                root=index,
            )
            return [columns(made, sizes, first.axis, first.dim)]
        return [Opaque(index, reason)] * len(node.outputs)

    def _branch(self, node: OpNode) -> None:
        """An If: the branch of a known condition, or constants that depend on the length."""
        index = self.now
        condition = self.env[node.inputs[0]]
        then, other = node.attrs.get("then_branch"), node.attrs.get("else_branch")
        if not isinstance(then, Branch) or not isinstance(other, Branch):
            self._fail(node, "an If without two branches")
            return
        known = condition.scalar() if isinstance(condition, Const) else None
        if known is not None:
            self.note("branch resolved")
            results = self._inside(then if known else other)
        elif isinstance(condition, Longer):
            results = self._both(condition, then, other)
        else:
            self._fail(node, "an If whose condition depends on the call")
            return
        for name, value in zip(node.outputs, results, strict=False):
            self.env[name] = value
            self.makers[name] = index

    def _inside(self, branch: Branch) -> list[Value]:
        self.env.update(branch.constants)
        for inner in branch.nodes:
            self.step(inner)
        for name in branch.outputs:
            self.makers.setdefault(name, len(self.nodes) - 1)
        return [self.env[name] for name in branch.outputs]

    def _both(self, longer: Longer, then: Branch, other: Branch) -> list[Value]:
        results: list[Value] = []
        for yes, no in zip(self._inside(then), self._inside(other), strict=True):
            long, short = (no, yes) if longer.turned else (yes, no)
            if isinstance(long, Const) and isinstance(short, Const):
                results.append(Choice(longer.limit, short, long))
            else:
                results.append(Opaque(self.now, "the branches of an If are no constants"))
        return results

    def _fail(self, node: OpNode, reason: str) -> None:
        for name in filter(None, node.outputs):
            self.env[name] = Opaque(self.now, reason)
            self.makers[name] = self.now


def _plain(value: Value | None) -> Value | None:
    """Integers that turn out not to depend on the call, as such."""
    if isinstance(value, Const) and value.array.dtype == object:
        return Const(simplified(value.array), value.sources)
    return value
