"""The typed SSA graph between importers and plans.

A `Graph` is a list of nodes in execution order. A node's inputs name graph inputs, results of
earlier nodes, weights, or nothing (`""`, an optional input that is absent). Weights stay lazy until
they are written. What an op means (shape rule, reference, kernels) lives in `hornito.ops`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hornito.errors import FormatError, UnsupportedError
from hornito.graph.shapes import Shape, dim_from_json, dim_to_json

if TYPE_CHECKING:
    from hornito.graph.weights import WeightData

Attr = int | float | str | bool | tuple[int, ...]

FLOAT = "fp32"
INT = "int32"
# The order of writes to and reads of a layer's KV cache is carried by values of this type; they
# have no bytes.
CACHE = "cache"


@dataclass(frozen=True, slots=True)
class Value:
    """A result or an input: its type and symbolic shape."""

    dtype: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `covers` names the source nodes or tensors that it stands for, `fused` the
    results of nodes that it took the place of and that no longer exist."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    covers: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()

    def attr(self, name: str) -> Any:
        """The attribute `name`.

        Raises:
            FormatError: the node lacks it.
        """
        if name not in self.attrs:
            raise FormatError(f"node {self.name} ({self.op}) lacks the attribute {name}")
        return self.attrs[name]

    def attr_or(self, name: str, default: Attr) -> Any:
        """The attribute `name`, or a default where it is optional."""
        return self.attrs.get(name, default)

    def optional(self, index: int) -> str:
        """Input `index`, or `""` when it is absent or past the end."""
        return self.inputs[index] if index < len(self.inputs) else ""


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant tensor: shape, storage type, and (before writing) where its data come from.

    `dtype` is the storage type in the package, a name of `hornito.quant.formats`. `matrix` weights
    take the storage type that the user asked for; the others (norms, biases, tables of frequencies)
    stay fp32.
    """

    shape: tuple[int, ...]
    dtype: str
    data: WeightData | None = None
    matrix: bool = False


