"""RoPE on halves: `x [T, heads * D], positions [T], inv_freq [R/2] -> x turned`.

Dims past R of each head pass through. Attributes: `heads`, `head_dim`, `scale` (on sine and cosine,
1 for most models).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.errors import FormatError
from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Push, ceil_div, present

PUSH = Push("rows:u64 x:u64 inv_freq:u64 result:u64 heads:u32 head_dim:u32 half_dim:u32 scale:f32")


def infer(graph: Graph, node: Node) -> list[Value]:
    x, _, inv_freq = node.inputs
    shape = graph.shape(x)
    check_rotary(graph, node, inv_freq)
    if shape[1] != node.attr("heads") * node.attr("head_dim"):
        raise FormatError(f"node {node.name}: x {shape} is not heads * head_dim wide")
    return [Value(FLOAT, shape)]


def check_rotary(graph: Graph, node: Node, inv_freq: str) -> None:
    """`inv_freq` must hold at most D/2 numbers."""
    shape = graph.shape(inv_freq)
    if len(shape) != 1 or not isinstance(shape[0], int) or 2 * shape[0] > node.attr("head_dim"):
        raise FormatError(
            f"node {node.name}: inv_freq {shape} does not fit head_dim {node.attr('head_dim')}"
        )


def rotate(x: Array, positions: Array, inv_freq: Array, scale: float) -> Array:
    """`x [T, heads, D]` turned; angles are rounded to fp32, as the models' references do."""
    angle32 = np.asarray(positions, np.float32)[:, None] * np.asarray(inv_freq, np.float32)[None]
    angle = angle32.astype(x.dtype)[:, None, :]  # [T, 1, R/2]
    half = angle.shape[-1]
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    x, positions, inv_freq = present(inputs, 3)
    heads = x.reshape(len(x), node.attr("heads"), node.attr("head_dim"))
    return [rotate(heads, positions, inv_freq, node.attr("scale")).reshape(x.shape)]


def lower(node: Node, low: Lowering) -> None:
    x, inv_freq = low.operand(node.inputs[0]), low.operand(node.inputs[2])
    result = low.operand(node.outputs[0])
    heads, head_dim = node.attr("heads"), node.attr("head_dim")
    half = low.shape(node.inputs[2])[0]
    low.emit(
        node,
        "rope/rotate.default",
        PUSH,
        (low.row_records, x, inv_freq, result, heads, head_dim, half, node.attr("scale")),
        (ceil_div(heads * (head_dim - half), 64), low.rows, 1),
        reads=(low.row_records, x, inv_freq),
        writes=(result,),
    )
