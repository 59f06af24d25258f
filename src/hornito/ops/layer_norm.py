"""Layer norm: `x [T, H], weight [H], selection [S]?, bias [H]`
`-> (x - mean(x)) * rsqrt(variance(x) + eps) * weight + bias`.

With a selection, only the rows that it names are computed and the result is `[S, H]`.
Attributes: `eps`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.errors import FormatError
from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Push

PUSH = Push(
    "x:u64 weight:u64 bias:u64 selection:u64 result:u64 call:u64 live_word:u32 width:u32 eps:f32"
)


def infer(graph: Graph, node: Node) -> list[Value]:
    x, weight, selection, bias = node.inputs
    width = graph.shape(x)[1]
    if graph.shape(weight) != (width,) or graph.shape(bias) != (width,):
        raise FormatError(
            f"node {node.name}: weight {graph.shape(weight)} and bias {graph.shape(bias)} do not "
            f"fit rows of {width}"
        )
    return [Value(FLOAT, (graph.shape(selection or x)[0], width))]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    x, weight, selection, bias = inputs
    if x is None or weight is None or bias is None:
        raise ValueError(f"{node.name}: an input is absent")
    if selection is not None:
        x = x[np.asarray(selection, np.int64)]
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(np.square(centred), axis=-1, keepdims=True)
    return [centred / np.sqrt(variance + node.attr("eps")) * weight + bias]


def lower(node: Node, low: Lowering) -> None:
    x, weight, bias = (low.operand(node.inputs[i]) for i in (0, 1, 3))
    result = low.operand(node.outputs[0])
    rows, width = low.shape(node.outputs[0])
    selected = bool(node.inputs[2])
    selection = low.selection if selected else low.call
    low.emit(
        node,
        "layer_norm/norm.default",
        PUSH,
        (
            x,
            weight,
            bias,
            selection,
            result,
            low.call,
            low.live_word(node.outputs[0]),
            width,
            node.attr("eps"),
        ),
        (rows, 1, 1),
        reads=(x, weight, bias, selection, low.call),
        writes=(result,),
        spec={0: int(selected)},
    )
