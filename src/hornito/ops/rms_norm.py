"""RMS norm: `x [T, H], weight [H], selection [S]?, residual [T, H]?`
`-> x * rsqrt(mean(x^2) + eps) * weight (+ residual)`.

With a selection, only the rows that it names are computed and the result is `[S, H]`; a residual
then has S rows, too. With `heads`, a row is that many heads and each is normed on its own by one
weight `[H / heads]`. Attributes: `eps`, `heads` (optional, 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.errors import FormatError
from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import HALF_RESULTS, Array, Lowering, Operand, Push, present

PUSH = Push(
    "x:u64 weight:u64 selection:u64 residual:u64 result:u64 call:u64 live_word:u32 width:u32 "
    "eps:f32"
)


def heads_of(node: Node) -> int:
    """How many heads a row is cut into."""
    return int(node.attr_or("heads", 1))


def infer(graph: Graph, node: Node) -> list[Value]:
    x, weight, selection = node.inputs[:3]
    width = graph.shape(x)[1]
    (size,) = graph.shape(weight)
    if not isinstance(size, int) or size * heads_of(node) != width:
        raise FormatError(
            f"node {node.name}: {heads_of(node)} head(s) of {size} do not make rows of {width}"
        )
    shape = (graph.shape(selection or x)[0], width)
    residual = node.optional(3)
    if residual and graph.shape(residual) != shape:
        raise FormatError(
            f"node {node.name}: residual has shape {graph.shape(residual)}, not {shape}"
        )
    return [Value(FLOAT, shape)]


def norm(x: Array, weight: Array, eps: float) -> Array:
    """`x [.., H]` normed over its last axis."""
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    result: Array = x / np.sqrt(mean + eps) * weight
    return result


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    x, weight = present(inputs, 2)
    if inputs[2] is not None:
        x = x[np.asarray(inputs[2], np.int64)]
    split = x.reshape(len(x), heads_of(node), -1)
    result = norm(split, weight, node.attr("eps")).reshape(x.shape)
    residual = inputs[3] if len(inputs) > 3 else None
    return [result if residual is None else residual + result]


def lower(node: Node, low: Lowering) -> None:
    x, weight = (low.operand(name) for name in node.inputs[:2])
    result = node.outputs[0]
    emit_norm(
        node,
        low,
        x,
        weight,
        low.operand(result),
        low.shape(result),
        node.attr("eps"),
        low.live_word(result),
        heads=heads_of(node),
        selected=bool(node.inputs[2]),
        residual=low.operand(node.optional(3)) if node.optional(3) else None,
    )


def emit_norm(
    node: Node,
    low: Lowering,
    x: Operand,
    weight: Operand,
    result: Operand,
    shape: tuple[int, ...],
    eps: float,
    live_word: int,
    *,
    heads: int = 1,
    selected: bool = False,
    residual: Operand | None = None,
    half: bool = False,
) -> None:
    """Launch the norm of rows of `shape`; with `half` the result is fp16 whatever values are."""
    rows, width = shape
    selection = low.selection if selected else low.call
    added = [residual] if residual is not None else []
    low.emit(
        node,
        "rms_norm/norm.default",
        PUSH,
        (
            x,
            weight,
            selection,
            *(added or [x]),
            result,
            low.call,
            live_word,
            width // heads,
            eps,
        ),
        (rows, heads, 1),
        reads=(x, weight, selection, low.call, *added),
        writes=(result,),
        spec={0: int(selected), 1: int(bool(added)), **({HALF_RESULTS: 1} if half else {})},
    )
