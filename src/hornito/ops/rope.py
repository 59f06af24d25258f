"""RoPE on halves: `x [T, heads * D], positions [T], inv_freq [R/2] or [2, R/2] -> x turned`.

Dims past R of each head pass through. Two rows of frequencies are the sets for short and for long
contexts: a plan takes the long one when its context is larger than `original_max`, for every
position, so that keys in the cache and queries always agree.

Attributes: `heads`, `head_dim`, `scale` (on sine and cosine, 1 for most models), `original_max`
(with two sets).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.errors import FormatError
from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Lowering, Operand, Push, ceil_div, present

PUSH = Push("rows:u64 x:u64 inv_freq:u64 result:u64 heads:u32 head_dim:u32 half_dim:u32 scale:f32")


def infer(graph: Graph, node: Node) -> list[Value]:
    x, _, inv_freq = node.inputs
    shape = graph.shape(x)
    check_rotary(graph, node, inv_freq)
    if shape[1] != node.attr("heads") * node.attr("head_dim"):
        raise FormatError(f"node {node.name}: x {shape} is not heads * head_dim wide")
    return [Value(FLOAT, shape)]


def check_rotary(graph: Graph, node: Node, inv_freq: str) -> None:
    """`inv_freq` must hold at most D/2 numbers, or two rows of so many and `original_max`."""
    shape = graph.shape(inv_freq)
    half = shape[-1] if shape else 0
    fits = isinstance(half, int) and 2 * half <= node.attr("head_dim")
    if not fits or (len(shape) != 1 and (len(shape) != 2 or shape[0] != 2)):
        raise FormatError(
            f"node {node.name}: inv_freq {shape} does not fit head_dim {node.attr('head_dim')}"
        )
    if len(shape) == 2:
        node.attr("original_max")


def takes_long_set(node: Node, context: int) -> bool:
    """Whether a RoPE node with two sets uses the long one at a context."""
    return context > int(node.attr("original_max"))


def pick_set(node: Node, inv_freq: Array, context: int) -> Array:
    """The frequencies `[R/2]` that hold at a context."""
    if inv_freq.ndim == 1:
        return inv_freq
    row: Array = inv_freq[int(takes_long_set(node, context))]
    return row


def original_max(graph: Graph) -> int | None:
    """The largest context that takes the short set of a graph with two; None with one set."""
    found = (node.attrs["original_max"] for node in graph if "original_max" in node.attrs)
    value = next(found, None)
    return value if isinstance(value, int) else None


def lower_set(node: Node, name: str, low: Lowering) -> tuple[Operand, int]:
    """The chosen set's operand, and R/2."""
    shape = low.shape(name)
    table = low.operand(name)
    if len(shape) == 1:
        return table, shape[0]
    size = table.size // 2
    return table.part(size * int(takes_long_set(node, low.context)), size), shape[1]


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
    chosen = pick_set(node, inv_freq, state.context)
    return [rotate(heads, positions, chosen, node.attr("scale")).reshape(x.shape)]


def lower(node: Node, low: Lowering) -> None:
    x = low.operand(node.inputs[0])
    inv_freq, half = lower_set(node, node.inputs[2], low)
    result = low.operand(node.outputs[0])
    heads, head_dim = node.attr("heads"), node.attr("head_dim")
    low.emit(
        node,
        "rope/rotate.default",
        PUSH,
        (low.row_records, x, inv_freq, result, heads, head_dim, half, node.attr("scale")),
        (ceil_div(heads * (head_dim - half), 64), low.rows, 1),
        reads=(low.row_records, x, inv_freq),
        writes=(result,),
    )