class Graph:
    """Nodes, values and weights; see the module's text."""

    def __init__(self) -> None:
        self.inputs: dict[str, Value] = {}
        self.outputs: list[str] = []
        self.nodes: list[Node] = []
        self.values: dict[str, Value] = {}
        self.weights: dict[str, Weight] = {}

    # -- building ---------------------------------------------------------------------------

    def add_input(self, name: str, dtype: str, shape: Shape) -> str:
        """Declare a graph input and return its name."""
        self.inputs[name] = self.values[name] = Value(dtype, shape)
        return name

    def add_weight(self, name: str, weight: Weight) -> str:
        """Declare a weight and return its name."""
        if name in self.weights:
            raise FormatError(f"weight {name} is declared twice")
        self.weights[name] = weight
        return name

    def add(
        self,
        op: str,
        name: str,
        inputs: Sequence[str],
        attrs: Mapping[str, Attr] | None = None,
        covers: Sequence[str] = (),
    ) -> str:
        """Append a node with one result, named like the node, and return that name."""
        return self.append(Node(op, name, tuple(inputs), (name,), dict(attrs or {}), tuple(covers)))

    def append(self, node: Node) -> str:
        """Append a node, infer its results' types, and return its first result's name."""
        from hornito.ops import registry

        for name, value in zip(node.outputs, registry.op(node.op).infer(self, node), strict=True):
            if name in self.values:
                raise FormatError(f"value {name} has two producers")
            self.values[name] = value
        self.nodes.append(node)
        return node.outputs[0]

    # -- queries ----------------------------------------------------------------------------

    def shape(self, name: str) -> Shape:
        """The shape of a value or weight."""
        if name in self.weights:
            return self.weights[name].shape
        if name not in self.values:
            raise FormatError(f"the graph has no value or weight named {name!r}")
        return self.values[name].shape

    def producer(self, name: str) -> Node | None:
        """The node that makes `name`, or None for inputs and weights."""
        for node in self.nodes:
            if name in node.outputs:
                return node
        return None

    def consumers(self, name: str) -> list[Node]:
        """The nodes that read `name`, in order."""
        return [node for node in self.nodes if name in node.inputs]

    def is_private(self, name: str) -> bool:
        """Whether exactly one node reads `name` and it is no graph output."""
        return len(self.consumers(name)) == 1 and name not in self.outputs

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    # -- editing ----------------------------------------------------------------------------

    def replace_nodes(self, old: Sequence[Node], new: Sequence[Node]) -> None:
        """Put `new` where the last of `old` stands, and remove `old`.

        `new` must make every result of `old` that is still read elsewhere. The other results are
        noted as `fused` in every new node.
        """
        from hornito.ops import registry

        made = {name for node in new for name in node.outputs}
        lost = [name for node in old for name in (*node.fused, *node.outputs) if name not in made]
        new = [replace(n, fused=tuple(dict.fromkeys((*n.fused, *lost)))) for n in new]

        gone = {id(node) for node in old}
        last = max(i for i, node in enumerate(self.nodes) if id(node) in gone)
        for node in old:
            for name in node.outputs:
                self.values.pop(name, None)
        for node in new:
            inferred = registry.op(node.op).infer(self, node)
            self.values.update(zip(node.outputs, inferred, strict=True))
        before = [node for node in self.nodes[:last] if id(node) not in gone]
        self.nodes = [*before, *new, *self.nodes[last + 1 :]]

    def drop_unused_weights(self) -> None:
        """Forget weights that no node reads."""
        used = {name for node in self.nodes for name in node.inputs}
        self.weights = {k: w for k, w in self.weights.items() if k in used}

    def check(self) -> None:
        """Verify that every input is defined before use and every type rule holds.

        Raises:
            FormatError: naming the node at fault.
        """
        from hornito.ops import registry

        known = set(self.inputs) | set(self.weights) | {""}
        for node in self.nodes:
            for name in node.inputs:
                if name not in known:
                    raise FormatError(f"node {node.name} ({node.op}) reads unknown {name!r}")
            inferred = registry.op(node.op).infer(self, node)
            for name, value in zip(node.outputs, inferred, strict=True):
                if self.values[name] != value:
                    raise FormatError(
                        f"node {node.name}: {name} is declared {self.values[name]}, not {value}"
                    )
            known.update(node.outputs)
        for name in self.outputs:
            if name not in known:
                raise FormatError(f"graph output {name!r} is made by no node")

    # -- JSON -------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The graph without weight data, as plain JSON types."""
        return {
            "inputs": {k: _value_to_json(v) for k, v in self.inputs.items()},
            "outputs": list(self.outputs),
            "nodes": [
                {
                    "op": n.op,
                    "name": n.name,
                    "inputs": list(n.inputs),
                    "outputs": list(n.outputs),
                    "attrs": {
                        k: list(v) if isinstance(v, tuple) else v for k, v in n.attrs.items()
                    },
                    "covers": list(n.covers),
                    **({"fused": list(n.fused)} if n.fused else {}),
                }
                for n in self.nodes
            ],
            "weights": {
                k: {"shape": list(w.shape), "dtype": w.dtype, "matrix": w.matrix}
                for k, w in self.weights.items()
            },
        }

    @classmethod
    def from_json(cls, data: Any) -> Graph:
        """The inverse of `to_json`; every type rule is checked again.

        Raises:
            FormatError: the JSON is no graph, or a rule does not hold.
            UnsupportedError: a weight has a storage type that is unknown, or it is a graph of
                tensor ops.
        """
        from hornito.ops.attributes import check_attributes
        from hornito.quant.formats import weight_format

        if isinstance(data, dict) and data.get("kind") == "tensor":
            raise UnsupportedError(
                "the package holds a model of tensors, not of text: run it with "
                "`hornito run PACKAGE --input NAME=FILE.npy --output DIR`"
            )
        graph = cls()
        try:
            for name, value in data["inputs"].items():
                graph.add_input(name, value["dtype"], _shape_from_json(value["shape"]))
            for name, w in data["weights"].items():
                shape = _weight_shape(name, w["shape"])
                dtype = weight_format(w["dtype"]).name
                graph.weights[name] = Weight(shape, dtype, None, bool(w["matrix"]))
            for n in data["nodes"]:
                attrs = {k: tuple(v) if isinstance(v, list) else v for k, v in n["attrs"].items()}
                node = Node(
                    n["op"],
                    n["name"],
                    tuple(n["inputs"]),
                    tuple(n["outputs"]),
                    attrs,
                    tuple(n["covers"]),
                    tuple(n.get("fused", ())),
                )
                check_attributes(node)
                graph.append(node)
            graph.outputs = [str(name) for name in data["outputs"]]
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise FormatError(f"the graph's JSON is malformed: {error!r}") from error
        graph.check()
        return graph

    def without_data(self) -> Graph:
        """A copy whose weights have no data source."""
        copy = Graph.from_json(self.to_json())
        copy.weights = {k: replace(w, data=None) for k, w in self.weights.items()}
        return copy


def _value_to_json(value: Value) -> dict[str, Any]:
    return {"dtype": value.dtype, "shape": [dim_to_json(d) for d in value.shape]}


def _weight_shape(name: str, data: Any) -> tuple[int, ...]:
    """The shape of a weight: dimensions of at least 1."""
    if not isinstance(data, list) or any(type(dim) is not int or dim < 1 for dim in data):
        raise FormatError(f"weight {name}: {data!r:.60} is no shape of positive whole numbers")
    return tuple(data)


def _shape_from_json(data: Any) -> Shape:
    return tuple(dim_from_json(d) for d in data)
