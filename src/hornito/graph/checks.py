"""What a graph out of a package must hold to before it is planned and run.

`Graph.from_json` has checked attributes and shapes; here is how nodes fit together, what the model
facts say, and whether the stored tensors are those that the graph names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hornito.errors import FormatError
from hornito.graph.graph import CACHE, FLOAT, INT, Graph, Node, Value
from hornito.graph.shapes import S, T
from hornito.ops.attributes import INPUTS
from hornito.quant.formats import weight_format

MOST = (1 << 31) - 1
GRAPH_INPUTS = {
    "ids": Value(INT, (T,)),
    "positions": Value(INT, (T,)),
    "selection": Value(INT, (S,)),
}
_OF_A_LAYER = ("attention", "kv_append", "qkv_append", "rope_append")
_CACHED = ("layer", "kv_heads", "head_dim")
DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""How tensors of plain storage types are marked; others are `U8`."""


class Stored(Protocol):
    """What is known of a stored tensor."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


def check_model(graph: Graph, facts: Mapping[str, Any]) -> None:
    """Check a decoder's graph and facts.

    Raises:
        FormatError: naming the input, node, value, weight or fact at fault.
    """
    if graph.inputs != GRAPH_INPUTS:
        raise FormatError(
            "a model's inputs are ids [T], positions [T] and selection [S], all int32, not "
            + (", ".join(_spell(name, value) for name, value in graph.inputs.items()) or "none")
        )
    both = sorted(set(graph.values) & set(graph.weights))
    if both:
        raise FormatError(f"{both[0]} is a value and a weight")
    names: set[str] = set()
    for node in graph:
        if node.name in names:
            raise FormatError(f"two nodes are called {node.name}")
        names.add(node.name)
        _check_node(graph, node)
    _check_caches(graph)
    vocabulary = _check_head(graph)
    read = {name for node in graph for name in node.inputs}
    unused = sorted(set(graph.weights) - read)
    if unused:
        raise FormatError(f"no node reads the weight {unused[0]}")
    _check_facts(facts, vocabulary)


def _spell(name: str, value: Value) -> str:
    return f"{name} [{', '.join(map(str, value.shape))}] {value.dtype}"


def _check_node(graph: Graph, node: Node) -> None:
    """Inputs are of the kinds that the op takes, and results are rows of numbers."""
    kinds = INPUTS[node.op].split()
    if len(node.inputs) > len(kinds):
        raise FormatError(
            f"node {node.name} ({node.op}) has {len(node.inputs)} inputs; it takes {len(kinds)}"
        )
    for index, kind in enumerate(kinds):
        name = node.optional(index)
        if not name and kind.endswith("?"):
            continue
        if not _is(graph, name, kind.removesuffix("?")):
            raise FormatError(
                f"node {node.name} ({node.op}): input {index} must be {_KINDS[kind.rstrip('?')]}, "
                f"not {name!r}"
            )
    for name in node.outputs:
        value = graph.values[name]
        width = value.shape[1] if len(value.shape) == 2 else None
        rows = value.dtype == FLOAT and width is not None and value.shape[0] in (T, S)
        if value.dtype != CACHE and not (rows and isinstance(width, int) and 0 < width <= MOST):
            raise FormatError(f"node {node.name}: {_spell(name, value)} is no rows of numbers")


_KINDS = {
    "ids": "the graph input ids",
    "positions": "the graph input positions",
    "selection": "the graph input selection",
    "value": "the fp32 result of a node",
    "cache": "the cache token of an append",
    "matrix": "a weight",
    "vector": "a weight in fp32",
}


def _is(graph: Graph, name: str, kind: str) -> bool:
    if kind in GRAPH_INPUTS:
        return name == kind
    if kind in ("value", "cache"):
        value = graph.values.get(name)
        return value is not None and value.dtype == (FLOAT if kind == "value" else CACHE)
    weight = graph.weights.get(name)
    return weight is not None and (kind == "matrix" or weight.dtype == "fp32")


def _check_caches(graph: Graph) -> None:
    """Every layer's cache has one append and one attention, which agree."""
    appends: dict[int, Node] = {}
    attended: dict[int, Node] = {}
    for node in graph:
        layer = node.attrs.get("layer")
        if node.op not in _OF_A_LAYER or not isinstance(layer, int):
            continue
        found = attended if node.op == "attention" else appends
        if layer in found:
            raise FormatError(
                f"nodes {found[layer].name} and {node.name} ({node.op}) are both of layer {layer}"
            )
        found[layer] = node
    if not attended:
        raise FormatError("the graph has no attention")
    if set(appends) != set(attended):
        layer = min(set(appends) ^ set(attended))
        raise FormatError(f"layer {layer} needs both an append to its cache and an attention")
    for layer, node in attended.items():
        append = appends[layer]
        if node.inputs[1] not in append.outputs:
            raise FormatError(
                f"node {node.name} (layer {layer}) takes the cache token {node.inputs[1]!r}, not "
                f"that of {append.name}"
            )
        for name in _CACHED:
            if node.attr(name) != append.attr(name):
                raise FormatError(
                    f"layer {layer}: {name} is {node.attr(name)} in {node.name}, but "
                    f"{append.attr(name)} in {append.name}"
                )


