"""Small tensor graphs that, together, launch every kernel of generic tensor ops."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hornito.importers.onnx_generic.builder import Builder, Ref
from hornito.ops.base import Dispatch
from hornito.tensor.graph import Array, Attr, TensorGraph
from hornito.tensor.kernels import TensorLowering
from hornito.tensor.stored import store_matrices
from hornito.vk.caps import Caps


def finished(b: Builder, **outputs: Ref) -> TensorGraph:
    """The builder's graph with these outputs."""
    for name, ref in outputs.items():
        b.graph.outputs[name] = b.place(ref)
    b.graph.drop_unused()
    b.graph.check()
    return b.graph


def everything() -> TensorGraph:
    """One node of every op."""
    b = Builder()
    x = b.input("x", "float32", (3, 4))
    ids = b.input("ids", "int64", (3, 4))
    wide = b.input("wide", "float32", (64, 64))
    tuples = b.input("tuples", "int64", (1, 2))
    attrs: dict[str, Attr] = {"fn": "gather", "p": [3, 4, 12, 0]}
    scan: dict[str, Attr] = {"fn": "sum", "length": 4, "inner": 1}
    scatter: dict[str, Attr] = {
        "fn": "add",
        "tuples": 1,
        "p": [1, 1, 2, 0],
        "dims": [3, 4],
        "strides": [4, 1],
    }
    values, places = b.pair("topk", [x], ("float32", "int64"), (3, 2), {"width": 4, "k": 2})
    return finished(
        b,
        map=b.map("add", [x, b.reduce("sum", x, [1], True)]),
        view=b.transpose(x, (1, 0)),
        concat=b.concat([x, x], 0),
        rows=b.rows("softmax", x, [1]),
        matmul=b.matmul(x, x, flip_b=True),
        large=b.matmul(wide, wide),
        gather=b.node("gather", [x, ids], "float32", (3, 4, 4), attrs),
        scatter=b.node(
            "scatter", [x, tuples, b.input("one", "float32", (1,))], "float32", (3, 4), scatter
        ),
        scan=b.node("scan", [x], "float32", (3, 4), scan),
        values=values,
        places=places,
    )


def constant(array: Array) -> Ref:
    """A constant fp32 array."""
    return Ref("float32", array.shape, array.astype(np.float32))


def stored(weights: str, *, bias: bool = True) -> TensorGraph:
    """Products with constant matrices, either way round, and rows of a table, stored so."""
    rng = np.random.default_rng(4)
    b = Builder()
    x = b.input("x", "float32", (2, 7, 64))
    first = constant(rng.standard_normal((64, 96)))
    second = constant(rng.standard_normal((9, 96)))
    c = constant(rng.standard_normal(9)) if bias else None
    hidden = b.map("relu", [b.matmul(x, first)])
    flat = b.reshape(hidden, (14, 96))
    table = constant(rng.standard_normal((1030, 64)))
    attrs: dict[str, Attr] = {"fn": "gather", "p": [1030, 64, 6, 0]}
    ids = b.input("ids", "int64", (2, 3))
    graph = finished(
        b,
        out=b.matmul(flat, second, flip_b=True, c=c),
        hidden=hidden,
        rows=b.node("gather", [table, ids], "float32", (2, 3, 64), attrs),
    )
    store_matrices(graph, weights)
    graph.check()
    return graph


def dispatches(caps: Caps) -> Iterator[Dispatch]:
    """What `everything` and stored matrices launch."""
    for graph in (everything(), *(stored(weights) for weights in ("fp16", "int8"))):
        yield from TensorLowering(graph, caps).run().dispatches
