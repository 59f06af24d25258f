"""RMS norm: `x [T, H], weight [H], selection [S]? -> x * rsqrt(mean(x^2) + eps) * weight`.

With a selection, only the rows that it names are computed and the result is `[S, H]`.
Attributes: `eps`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Push, present

PUSH = Push("x:u64 weight:u64 selection:u64 result:u64 call:u64 live_word:u32 width:u32 eps:f32")


def infer(graph: Graph, node: Node) -> list[Value]:
    x, _, selection = node.inputs
    rows = graph.shape(selection or x)[0]
    return [Value(FLOAT, (rows, graph.shape(x)[1]))]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    x, weight = present(inputs, 2)
    if inputs[2] is not None:
        x = x[np.asarray(inputs[2], np.int64)]
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    return [x / np.sqrt(mean + node.attr("eps")) * weight]


def lower(node: Node, low: Lowering) -> None:
    x, weight = (low.operand(name) for name in node.inputs[:2])
    result = low.operand(node.outputs[0])
    rows, width = low.shape(node.outputs[0])
    selected = bool(node.inputs[2])
    selection = low.selection if selected else low.call
    low.emit(
        node,
        "rms_norm/norm.default",
        PUSH,
        (
            x,
            weight,
            selection,
            result,
            low.call,
            low.live_word(node.outputs[0]),
            width,
            node.attr("eps"),
        ),
        (rows, 1, 1),
        reads=(x, weight, selection, low.call),
        writes=(result,),
        spec={0: int(selected)},
    )
