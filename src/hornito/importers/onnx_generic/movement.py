"""ONNX ops that move elements, or say shapes: no arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hornito.errors import UnsupportedError
from hornito.importers.onnx.reader import OpNode
from hornito.importers.onnx_generic.builder import (
    MAX_AXIS,
    Builder,
    Ref,
    check_size,
    known,
    numpy_dtype,
)
from hornito.importers.onnx_generic.elementwise import const_ref
from hornito.importers.onnx_generic.table import (
    axis_of,
    handles,
    inputs,
    integer,
    optional,
    type_name,
)


@handles("Shape")
def _shape(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    start, end = node.attrs.get("start", 0), node.attrs.get("end", a.rank)
    return [known(np.asarray(a.shape[start:end], np.int64))]


@handles("Size")
def _size(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    return [known(np.asarray(a.size, np.int64))]


@handles("Reshape")
def _reshape(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, target = inputs(x, 2)
    shape = b.integers(target, "Reshape's shape")
    if not integer(node, "allowzero", 0):
        shape = [a.shape[i] if d == 0 and i < a.rank else d for i, d in enumerate(shape)]
    if -1 in shape:
        rest = math.prod(d for d in shape if d != -1)
        shape[shape.index(-1)] = a.size // rest if rest else 0
    return [b.reshape(a, shape)]


@handles("Flatten")
def _flatten(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    axis = integer(node, "axis", 1)
    axis = axis + a.rank if axis < 0 else axis
    return [b.reshape(a, (math.prod(a.shape[:axis]), math.prod(a.shape[axis:])))]


@handles("Squeeze")
def _squeeze(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    given = optional(x, 1)
    if given is None:
        axes = [i for i, d in enumerate(a.shape) if d == 1]
    else:
        axes = [axis_of(i, a.rank) for i in b.integers(given, "Squeeze's axes")]
    if any(a.shape[i] != 1 for i in axes):
        raise UnsupportedError(f"axes {axes} of shape {a.shape} are not of length 1")
    return [b.reshape(a, [d for i, d in enumerate(a.shape) if i not in axes])]


@handles("Unsqueeze")
def _unsqueeze(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, given = inputs(x, 2)
    axes = b.integers(given, "Unsqueeze's axes")
    rank = a.rank + len(axes)
    at = {axis_of(i, rank) for i in axes}
    rest = iter(a.shape)
    return [b.reshape(a, [1 if i in at else next(rest) for i in range(rank)])]


@handles("Transpose")
def _transpose(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    order = node.attrs.get("perm") or list(reversed(range(a.rank)))
    return [b.transpose(a, [axis_of(i, a.rank) for i in order])]


@handles("Expand")
def _expand(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, target = inputs(x, 2)
    shape = np.broadcast_shapes(a.shape, tuple(b.integers(target, "Expand's shape")))
    return [b.expand(a, shape)]


@handles("Tile")
def _tile(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, repeats = inputs(x, 2)
    counts = b.integers(repeats, "Tile's repeats")
    for dim, count in zip(a.shape, counts, strict=True):
        check_size((dim * count,), MAX_AXIS)
    return [
        b.take(
            a, {i: list(range(d)) * c for i, (d, c) in enumerate(zip(a.shape, counts, strict=True))}
        )
    ]


@handles("Concat")
def _concat(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    parts = inputs(x, len(x))
    return [b.concat(parts, axis_of(integer(node, "axis", 0), parts[0].rank))]


@handles("Split")
def _split(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    axis = axis_of(integer(node, "axis", 0), a.rank)
    given = optional(x, 1)
    total = a.shape[axis]
    if given is not None:
        sizes = b.integers(given, "Split's sizes")
    else:
        count = integer(node, "num_outputs", len(node.outputs))
        each = -(-total // count)
        sizes = [max(0, min(each, total - i * each)) for i in range(count)]
    if sum(sizes) != total or len(sizes) != len(node.outputs):
        raise UnsupportedError(f"{total} elements in parts of {sizes}")
    starts = np.cumsum([0, *sizes])
    return [
        b.take(a, {axis: range(s, s + n)}) for s, n in zip(starts.tolist(), sizes, strict=False)
    ]


@handles("Slice")
def _slice(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, starts, ends = inputs(x, 3)
    first = b.integers(starts, "Slice's starts")
    last = b.integers(ends, "Slice's ends")
    axes, steps = optional(x, 3), optional(x, 4)
    along = b.integers(axes, "Slice's axes") if axes is not None else list(range(len(first)))
    by = b.integers(steps, "Slice's steps") if steps is not None else [1] * len(first)
    chosen = {}
    for axis, start, end, step in zip(along, first, last, by, strict=True):
        axis = axis_of(axis, a.rank)
        dim = a.shape[axis]
        # A negative end past the start means "to the first element" when stepping back.
        stop: int | None = end
        if step < 0 and end < -dim:
            stop = None
        chosen[axis] = range(dim)[start:stop:step]
    return [b.take(a, chosen)]


@handles("Pad")
def _pad(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, pads = inputs(x, 2)
    amounts = b.integers(pads, "Pad's pads")
    value, axes = optional(x, 2), optional(x, 3)
    fill = float(b.numbers(value, "Pad's value").reshape(-1)[0]) if value is not None else 0
    along = b.integers(axes, "Pad's axes") if axes is not None else list(range(a.rank))
    mode = node.attrs.get("mode", "constant")
    chosen = {}
    for i, axis in enumerate(along):
        axis = axis_of(axis, a.rank)
        chosen[axis] = _padded(a.shape[axis], amounts[i], amounts[i + len(along)], mode)
    return [b.take(a, chosen, fill)]


def _padded(dim: int, before: int, after: int, mode: str) -> list[int]:
    check_size((max(0, before + dim + after),), MAX_AXIS)
    at = np.arange(-before, dim + after)
    if mode == "constant":
        return [int(i) if 0 <= i < dim else -1 for i in at]
    if mode == "edge":
        return [int(i) for i in np.clip(at, 0, dim - 1)]
    if mode == "wrap":
        return [int(i) for i in at % dim]
    if mode == "reflect":
        period = max(1, 2 * (dim - 1))
        folded = np.abs(at) % period
        return [int(min(i, period - i)) for i in folded]
    raise UnsupportedError(f"Pad's mode {mode!r}; constant, edge, reflect and wrap are supported")


@handles("ConstantOfShape")
def _constant_of_shape(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (shape,) = inputs(x, 1)
    dims = b.integers(shape, "ConstantOfShape's shape")
    value = (
        const_ref(node.attrs["value"]) if "value" in node.attrs else known(np.zeros(1, np.float32))
    )
    return [b.full(dims, b.numbers(value, "a value").reshape(-1)[0], value.dtype)]


@handles("Range")
def _range(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    parts = inputs(x, 3)
    start, limit, step = (b.numbers(p, "Range's bounds").reshape(()) for p in parts)
    if step == 0:
        raise UnsupportedError("Range with a step of 0")
    count = max(0, math.ceil((limit.item() - start.item()) / step.item()))
    check_size((count,), MAX_AXIS)
    made = start.item() + np.arange(count) * step.item()
    return [known(made.astype(numpy_dtype(parts[0].dtype)), parts[0].dtype)]


@handles("Trilu")
def _trilu(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    given = optional(x, 1)
    k = b.integers(given, "Trilu's diagonal")[0] if given is not None else 0
    ones = np.ones(a.shape[-2:], bool)
    mask = np.triu(ones, k) if integer(node, "upper", 1) else np.tril(ones, k)
    return [b.map("where", [known(mask), a, b.full((), 0, a.dtype)], a.dtype)]


@handles("EyeLike")
def _eye_like(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    dtype = type_name(node.attrs["dtype"]) if "dtype" in node.attrs else a.dtype
    rows, columns = a.shape
    eye = np.eye(rows, columns, k=integer(node, "k", 0))
    return [known(eye.astype(numpy_dtype(dtype)), dtype)]


@handles("DepthToSpace")
def _depth_to_space(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    n, c, h, w = a.shape
    s = integer(node, "blocksize", 1)
    if node.attrs.get("mode", "DCR") == "DCR":
        split, order = (n, s, s, c // s**2, h, w), (0, 3, 4, 1, 5, 2)
    else:
        split, order = (n, c // s**2, s, s, h, w), (0, 1, 4, 2, 5, 3)
    return [b.reshape(b.transpose(b.reshape(a, split), order), (n, c // s**2, h * s, w * s))]


@handles("SpaceToDepth")
def _space_to_depth(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    (a,) = inputs(x, 1)
    n, c, h, w = a.shape
    s = integer(node, "blocksize", 1)
    if node.attrs.get("mode", "DCR") == "DCR":
        order: Sequence[int] = (0, 3, 5, 1, 2, 4)
    else:
        order = (0, 1, 3, 5, 2, 4)
    moved = b.transpose(b.reshape(a, (n, c, h // s, s, w // s, s)), order)
    return [b.reshape(moved, (n, c * s * s, h // s, w // s))]
