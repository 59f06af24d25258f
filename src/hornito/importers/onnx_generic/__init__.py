"""ONNX models of known ops as tensor graphs with static shapes: encoders, single ops, anything
that is no decoder with a cache.

Named dims are bound at compile time, shape arithmetic folds to numbers, and every remaining node
becomes kernels. A node without a handler is refused by name, with all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hornito.errors import FormatError, UnsupportedError, UsageError
from hornito.importers.onnx.reader import OpNode, import_onnx, read_graph
from hornito.importers.onnx.wire import parse_file
from hornito.importers.onnx_generic.builder import Builder, NeedsValue, Ref, known
from hornito.importers.onnx_generic.elementwise import const_ref
from hornito.importers.onnx_generic.table import handlers, type_name
from hornito.importers.source import SourceNode
from hornito.support import Problem, UnsupportedNodesError
from hornito.tensor.graph import Array, TensorGraph

OPSETS = range(13, 29)

__all__ = [
    "Binding",
    "GenericModel",
    "NeedsValue",
    "Parsed",
    "bind_to",
    "import_generic",
    "parse",
    "symbolic_dims",
]

Dims = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """What the caller fixes at compile time.

    Attributes:
        dims: numbers of named dims.
        shapes: whole shapes of inputs.
        values: numbers of inputs that shapes depend on; they are inputs no more.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    values: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A file before its dims are bound. `inputs` and `outputs` hold type numbers and dims."""

    path: Path
    opset: int
    nodes: list[OpNode]
    constants: dict[str, Ref]
    inputs: dict[str, tuple[int, Dims]]
    outputs: list[str]
    source_nodes: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class GenericModel:
    """A tensor graph, and what became of every node of the file."""

    graph: TensorGraph
    nodes: list[SourceNode]
    opset: int


def parse(path: Path, proto: Any = None, opsets: range = OPSETS) -> Parsed:
    """Parse a file, or take a parsed ModelProto.

    Args:
        opsets: those to accept; older ones than `OPSETS` are right only for ops whose meaning has
            not changed since.

    Raises:
        FormatError: the file is malformed.
        UnsupportedError: an opset, a type or a construct that Hornito does not read.
    """
    onnx = import_onnx()
    if proto is None:
        proto = onnx.ModelProto()
        parse_file(path, proto)
    graph = proto.graph
    if not graph.node and not graph.output:
        raise FormatError(f"{path}: not an ONNX model: it has no graph")
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if opset not in opsets:
        raise UnsupportedError(
            f"{path}: opset {opset}; supported are {opsets.start} to {opsets.stop - 1}. "
            "Export the model again with a newer opset"
        )
    own = {t.name for t in graph.initializer}
    inputs = {}
    for value in graph.input:
        if value.name in own:
            continue
        if not value.type.HasField("tensor_type"):
            raise UnsupportedError(f"{path}: input {value.name!r} is no tensor")
        tensor = value.type.tensor_type
        dims = tuple(
            d.dim_param or (int(d.dim_value) if d.HasField("dim_value") else f"{value.name}.{i}")
            for i, d in enumerate(tensor.shape.dim)
        )
        inputs[value.name] = (int(tensor.elem_type), dims)
    nodes, constants = read_graph(path, onnx, proto, inputs)
    labels = [(n.name or next(iter(n.output), n.op_type), n.op_type) for n in graph.node]
    return Parsed(
        path,
        opset,
        nodes,
        {name: const_ref(value) for name, value in constants.items()},
        inputs,
        [o.name for o in graph.output],
        labels,
    )


def symbolic_dims(parsed: Parsed) -> dict[str, list[str]]:
    """Named dims of the inputs, each with the places `input[axis]` where it stands."""
    found: dict[str, list[str]] = {}
    for name, (_, dims) in parsed.inputs.items():
        for axis, dim in enumerate(dims):
            if isinstance(dim, str):
                found.setdefault(dim, []).append(f"{name}[{axis}]")
    return found


def import_generic(parsed: Parsed, binding: Binding) -> GenericModel:
    """Bind the dims and build the tensor graph.

    Raises:
        UsageError: a dim is not bound, or a binding names nothing; says which and how.
        NeedsValue: a shape depends on an input's numbers.
        UnsupportedNodesError: nodes that have no kernel, all of them.
    """
    shapes = _bound(parsed, binding)
    b = Builder()
    env: dict[str, Ref] = dict(parsed.constants)
    for name, (number, _) in parsed.inputs.items():
        dtype = type_name(number)
        if name in binding.values:
            env[name] = known(np.asarray(binding.values[name]), dtype)
        else:
            env[name] = b.input(name, dtype, shapes[name])
    problems = []
    for node in parsed.nodes:
        try:
            _add(b, node, env)
        except NeedsValue:
            raise
        except UnsupportedError as error:
            if not isinstance(error, _Skipped):
                problems.append(Problem(node.name, node.key, str(error)))
    if problems:
        raise UnsupportedNodesError(str(parsed.path), problems, len(parsed.source_nodes))
    for name in parsed.outputs:
        if name not in env:
            raise FormatError(f"{parsed.path}: nothing makes the output {name!r}")
        b.graph.outputs[name] = b.place(env[name])
    b.graph.drop_unused()
    b.graph.check()
    return GenericModel(b.graph, _covered(parsed, b.graph), parsed.opset)


def bind_to(
    parsed: Parsed, arrays: Mapping[str, Array], dims: Mapping[str, int] | None = None
) -> GenericModel:
    """The model for inputs of these shapes; inputs that shapes depend on become constants.

    Args:
        dims: numbers that named dims must have, too.

    Raises:
        UsageError, UnsupportedError: as `import_generic`; also a missing or unknown input.
    """
    names = set(parsed.inputs)
    if names != set(arrays):
        raise UsageError(
            f"{parsed.path} takes the inputs {', '.join(sorted(names))}; given were "
            f"{', '.join(sorted(arrays)) or 'none'}"
        )
    values: dict[str, Array] = {}
    while True:
        shapes = {n: tuple(a.shape) for n, a in arrays.items() if n not in values}
        try:
            return import_generic(parsed, Binding(dims or {}, shapes, values))
        except NeedsValue as error:
            values.update((name, arrays[name]) for name in error.inputs)


class _Skipped(UnsupportedError):
    """An operand comes from a node that was refused already."""


def _add(b: Builder, node: OpNode, env: dict[str, Ref]) -> None:
    handler = handlers().get(node.key)
    if handler is None:
        raise UnsupportedError(f"no kernel for {node.key}; there are: {', '.join(handlers())}")
    if any(name and name not in env for name in node.inputs):
        raise _Skipped("an operand is missing")
    b.source = node.source
    operands = [env[name] if name else None for name in node.inputs]
    try:
        results = handler(b, node, operands)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedError(
            f"its operands {[(r.dtype, r.shape) for r in operands if r]} do not fit: {error}"
        ) from error
    for name, result in zip(node.outputs, results, strict=False):
        if name:
            env[name] = result
    wanted = [name for name in node.outputs[len(results) :] if name]
    if wanted:
        raise UnsupportedError(f"its result {wanted[0]!r} is not supported")


def _bound(parsed: Parsed, binding: Binding) -> dict[str, tuple[int, ...]]:
    """Shapes of all inputs."""
    symbols = symbolic_dims(parsed)
    for name in binding.dims:
        if name not in symbols:
            raise UsageError(
                f"--dim {name}: no such dim; there are: {', '.join(symbols) or 'none'}"
            )
    for name in (*binding.shapes, *binding.values):
        if name not in parsed.inputs:
            raise UsageError(f"no input named {name!r}; there are: {', '.join(parsed.inputs)}")
    dims = dict(binding.dims)
    for name, shape in binding.shapes.items():
        declared = parsed.inputs[name][1]
        if len(shape) != len(declared):
            raise UsageError(f"--shape {name}: {len(shape)} dims; the input has {len(declared)}")
        for axis, (dim, given) in enumerate(zip(declared, shape, strict=True)):
            stated = dims.setdefault(dim, given) if isinstance(dim, str) else dim
            if stated != given:
                raise UsageError(f"--shape {name}: axis {axis} is {given}, elsewhere {stated}")
    free = {
        dim: places
        for dim, places in symbols.items()
        if dim not in dims and any(p.rsplit("[", 1)[0] not in binding.values for p in places)
    }
    if free:
        lines = [f"  {dim}: {', '.join(places)}" for dim, places in free.items()]
        options = " ".join(f"--dim {dim}=N" for dim in free)
        raise UsageError(
            f"{parsed.path}: dims without a number; compile with {options}:\n" + "\n".join(lines)
        )
    return {
        name: tuple(dims.get(d, 0) if isinstance(d, str) else d for d in declared)
        for name, (_, declared) in parsed.inputs.items()
    }


def _covered(parsed: Parsed, graph: TensorGraph) -> list[SourceNode]:
    made = {node.source for node in graph.nodes}
    return [
        SourceNode(name, op, "" if name in made else "known numbers, or a view of its operand")
        for name, op in parsed.source_nodes
    ]
