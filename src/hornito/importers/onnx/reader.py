"""ONNX files as lists of nodes: parsed, functions inlined, sorted, constants viewed in place."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hornito.errors import FormatError, UnsupportedError, UsageError
from hornito.importers.onnx.tensors import TensorReader
from hornito.importers.onnx.values import Const
from hornito.importers.onnx.wire import parse_file

OPSETS = range(13, 25)
#: Domains whose ops are known by name.
STANDARD = frozenset({"", "ai.onnx"})
CONTRIB = "com.microsoft"
#: Nested functions and branches deeper than this are no model.
MAX_DEPTH = 16
MAX_NODES = 2_000_000


@dataclass(frozen=True, slots=True)
class Branch:
    """A subgraph of an If: its nodes, its constants, its results."""

    nodes: tuple[OpNode, ...]
    constants: Mapping[str, Const]
    outputs: tuple[str, ...]
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpNode:
    """One ONNX node. `source` is the node of the file that it came from."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    source: str

    @property
    def key(self) -> str:
        """`Add`, or `com.microsoft:MatMulNBits`."""
        return self.op if self.domain in STANDARD else f"{self.domain}:{self.op}"


@dataclass(slots=True)
class Model:
    """A parsed file. Shapes of inputs hold numbers and names, and are not to be trusted."""

    path: Path
    opset: int
    ir: int
    nodes: list[OpNode]
    constants: dict[str, Const]
    inputs: dict[str, tuple[int | str, ...]]
    outputs: list[str]
    producer: str = ""
    files: set[str] = field(default_factory=set)
    source_nodes: list[tuple[str, str]] = field(default_factory=list)


def import_onnx() -> Any:
    """The `onnx` package, or a UsageError that says how to get it."""
    try:
        import onnx
    except ImportError as error:
        raise UsageError(
            "ONNX files need the package 'onnx': pip install 'hornito[onnx]'"
        ) from error
    return onnx


def read_model(path: Path) -> Model:
    """Parse an ONNX file; external data are mapped, not read.

    Raises:
        UsageError: the `onnx` package is missing.
        FormatError: the file is malformed, or a tensor's data are missing or short.
        UnsupportedError: an opset or a construct that Hornito does not read.
    """
    onnx = import_onnx()
    proto = onnx.ModelProto()
    parse_file(path, proto)
    graph = proto.graph
    if not graph.node or not graph.output:
        raise FormatError(f"{path}: not an ONNX model: it has no graph")
    opset = max((o.version for o in proto.opset_import if o.domain in STANDARD), default=0)
    if opset not in OPSETS:
        raise UnsupportedError(
            f"{path}: opset {opset}; supported are {OPSETS.start} to {OPSETS.stop - 1}. "
            "Export the model again with a newer opset"
        )
    reader = TensorReader(path, onnx)
    parser = _Parser(path, onnx, proto, reader, branches_apart=True)
    constants = parser.initialisers(graph)
    nodes = parser.nodes(graph.node, depth=0)
    model = Model(
        path=path,
        opset=opset,
        ir=proto.ir_version,
        nodes=nodes,
        constants=constants,
        inputs={i.name: _declared(i) for i in graph.input if i.name not in constants},
        outputs=[o.name for o in graph.output],
        producer=f"{proto.producer_name} {proto.producer_version}".strip(),
        files=reader.files,
        source_nodes=parser.listed,
    )
    model.nodes = sorted_nodes(path, nodes, {*model.inputs, *constants})
    return model


def read_graph(
    path: Path, onnx: Any, proto: Any, known: Iterable[str]
) -> tuple[list[OpNode], dict[str, Const]]:
    """The sorted nodes and the initialisers of a parsed model, of whatever opset.

    Args:
        path: where external data lie beside, and the name in errors.
        known: names of the graph's inputs.

    Raises:
        FormatError, UnsupportedError: as `read_model`.
    """
    parser = _Parser(path, onnx, proto, TensorReader(path, onnx), branches_apart=False)
    constants = parser.initialisers(proto.graph)
    nodes = parser.nodes(proto.graph.node, depth=0)
    return sorted_nodes(path, nodes, {*known, *constants}), constants


