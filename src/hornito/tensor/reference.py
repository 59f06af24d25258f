"""The numpy evaluator of tensor graphs: what each op means, without a GPU.

Floats are computed in float64 and rounded only where the graph casts to a narrower type; integers
are exact and wrap as their type does. `hornito compare` holds the kernels to it, and
`hornito run --backend cpu` is it; nothing else uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hornito.errors import HornitoError, UnsupportedError, UsageError
from hornito.tensor.functions import apply, cast, wrap
from hornito.tensor.graph import Array, TensorGraph, TensorNode, TensorValue, from_words, unrolled
from hornito.tensor.kernels import FUNCTIONS, broadcast_strides, strides_of
from hornito.tensor.stored import evaluate_linear, evaluate_lookup


def evaluate(
    graph: TensorGraph, inputs: Mapping[str, Array], *, keep: bool = False
) -> dict[str, Array]:
    """The outputs for these inputs, by their own name; with `keep`, the result of every node, in
    float64 or int64.

    Raises:
        UsageError: an input is missing or of another shape.
        HornitoError: an index lies outside its axis.
    """
    run = _Evaluation(graph)
    for name, words in graph.constants.items():
        run.flat[name] = _numbers(from_words(words, graph.values[name]))
    for name in graph.inputs:
        value = graph.values[name]
        if name not in inputs or inputs[name].shape != value.shape:
            raise UsageError(f"input {name!r} must be an array of shape {value.shape}")
        run.flat[name] = cast(_numbers(inputs[name]), value.dtype)
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            run.node(node)
    if keep:
        return {name: run.shaped(name) for node in graph.nodes for name in node.outputs}
    return {
        label: _typed(run.shaped(name), graph.values[name].dtype)
        for label, name in graph.outputs.items()
    }


def _typed(numbers: Array, dtype: str) -> Array:
    """Numbers in the type that the device hands out (bfloat16 as float32)."""
    if dtype == "bfloat16":
        return cast(numbers, dtype).astype(np.float32)
    with np.errstate(over="ignore"):
        return numbers.astype(dtype)


def _numbers(array: Array) -> Array:
    """The elements of an array as float64 or int64, flat."""
    kind = np.float64 if array.dtype.kind in "fV" else np.int64
    return np.ascontiguousarray(array).reshape(-1).astype(kind)


@dataclass(slots=True)
class _Evaluation:
    """Values while a graph is evaluated: float64 or int64, flat."""

    graph: TensorGraph
    flat: dict[str, Array] = field(default_factory=dict)

    def value(self, name: str) -> TensorValue:
        return self.graph.values[name]

    def shaped(self, name: str) -> Array:
        return self.flat[name].reshape(self.value(name).shape)

    def node(self, node: TensorNode) -> None:
        """Compute the results of one node."""
        if all(self.value(name).size == 0 for name in node.outputs):
            kinds = [np.float64 if self.value(n).kind == 0 else np.int64 for n in node.outputs]
            self.flat.update((n, np.zeros(0, k)) for n, k in zip(node.outputs, kinds, strict=True))
            return
        if node.op not in _OPS:
            raise UnsupportedError(f"node {node.name}: no reference for {node.op}")
        results = _OPS[node.op](self, node, [self.flat[name] for name in node.inputs])
        for name, result in zip(node.outputs, results, strict=True):
            self.flat[name] = np.ascontiguousarray(result).reshape(-1)


def _strided(array: Array, shape: list[int], strides: list[int], start: int = 0) -> Array:
    """A view of flat numbers; strides count elements."""
    size = array.itemsize
    return as_strided(array[start:], shape, [s * size for s in strides], writeable=False)


def _alias(run: _Evaluation, node: TensorNode, x: list[Array]) -> list[Array]:
    return [x[0]]


def _map(run: _Evaluation, node: TensorNode, x: list[Array]) -> list[Array]:
    result = run.value(node.outputs[0])
    shape = node.numbers("dims") if "dims" in node.attrs else list(result.shape)
    given, rank = node.numbers("strides"), len(shape)
    operands = []
    for i, (name, array) in enumerate(zip(node.inputs, x, strict=True)):
        own = given[i * rank : (i + 1) * rank] or broadcast_strides(run.value(name).shape, shape)
        operands.append(_strided(array, shape, own))
    fn = node.text("fn")
    parameters = node.real("x", 0.0), node.real("y", 0.0)
    out = apply(fn, operands, run.value(node.inputs[FUNCTIONS[fn] == 128]).kind, *parameters)
    if fn in ("cast", "identity", "where") or result.kind == 0:
        return [cast(out, result.dtype) if fn == "cast" else out]
    return [wrap(out, result.dtype)]


def _view(run: _Evaluation, node: TensorNode, x: list[Array]) -> list[Array]:
    maps = [unrolled(node.numbers(f"map{i}")) for i in range(len(node.numbers("dims")))]
    where, missing = np.zeros((), np.int64), np.zeros((), bool)
    for entries in maps:
        where = where[..., None] + np.maximum(entries, 0)
        missing = missing[..., None] | (entries < 0)
    value = run.value(node.inputs[0])
    word = np.asarray([node.number("fill", 0) & 0xFFFFFFFF], np.uint32)
    fill = _numbers(from_words(word, TensorValue(value.dtype, (1,))))[0]
    source = x[0] if len(x[0]) else np.zeros(1, x[0].dtype)
    return [np.where(missing, fill, source[where])]


def _concat(run: _Evaluation, node: TensorNode, x: list[Array]) -> list[Array]:
    parts = [run.shaped(name) for name in node.inputs]
    return [np.concatenate(parts, axis=node.number("axis"))]


def _reduce(run: _Evaluation, node: TensorNode, x: list[Array]) -> list[Array]:
    rows, fn = x[0].reshape(-1, node.number("width")), node.text("fn")
    dtype = run.value(node.outputs[0]).dtype
    if fn.startswith("arg_"):
        find = np.argmax if fn == "arg_max" else np.argmin
        if node.number("last", 0):
            return [rows.shape[1] - 1 - find(rows[:, ::-1], axis=1)]
        return [find(rows, axis=1)]
    out = _REDUCTIONS[fn](rows)
    return [out if run.value(node.inputs[0]).kind == 0 else wrap(np.trunc(out), dtype)]


def _log_sum_exp(rows: Array) -> Array:
    top = rows.max(axis=1)
    shift = np.where(np.isinf(top), 0.0, top)
    result: Array = np.log(np.exp(rows - shift[:, None]).sum(axis=1)) + shift
    return result


_REDUCTIONS: dict[str, Callable[[Array], Array]] = {
    "sum": partial(np.sum, axis=1),
    "mean": lambda rows: rows.sum(axis=1) / rows.shape[1],
    "max": partial(np.max, axis=1),
    "min": partial(np.min, axis=1),
    "prod": lambda rows: np.asarray(rows.prod(axis=1)),
    "l1": lambda rows: np.abs(rows).sum(axis=1),
    "l2": lambda rows: np.sqrt(np.square(rows).sum(axis=1)),
    "sum_square": lambda rows: np.square(rows).sum(axis=1),
    "log_sum": lambda rows: np.log(rows.sum(axis=1)),
    "log_sum_exp": _log_sum_exp,
}


def _rows(run: _Evaluation, node: TensorNode, x: list[Array]) -> list[Array]:
    rows, fn = x[0].reshape(-1, node.number("width")), node.text("fn")
    if fn == "hardmax":
        return [np.arange(rows.shape[1]) == rows.argmax(axis=1)[:, None]]
    if fn in ("softmax", "log_softmax"):
        shifted = rows - rows.max(axis=1, keepdims=True)
        total = np.exp(shifted).sum(axis=1, keepdims=True)
        return [np.exp(shifted) / total if fn == "softmax" else shifted - np.log(total)]
    if fn == "layer_norm":
        rows = rows - rows.mean(axis=1, keepdims=True)
    mean = np.square(rows).mean(axis=1, keepdims=True)
    return [rows / np.sqrt(mean + node.real("epsilon", 0.0))]


def _matmul(run: _Evaluation, node: TensorNode, x: list[Array]) -> list[Array]:
    m, n, k = node.numbers("sizes")
    s, batch = node.numbers("strides"), node.numbers("batch")
    starts = np.zeros((1, 2), np.int64)
    for i in range(0, len(batch), 3):
        dim, *steps = batch[i : i + 3]
        more = np.arange(dim)[None, :, None] * np.asarray(steps)
        starts = (starts[:, None] + more).reshape(-1, 2)
    out = np.stack(
        [
            _strided(x[0], [m, k], s[0:2], a) @ _strided(x[1], [k, n], s[2:4], b)
            for a, b in starts.tolist()
        ]
    )
    if run.value(node.inputs[0]).kind:
        return [wrap(out, run.value(node.outputs[0]).dtype)]
    out = out * np.float64(np.float32(node.real("alpha", 1.0)))
    if len(x) > 2:
        out = out + node.real("beta", 1.0) * _strided(x[2], [m, n], s[4:6])
    return [out]


def _placed(node: TensorNode, indices: Array, length: int | Array) -> Array:
    """Indices that count from the start; those below 0 count from the end."""
    if np.any((indices < -length) | (indices >= length)):
        raise HornitoError(f"node {node.source or node.name}: an index lies outside its axis")
    return np.where(indices < 0, indices + length, indices)


def _gather(run: _Evaluation, node: TensorNode, x: list[Array]) -> list[Array]:
    (data, indices), p, mode = x, node.numbers("p"), node.text("fn")
    if mode == "gather":
        rows = data.reshape(-1, p[0], p[1])
        return [rows[:, _placed(node, indices, p[0])]]
    if mode == "elements":
        dims, strides, axis = node.numbers("dims"), node.numbers("strides"), p[2]
        at = list(np.indices(dims))
        at[axis] = _placed(node, indices, p[0]).reshape(dims)
        return [data[sum(a * s for a, s in zip(at, strides, strict=True))]]
    if mode == "tuples":
        batch, inner, depth, tuples = p
        found = _tuples(node, indices, depth)
        start = found + np.arange(len(found)) // tuples * batch
        return [data[start[:, None] + np.arange(inner)]]
    depth, inner = p[0], p[1]
    chosen = np.where(indices < 0, indices + depth, indices).reshape(-1, 1, inner)
    return [data[(chosen == np.arange(depth)[None, :, None]).astype(np.int64)]]


def _tuples(node: TensorNode, indices: Array, depth: int) -> Array:
    """Where each tuple of indices points, in elements."""
    dims, strides = (np.asarray(node.numbers(a), np.int64) for a in ("dims", "strides"))
    placed = _placed(node, indices.reshape(-1, depth), dims)
    return np.asarray(placed @ strides)


def _scatter(run: _Evaluation, node: TensorNode, x: list[Array]) -> list[Array]:
    data, indices, updates = x
    out, p = data.copy(), node.numbers("p")
    if node.number("tuples"):
        found = _tuples(node, indices, p[2])[:, None] + np.arange(p[1])
    else:
        dims = node.numbers("dims")
        at = list(np.indices(run.value(node.inputs[1]).shape))
        at[p[0]] = _placed(node, indices, dims[p[0]]).reshape(at[p[0]].shape)
        strides = strides_of(dims)
        found = sum(a * s for a, s in zip(at, strides, strict=True))
    join = _JOINS[node.text("fn")]
    for target, update in zip(np.asarray(found).reshape(-1).tolist(), updates, strict=True):
        out[target] = join(out[target], update)
    value = run.value(node.outputs[0])
    return [out if value.kind == 0 else wrap(out, value.dtype)]


_JOINS: dict[str, Callable[[Array, Array], Array]] = {
    "none": lambda a, b: b,
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def _scan(run: _Evaluation, node: TensorNode, x: list[Array]) -> list[Array]:
    product = node.text("fn") == "prod"
    lines = x[0].reshape(-1, node.number("length"), node.number("inner"))
    lines = lines[:, ::-1] if node.number("reverse", 0) else lines
    out = np.cumprod(lines, axis=1) if product else np.cumsum(lines, axis=1)
    if node.number("exclusive", 0):
        first = np.full_like(out[:, :1], int(product))
        out = np.concatenate([first, out[:, :-1]], axis=1)
    out = out[:, ::-1] if node.number("reverse", 0) else out
    value = run.value(node.outputs[0])
    return [out if value.kind == 0 else wrap(out, value.dtype)]


def _topk(run: _Evaluation, node: TensorNode, x: list[Array]) -> list[Array]:
    rows, k = x[0].reshape(-1, node.number("width")), node.number("k")
    if node.number("largest", 1):
        # A stable order of the reversed rows, read backwards: NaN first, equal ones by index.
        order = rows.shape[1] - 1 - np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1]
    else:
        order = np.argsort(rows, axis=1, kind="stable")
    return [np.take_along_axis(rows, order[:, :k], axis=1), order[:, :k]]


_OPS: dict[str, Callable[[_Evaluation, TensorNode, list[Array]], list[Array]]] = {
    "alias": _alias,
    "map": _map,
    "view": _view,
    "concat": _concat,
    "reduce": _reduce,
    "rows": _rows,
    "matmul": _matmul,
    "linear": lambda run, node, x: [evaluate_linear(run.graph, node, x)],
    "lookup": lambda run, node, x: [evaluate_lookup(run.graph, node, x)],
    "gather": _gather,
    "scatter": _scatter,
    "scan": _scan,
    "topk": _topk,
}
