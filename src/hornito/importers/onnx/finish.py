"""The lifted decoder as Hornito's graph, the one that a model builder would make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hornito.errors import UnsupportedError
from hornito.graph.graph import INT, Attr, Graph, Weight
from hornito.graph.shapes import S, T
from hornito.graph.weights import WeightData
from hornito.importers.onnx.coverage import Coverage, coverage, live_nodes, problems
from hornito.importers.onnx.dag import Dag, Raised
from hornito.importers.onnx.lift import Lift
from hornito.importers.onnx.naming import Names, name_all
from hornito.importers.onnx.roles import cache_place
from hornito.importers.onnx.values import Capped, Keys, Opaque, Past, Rows
from hornito.importers.source import SourceNode
from hornito.ops.gated_activation import ACTIVATIONS
from hornito.support import Problem, UnsupportedNodesError

#: Rows compared at a time when two tables are held against each other.
_CHUNK = 1 << 20


@dataclass(slots=True)
class Lifted:
    """A decoder found in an ONNX file, as raised operations with names.

    Attributes:
        head: the operation that makes the logits.
        nodes: by raised id; `attrs` may still be corrected by a config beside the file.
        tied: whether the head's table is the embedding.
    """

    dag: Dag
    nodes: dict[str, Raised]
    names: Names
    head: Raised
    found: Coverage
    tied: bool
    patterns: dict[str, int]
    warnings: list[str] = field(default_factory=list)

    def by_name(self) -> dict[str, Raised]:
        """Operations by role."""
        return {self.names.nodes[key]: node for key, node in self.nodes.items()}

    def attentions(self) -> list[Raised]:
        """The attentions, by layer."""
        found = [node for node in self.nodes.values() if node.op == "attention"]
        return sorted(found, key=lambda node: int(node.attrs["layer"]))  # type: ignore[arg-type]

    def build(self, dtype: str) -> Graph:
        """The graph before passes; matrices are stored as `dtype`."""
        graph = Graph()
        graph.add_input("ids", INT, (T,))
        graph.add_input("positions", INT, (T,))
        graph.add_input("selection", INT, (S,))
        final = self.head.inputs[0]
        norm = self.nodes[final]
        selects_norm = norm.op in ("rms_norm", "layer_norm") and "heads" not in norm.attrs
        for key in self.names.order:
            node = self.nodes[key]
            inputs = [self._declare(graph, name, dtype) for name in node.inputs]
            covers = self.found.covers[key]
            name = self.names.nodes[key]
            if node is self.head:
                if not selects_norm:
                    inputs[0] = graph.add("select_rows", "selected", [inputs[0], "selection"])
                graph.outputs = [graph.add("head", name, inputs, node.attrs, covers)]
                continue
            if key == final and selects_norm:
                inputs[0] = graph.add("select_rows", "selected", [inputs[0], "selection"])
            graph.add(node.op, name, inputs, node.attrs, covers)
        return graph

    def _declare(self, graph: Graph, name: str, dtype: str) -> str:
        """The name of an input in the graph; a weight is declared at its first use."""
        if name in self.names.nodes:
            return self.names.nodes[name]
        if name not in self.names.weights:
            return name
        label = self.names.weights[name]
        if label not in graph.weights:
            data = self.dag.weights[name]
            table = label.startswith("rope.")
            matrix = len(data.shape) == 2 and not table
            stored = dtype if matrix else "fp32"
            graph.add_weight(label, Weight(tuple(data.shape), stored, data, matrix))
        return label

    def source_nodes(self, listed: Sequence[tuple[str, str]]) -> tuple[SourceNode, ...]:
        """Every node of the file with the reason why it was folded, if it was."""
        return tuple(SourceNode(name, op, self.found.folded.get(name, "")) for name, op in listed)


def finish(cx: Lift) -> Lifted:
    """The decoder that a lifted file holds.

    Raises:
        UnsupportedNodesError: naming every node that has no counterpart.
        UnsupportedError: the file gives no logits.
    """
    where, total = str(cx.model.path), len(cx.model.source_nodes)
    named = [n for n in cx.model.outputs if n == "logits"]
    others = [n for n in cx.model.outputs if not isinstance(cx.env.get(n), Keys)]
    logits = [*named, *others, *cx.model.outputs][0]
    value = cx.env.get(logits)
    ends = [v.value for n in cx.model.outputs if isinstance(v := cx.env.get(n), Rows | Keys)]
    if isinstance(value, Capped):
        ends.append(value.x.value)
    found = problems(cx, live_nodes(cx.dag, ends))
    if found or value is None or isinstance(value, Opaque):
        raise UnsupportedNodesError(
            where, found or [Problem(logits, "output", "nothing makes it")], total
        )
    head = _head(cx, logits)
    _check_presents(cx, logits)
    live = live_nodes(cx.dag, [head.id])
    layers = [n.attrs["layer"] for n in live.values() if n.op == "attention"]
    if not layers:
        raise UnsupportedError(f"{where}: no attention was found: not a decoder")
    if len(set(layers)) != len(layers):
        raise UnsupportedError(f"{where}: two attentions read the cache of one layer")
    _cover_presents(cx, live)
    tied = _tie(cx.dag, live, head)
    covered = coverage(cx, live)
    missing = covered.problems + _without_kernel(cx, live)
    if missing:
        raise UnsupportedNodesError(where, missing, total)
    names = name_all(cx.dag, live, head)
    patterns = dict(sorted(cx.found.items()))
    lifted = Lifted(cx.dag, live, names, head, covered, tied, patterns, cx.warnings)
    lifted.build("fp32").check()  # shapes that do not fit end here, not when the package is made
    return lifted


def _without_kernel(cx: Lift, live: dict[str, Raised]) -> list[Problem]:
    """Activation functions that were understood, but that no kernel computes."""
    found = []
    for node in live.values():
        name = node.attrs.get("activation")
        if name is not None and name not in ACTIVATIONS:
            at = cx.nodes[max(node.roots)]
            reason = f"no kernel for the activation {name!r}; there are: {', '.join(ACTIVATIONS)}"
            found.append(Problem(at.name, at.key, reason))
    return found


def _head(cx: Lift, logits: str) -> Raised:
    """The operation that makes the logits, as a head."""
    end = cx.env[logits]
    cap = end.cap if isinstance(end, Capped) else 0.0
    value = end.x if isinstance(end, Capped) else end
    last = cx.nodes[cx.makers[logits]] if logits in cx.makers else None
    made = f" of node {last.name} ({last.op})" if last is not None else ""
    where = f"{cx.model.path}: output {logits}{made}"
    if not isinstance(value, Rows) or not value.plain or value.factor != 1.0:
        raise UnsupportedError(f"{where}: no plain product with a vocabulary's table")
    linear = cx.dag.nodes[value.value]
    cols = value.terms[0].cols.reshape(-1)
    whole = len(cols) == linear.width and bool((cols == np.arange(linear.width)).all())
    if linear.op != "linear" or not whole:
        raise UnsupportedError(f"{where}: made by {linear.op}, not by a vocabulary's table")
    if linear.inputs[2]:
        raise UnsupportedError(f"{where}: a head with a bias is not supported")
    attrs: dict[str, Attr] = {"softcap": cap} if cap else {}
    made = cx.dag.emit("head", linear.inputs[:2], attrs, width=linear.width, root=-1)
    head = cx.dag.nodes[made]
    head.roots = {cx.makers[logits], *linear.roots}
    return head


def _check_presents(cx: Lift, logits: str) -> None:
    """The model must give back what attention read: its past and the new keys and values."""
    for name in cx.model.outputs:
        value = cx.env.get(name)
        if name == logits:
            continue
        if isinstance(value, Keys):
            _check_present(cx, name, value)
            continue
        if cx.past == 0 and isinstance(value, Rows):
            continue
        raise UnsupportedError(
            f"{cx.model.path}: output {name} is neither logits nor a layer's cached keys or values"
        )


def _check_present(cx: Lift, name: str, value: Keys) -> None:
    """The next call reads an output as the past of its own layer, as it is."""
    if value.layer not in cx.roles.layers:
        return
    source = cx.roles.layers[value.layer][value.part]
    where = f"{cx.model.path}: output {name}, made by {cx.nodes[cx.makers[name]].name},"
    given, taken = cache_place(name), cache_place(source)
    if given is not None and given != taken:
        raise UnsupportedError(
            f"{where} is what {source} and the new rows make: the next call would read it as the "
            f"past {given[1]} of layer {given[0]}"
        )
    past = cx.env[source]
    same = (
        isinstance(past, Past) and past.axis == value.axis and np.array_equal(past.cols, value.cols)
    )
    if value.factor != 1.0 or not same:
        raise UnsupportedError(f"{where} is scaled, or laid out otherwise than its past {source}")


def _cover_presents(cx: Lift, live: dict[str, Raised]) -> None:
    """What lies between an append and the model's output (casts) belongs to the append."""
    appends = {node.attrs["layer"]: node for node in live.values() if node.op == "kv_append"}
    for name in cx.model.outputs:
        value = cx.env.get(name)
        if isinstance(value, Keys) and value.layer in appends:
            appends[value.layer].roots.add(cx.makers[name])


def _tie(dag: Dag, live: dict[str, Raised], head: Raised) -> bool:
    """Make the head read the embedding's table when both hold the same numbers."""
    embedding = next((n for n in live.values() if n.op == "embedding"), None)
    if embedding is None:
        return False
    mine, other = head.inputs[1], embedding.inputs[1]
    if mine != other:
        if not _equal(dag.weights[mine], dag.weights[other]):
            return False
        head.inputs = (head.inputs[0], other)
    return True


def _equal(a: WeightData, b: WeightData) -> bool:
    if a.shape != b.shape:
        return False
    step = max(1, _CHUNK // max(1, a.shape[1]))
    starts = range(0, a.shape[0], step)
    return all(
        np.array_equal(a.rows(i, min(i + step, a.shape[0])), b.rows(i, min(i + step, a.shape[0])))
        for i in starts
    )