def _check_head(graph: Graph) -> int:
    """The graph ends in one head of the selected rows; returns the vocabulary's size."""
    heads = [node for node in graph if node.op == "head"]
    if len(heads) != 1 or list(heads[0].outputs) != graph.outputs:
        raise FormatError(
            f"a model has one output, made by its one head; this one has the outputs "
            f"{graph.outputs!r:.100} and {len(heads)} head(s)"
        )
    head = heads[0]
    rows, vocabulary = graph.shape(head.outputs[0])
    if rows != S or not isinstance(vocabulary, int):
        raise FormatError(f"node {head.name}: the head must read the selected rows [S]")
    if graph.consumers(head.outputs[0]):
        raise FormatError(f"node {head.name}: no node may read the head's result")
    return vocabulary


def _check_facts(facts: Mapping[str, Any], vocabulary: int) -> None:
    """The facts that running a model reads."""

    def refuse(name: str, wanted: str) -> FormatError:
        given = repr(facts[name])[:60] if name in facts else "nothing"
        return FormatError(f"the fact {name} must be {wanted}, not {given}")

    context = facts.get("context_length")
    if type(context) is not int or not 1 <= context <= MOST:
        raise refuse("context_length", f"a whole number from 1 to {MOST}")
    eos = facts.get("eos_ids")
    ids = isinstance(eos, list) and all(type(i) is int and 0 <= i < vocabulary for i in eos)
    if not isinstance(eos, list) or not ids or len(eos) > vocabulary:
        raise refuse("eos_ids", f"a list of token ids from 0 to {vocabulary - 1}")
    if not isinstance(facts.get("add_bos"), bool):
        raise refuse("add_bos", "true or false")
    bos = facts.get("bos_id")
    if "bos_id" not in facts or (bos is not None and (type(bos) is not int or bos < 0)):
        raise refuse("bos_id", "a token id or null")
    if facts["add_bos"] and (bos is None or bos >= vocabulary):
        raise refuse("bos_id", f"a token id from 0 to {vocabulary - 1}, as add_bos is true")
    strings = facts.get("token_strings")
    if not isinstance(strings, dict) or not all(isinstance(s, str) for s in strings.values()):
        raise refuse("token_strings", "an object of texts")


def check_tensors(graph: Graph, tensors: Mapping[str, Stored]) -> None:
    """Check that the stored tensors are the graph's weights, in type, shape and size.

    Raises:
        FormatError: one is missing, is no weight of the graph, or differs; names it.
    """
    missing = sorted(set(graph.weights) - set(tensors))
    if missing:
        raise FormatError(f"{len(missing)} weight(s) of the graph are not stored: {missing[0]}")
    unknown = sorted(set(tensors) - set(graph.weights))
    if unknown:
        raise FormatError(f"{len(unknown)} stored tensor(s) are no weights: {unknown[0]}")
    for name, weight in graph.weights.items():
        stored, tensor = weight_format(weight.dtype), tensors[name]
        try:
            size = stored.nbytes(weight.shape)
        except FormatError as error:
            raise FormatError(f"weight {name}: {error}") from error
        shape = (size,) if stored.quantised else weight.shape
        wanted = (DTYPES.get(stored.name, "U8"), shape, size)
        found = (tensor.dtype, tensor.shape, tensor.nbytes)
        if found != wanted:
            raise FormatError(
                f"tensor {name} is stored as {found[0]} {list(found[1])} ({found[2]} bytes); the "
                f"graph's {stored.name} {list(weight.shape)} takes {wanted[0]} {list(shape)} "
                f"({size} bytes)"
            )