def _declared(value: Any) -> tuple[int | str, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(d.dim_param or (d.dim_value if d.HasField("dim_value") else "?") for d in dims)


class _Parser:
    """Turns protobuf nodes into `OpNode`s, with functions inlined.

    Attributes:
        listed: name and op of every node of the file. Nodes of functions are their call; those of
            branches are their own with `branches_apart`, else the node with the branch.
    """

    def __init__(
        self, path: Path, onnx: Any, proto: Any, reader: TensorReader, *, branches_apart: bool
    ) -> None:
        self.path = path
        self.onnx = onnx
        self.reader = reader
        self.functions = {(f.domain, f.name): f for f in proto.functions}
        self.branches_apart = branches_apart
        self.listed: list[tuple[str, str]] = []
        self.count = 0

    def label(self, node: Any, index: int) -> str:
        """The node's name, or one made from its first result: names may be missing."""
        return str(node.name or (node.output[0] if node.output else f"{node.op_type}_{index}"))

    def initialisers(self, graph: Any) -> dict[str, Const]:
        found: dict[str, Const] = {}
        for tensor in graph.initializer:
            if tensor.name in found:
                raise FormatError(f"{self.path}: two initialisers named {tensor.name!r}")
            found[tensor.name] = self.reader.const(tensor)
        if graph.sparse_initializer:
            raise UnsupportedError(f"{self.path}: sparse initialisers are not supported")
        return found

    def nodes(
        self, protos: Iterable[Any], depth: int, source: str = "", prefix: str = ""
    ) -> list[OpNode]:
        if depth > MAX_DEPTH:
            raise FormatError(f"{self.path}: functions or branches nest deeper than {MAX_DEPTH}")
        result: list[OpNode] = []
        for index, proto in enumerate(protos):
            self.count += 1
            if self.count > MAX_NODES:
                raise FormatError(f"{self.path}: more than {MAX_NODES} nodes")
            label = prefix + self.label(proto, index)
            if not source:
                self.listed.append((label, str(proto.op_type)))
            node = OpNode(
                op=proto.op_type,
                domain=proto.domain,
                name=label,
                inputs=tuple(proto.input),
                outputs=tuple(proto.output),
                attrs={a.name: self.attribute(a, depth, source or label) for a in proto.attribute},
                source=source or label,
            )
            function = self.functions.get((node.domain, node.op))
            if function is None or self.known(node):
                result.append(node)
            else:
                result += self.inlined(node, function, depth)
        return result

    def known(self, node: OpNode) -> bool:
        """Whether a function's op has a matcher of its own, so that its body is not needed."""
        from hornito.importers.onnx.lift import handlers

        return node.domain in (*STANDARD, CONTRIB) and node.key in handlers()

    def attribute(self, attribute: Any, depth: int, source: str) -> Any:
        kinds = self.onnx.AttributeProto
        if attribute.ref_attr_name:
            return _Reference(attribute.ref_attr_name)
        if attribute.type == kinds.TENSOR:
            return self.reader.const(attribute.t, attribute.name)
        if attribute.type == kinds.GRAPH:
            graph = attribute.g
            constants = self.initialisers(graph)
            apart = f"{source}/{attribute.name}/" if self.branches_apart else ""
            nodes = self.nodes(graph.node, depth + 1, "" if apart else source, apart)
            inputs, outputs = (tuple(v.name for v in side) for side in (graph.input, graph.output))
            return Branch(tuple(nodes), constants, outputs, inputs)
        if attribute.type == kinds.FLOAT:
            return float(attribute.f)
        if attribute.type == kinds.INT:
            return int(attribute.i)
        if attribute.type == kinds.STRING:
            return attribute.s.decode("utf-8", "replace")
        if attribute.type == kinds.INTS:
            return list(attribute.ints)
        if attribute.type == kinds.FLOATS:
            return list(attribute.floats)
        if attribute.type == kinds.STRINGS:
            return [s.decode("utf-8", "replace") for s in attribute.strings]
        return None

    def inlined(self, call: OpNode, function: Any, depth: int) -> list[OpNode]:
        """The body of a model-local function with the call's names put in."""
        names = dict(zip(function.input, call.inputs, strict=False))
        names.update(zip(function.output, call.outputs, strict=False))
        defaults = {a.name: self.attribute(a, depth, call.source) for a in function.attribute_proto}
        given = {**defaults, **call.attrs}
        for absent in list(function.input)[len(call.inputs) :]:
            names[absent] = ""

        def rename(name: str) -> str:
            return names.get(name, f"{call.name}//{name}") if name else ""

        body = self.nodes(function.node, depth + 1, call.source)
        return [
            replace(
                node,
                name=f"{call.name}/{node.name}",
                inputs=tuple(map(rename, node.inputs)),
                outputs=tuple(map(rename, node.outputs)),
                attrs=_resolved(node.attrs, given),
            )
            for node in body
        ]


@dataclass(frozen=True, slots=True)
class _Reference:
    """An attribute of a function's node that is the call's."""

    name: str


def _resolved(attrs: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    out = {}
    for name, value in attrs.items():
        if isinstance(value, _Reference):
            if value.name in given:
                out[name] = given[value.name]
        else:
            out[name] = value
    return out


def sorted_nodes(path: Path, nodes: list[OpNode], known: set[str]) -> list[OpNode]:
    """The nodes in an order in which every input is made before it is read.

    Files of some converters are not in order. Those that are keep their order.

    Raises:
        FormatError: a cycle, a value made twice, or one that nothing makes.
    """
    makers: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for name in filter(None, node.outputs):
            if name in makers or name in known:
                raise FormatError(f"{path}: two nodes make the value {name!r}")
            makers[name] = i
    waiting = [0] * len(nodes)
    readers: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        for name in free_names(node):
            if name in makers:
                waiting[i] += 1
                readers[makers[name]].append(i)
            elif name not in known:
                raise FormatError(f"{path}: node {node.name} reads {name!r}, which nothing makes")
    ready = [i for i, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[OpNode] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(nodes[i])
        for j in readers[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(ready, j)
    if len(order) != len(nodes):
        stuck = next(n.name for n, count in zip(nodes, waiting, strict=True) if count)
        raise FormatError(f"{path}: the graph has a cycle through node {stuck}")
    return order


def free_names(node: OpNode) -> set[str]:
    """Names that a node reads, those of its branches included."""
    names = {name for name in node.inputs if name}
    for value in node.attrs.values():
        if isinstance(value, Branch):
            made = {*value.constants, *value.inputs}
            for inner in value.nodes:
                names |= free_names(inner) - made
                made |= set(inner.outputs)
            names |= {name for name in value.outputs if name not in made}
    return names
