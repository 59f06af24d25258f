"""Ops that move axes about, and those that make index tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hornito.graph.shapes import Affine, Dim
from hornito.importers.onnx import affine, layout
from hornito.importers.onnx.match.numbers import number
from hornito.importers.onnx.registry import Inputs, Result, handles
from hornito.importers.onnx.values import (
    MAX_COMPUTED,
    TABS,
    Active,
    Atom,
    Const,
    Grid,
    Ids,
    Lookup,
    Mask,
    Norm,
    Past,
    Rows,
    Stacked,
    Unmatched,
    Value,
    shape_of,
)

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift
    from hornito.importers.onnx.reader import OpNode


def need(x: Inputs, index: int) -> Value:
    """Input `index`; ValueError when it is absent."""
    value = x[index] if index < len(x) else None
    if value is None:
        raise ValueError(f"input {index} is absent")
    return value


def settled(cx: Lift, x: Inputs) -> Value:
    """Input 0; pending activation functions and norms are raised before their axes move."""
    from hornito.importers.onnx.match.columns import as_rows

    value = need(x, 0)
    if isinstance(value, Active) or (isinstance(value, Norm) and value.stage == "normed"):
        return as_rows(cx, value, cx.root(0))
    return value


def optional(x: Inputs, index: int) -> Value | None:
    """Input `index`, None when it is absent."""
    return x[index] if index < len(x) else None


def dims(value: Value) -> tuple[Dim, ...]:
    """A constant list of sizes or indices."""
    if not isinstance(value, Const):
        raise Unmatched(f"a list of sizes that is a {type(value).__name__}")
    return tuple(affine.as_dim(v) for v in value.numbers().reshape(-1))


def ints(value: Value) -> tuple[int, ...]:
    """A constant list of numbers that do not depend on the call."""
    found = dims(value)
    if not all(isinstance(d, int) for d in found):
        raise Unmatched("a list of axes that depends on the call")
    return tuple(d for d in found if isinstance(d, int))


def axes_of(node: OpNode, x: Inputs, index: int = 1) -> tuple[int, ...] | None:
    """Axes as an attribute (older opsets) or an input."""
    if "axes" in node.attrs:
        return tuple(node.attrs["axes"])
    value = optional(x, index)
    return None if value is None else ints(value)


@handles("Shape")
def shape(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """The sizes of a tensor; they are folded."""
    sizes = shape_of(need(x, 0))
    part = sizes[node.attrs.get("start", 0) : node.attrs.get("end")]
    return Const(affine.simplified(affine.objects(part)) if part else np.zeros(0, np.int64))


@handles("Size")
def size(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """The number of elements."""
    total: Dim = 1
    for d in shape_of(need(x, 0)):
        total = affine.times(total, d)
    return Const(affine.simplified(affine.objects([total])).reshape(()))


@handles("Reshape")
def reshape(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """See `layout.reshape`."""
    target = dims(need(x, 1))
    return layout.reshape(settled(cx, x), target, allow_zero=bool(node.attrs.get("allowzero", 0)))


@handles("Flatten")
def flatten(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Two axes out of many."""
    value = settled(cx, x)
    sizes = shape_of(value)
    axis = node.attrs.get("axis", 1)
    axis = len(sizes) if axis == len(sizes) else affine.axis_of(axis, len(sizes))
    both: list[Dim] = []
    for part in (sizes[:axis], sizes[axis:]):
        total: Dim = 1
        for d in part:
            total = affine.times(total, d)
        both.append(total)
    return layout.reshape(value, both, allow_zero=True)


@handles("Transpose")
def transpose(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """See `layout.transpose`."""
    value = settled(cx, x)
    rank = len(shape_of(value))
    return layout.transpose(value, node.attrs.get("perm") or list(range(rank))[::-1])


@handles("Unsqueeze")
def unsqueeze(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Axes of size 1 put in."""
    axes = axes_of(node, x)
    if axes is None:
        raise ValueError("no axes")
    return layout.unsqueeze(settled(cx, x), axes)


@handles("Squeeze")
def squeeze(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Axes of size 1 taken out."""
    return layout.squeeze(settled(cx, x), axes_of(node, x))


@handles("Expand")
def expand(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """See `layout.expand`."""
    return layout.expand(need(x, 0), dims(need(x, 1)))


@handles("Tile")
def tile(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Repeats along axes; only of constants, or of axes of size 1."""
    value, repeats = need(x, 0), dims(need(x, 1))
    sizes = shape_of(value)
    if isinstance(value, Const) and all(isinstance(r, int) for r in repeats):
        counts = [int(r) for r in repeats]  # type: ignore[arg-type]
        if math.prod(counts) * value.size <= MAX_COMPUTED:
            return Const(np.tile(value.numbers(), counts), value.sources)
    if any(d != 1 and r != 1 for d, r in zip(sizes, repeats, strict=True)):
        raise Unmatched(f"{affine.shape_text(sizes)} is tiled by {affine.shape_text(repeats)}")
    return layout.expand(value, [affine.times(d, r) for d, r in zip(sizes, repeats, strict=True)])


@handles("Slice")
def slice_(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Slices along any axes, with step 1 where rows or masks are concerned."""
    value = need(x, 0)
    starts, ends = dims(need(x, 1)), dims(need(x, 2))
    axes = ints(need(x, 3)) if optional(x, 3) is not None else tuple(range(len(starts)))
    steps = ints(need(x, 4)) if optional(x, 4) is not None else (1,) * len(starts)
    if isinstance(value, Const) and not all(isinstance(d, int) for d in (*starts, *ends)):
        triangle = layout.lower_triangle(value)
        if triangle is not None:
            # The file holds the mask of so many positions, and is right for no more.
            most = value.array.shape[-1]
            cx.facts["table_length"] = min(most, cx.facts.get("table_length", most))
            value = triangle
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        value = layout.cut(value, axis, start, end, step)
    return value


@handles("Split")
def split(cx: Lift, node: OpNode, x: Inputs) -> Result:
    """Parts along one axis."""
    value = need(x, 0)
    sizes = shape_of(value)
    axis = affine.axis_of(node.attrs.get("axis", 0), len(sizes))
    total = sizes[axis]
    if not isinstance(total, int):
        raise Unmatched("a split of rows")
    count = len(node.outputs)
    if "split" in node.attrs:
        parts = tuple(node.attrs["split"])
    elif optional(x, 1) is not None:
        parts = ints(need(x, 1))
    else:
        each = -(-total // count)
        parts = tuple(min(each, total - i * each) for i in range(count))
    if len(parts) != count or sum(parts) != total or min(parts) < 0:
        raise ValueError(f"parts {parts} of {total}")
    starts = np.cumsum([0, *parts])
    return [
        layout.cut(value, axis, int(a), int(a) + n) for a, n in zip(starts, parts, strict=False)
    ]


@handles("Concat")
def concat(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Joins: constants, columns, index grids, and new keys or values to the cached ones."""
    from hornito.importers.onnx.match.attention import append

    values = [need(x, i) for i in range(len(x))]
    axis = node.attrs["axis"]
    empty = [isinstance(v, Const) and v.size == 0 for v in values]
    if any(empty) and not all(empty):
        kept = [(i, v) for i, v in enumerate(values) if not empty[i]]
        if len(kept) == 1 and isinstance(kept[0][1], Rows):
            return append(cx, None, kept[0][1], kept[0][0], axis)
    if len(values) == 2 and isinstance(values[0], Past):
        return append(cx, values[0], values[1], 1, axis)
    if any(isinstance(v, Grid) for v in values):
        return _stack(values, axis)
    return layout.concat(values, axis)


def _stack(values: list[Value], axis: int) -> Value:
    """Index tensors, each with a last axis of size 1, side by side."""
    rank = len(shape_of(values[0]))
    grids = []
    for value in values:
        grid = as_grid(value, shape_of(value))
        if grid is None or affine.axis_of(axis, rank) != rank - 1 or grid.shape[-1] != 1:
            raise Unmatched("index tensors are joined along their own axes")
        grids.append(Grid(grid.shape[:-1], grid.base, grid.steps[:-1]))
    return grids[0] if len(grids) == 1 else Stacked(tuple(grids))


def as_grid(value: Value, shape: affine.Dims) -> Grid | None:
    """A grid, or a constant that is one number everywhere, as a grid of that shape."""
    if isinstance(value, Grid):
        return value
    if isinstance(value, Const) and value.size == 1:
        item = value.numbers().reshape(-1)[0]
        if isinstance(item, Affine) or float(item) == int(item):
            return Grid(shape, affine.as_dim(item), (0,) * len(shape))
    if isinstance(value, Mask) and not value.atoms and float(value.table) == int(value.table):
        return Grid(shape, int(value.table), (0,) * len(shape))
    return None


@handles("Range")
def range_(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Counting; a grid when its length depends on the call."""
    (start,), (limit,), (step,) = (dims(need(x, i)) for i in range(3))
    for value in x:
        if isinstance(value, Const) and value.array.dtype.kind == "f":
            plain = value.scalar()
            if plain is None or plain != int(plain):
                raise Unmatched("a range of fractions")
    if not isinstance(step, int) or step == 0:
        raise Unmatched("a range whose step depends on the call")
    count = affine.minus(limit, start)
    if isinstance(count, int) and isinstance(start, int):
        length = max(0, -(-count // step))
        if length > MAX_COMPUTED:
            raise Unmatched(f"a range of {length} numbers")
        return Const(np.arange(start, start + length * step, step, dtype=np.int64))
    if step != 1:
        raise Unmatched("a range with a step")
    return Grid((count,), start, (1,))


@handles("ConstantOfShape")
def constant_of_shape(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """One number everywhere."""
    sizes = dims(need(x, 0))
    fill = node.attrs.get("value")
    item = fill.numbers().reshape(-1)[:1] if isinstance(fill, Const) else np.zeros(1, np.float32)
    return layout.expand(Const(item.reshape((1,) * len(sizes))), sizes)


@handles("CumSum")
def cumsum(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Positions as a running count of the attention mask (slots hold consecutive positions)."""
    value, (axis,) = need(x, 0), ints(need(x, 1))
    if node.attrs.get("reverse"):
        raise Unmatched("a running sum from the end")
    start = 0 if node.attrs.get("exclusive") else 1
    axis = affine.axis_of(axis, len(shape_of(value)))
    fill = number(value)
    if not is_attention_mask(value) and fill != 1.0:
        raise Unmatched(f"a running sum of {type(value).__name__}")
    cx.note("positions from a running sum")
    sizes = shape_of(value)
    return Grid(sizes, start, tuple(int(i == axis) for i in range(len(sizes))))


def is_attention_mask(value: Value) -> bool:
    """Whether it is 1 at valid slots and 0 elsewhere."""
    return (
        isinstance(value, Mask)
        and len(value.atoms) == 1
        and value.atoms[0].kind == "valid"
        and [float(v) for v in value.table] == [0.0, 1.0]
    )


@handles("ReduceSum")
def reduce_sum(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """The number of valid slots: the total length."""
    value = need(x, 0)
    if isinstance(value, Const):
        axes = axes_of(node, x)
        keep = bool(node.attrs.get("keepdims", 1))
        array = np.sum(value.numbers(), axis=axes, keepdims=keep)
        return Const(np.asarray(array), value.sources)
    if not is_attention_mask(value):
        raise Unmatched(f"a sum over {type(value).__name__}")
    cx.note("length from the mask's sum")
    sizes = shape_of(value)
    axes = axes_of(node, x) or tuple(range(len(sizes)))
    gone = {affine.axis_of(a, len(sizes)) for a in axes}
    total: Dim = 1
    for i in gone:
        total = affine.times(total, sizes[i])
    keep = bool(node.attrs.get("keepdims", 1))
    kept = [1 if i in gone else d for i, d in enumerate(sizes) if keep or i not in gone]
    if any(d != 1 for d in kept):
        raise Unmatched("a sum over a part of the mask")
    return Const(affine.objects([total]).reshape((1,) * len(kept)))


@handles("Gather")
def gather(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """The embedding, learned positions, elements of shapes, the mask at slots."""
    from hornito.importers.onnx.match.linear import embed

    table, index = need(x, 0), need(x, 1)
    axis = node.attrs.get("axis", 0)
    if isinstance(index, Ids):
        return embed(cx, table, index, axis)
    if isinstance(index, Grid):
        return _gather_grid(cx, table, index, axis)
    if not isinstance(index, Const):
        raise Unmatched(f"a gather by {type(index).__name__}")
    if isinstance(table, Const):
        array = table.array if table.bf16 else table.numbers()
        taken = np.take(array, index.numbers().astype(np.int64), axis=axis)
        if array.dtype == object:
            taken = affine.simplified(np.asarray(taken, dtype=object))
        return Const(np.asarray(taken), table.sources, table.bf16)
    sizes = shape_of(table)
    axis = affine.axis_of(axis, len(sizes))
    if isinstance(table, TABS) and axis != table.axis:
        picked = index.numbers().astype(np.int64)
        arrays = [np.take(a, picked, axis=axis) for a in table.arrays]
        moved = table.axis if table.axis < axis else table.axis + picked.ndim - 1
        return table.with_arrays(arrays, moved)
    (at,) = dims(index) if index.size == 1 else (None,)
    if at is None:
        raise Unmatched("a gather of several rows")
    end = affine.plus(at, 1) if at != -1 else layout.LAST
    part = layout.cut(table, axis, at, end)
    return part if index.shape else layout.squeeze(part, [axis])


def _gather_grid(cx: Lift, table: Value, index: Grid, axis: int) -> Value:
    if isinstance(table, Mask | Grid):
        return _at_index(table, index, affine.axis_of(axis, len(table.shape)))
    if isinstance(table, Const) and axis == 0 and len(table.shape) == 2:
        rows = row_axis(cx, index)
        width = table.array.shape[1]
        sizes = [1] * len(index.shape) + [width]
        cols = np.arange(width, dtype=np.int64).reshape(sizes)
        return Lookup(table, rows, index.shape[rows], cols)
    raise Unmatched(f"{type(table).__name__} is gathered by positions")


def row_axis(cx: Lift, grid: Grid) -> int:
    """The axis along which a grid holds the positions of the call's rows."""
    found = [i for i, step in enumerate(grid.steps) if step and grid.shape[i] != 1]
    if len(found) != 1 or grid.steps[found[0]] != 1 or grid.shape[found[0]] != affine.N:
        raise Unmatched("positions that are not those of the call's rows")
    if grid.base != cx.past:
        raise Unmatched(f"positions that start at {grid.base}, not after the past ({cx.past})")
    return found[0]


def _at_index(table: Mask | Grid, index: Grid, axis: int) -> Value:
    """`table[.., index, ..]`: the axis is replaced by those of the index."""
    sizes = (*table.shape[:axis], *index.shape, *table.shape[axis + 1 :])

    def steps(previous: tuple[int, ...]) -> tuple[int, ...]:
        own = tuple(previous[axis] * s for s in index.steps)
        return (*previous[:axis], *own, *previous[axis + 1 :])

    def base(previous: Dim, old: tuple[int, ...]) -> Dim:
        return affine.plus(previous, affine.times(index.base, old[axis]))

    if isinstance(table, Grid):
        return Grid(sizes, base(table.base, table.steps), steps(table.steps))
    atoms = tuple(Atom(a.kind, base(a.base, a.steps), steps(a.steps)) for a in table.atoms)
    return Mask(sizes, atoms, table.table)


@handles("GatherND")
def gather_nd(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """The mask at (batch, slot)."""
    table, index = need(x, 0), need(x, 1)
    if not isinstance(table, Mask) or not isinstance(index, Stacked):
        raise Unmatched(f"GatherND of {type(table).__name__}")
    if node.attrs.get("batch_dims", 0) or len(index.grids) != len(table.shape):
        raise Unmatched("GatherND over a part of the axes")
    shape = affine.broadcast(index.grids[0].shape, index.grids[1].shape)
    atoms = []
    for atom in table.atoms:
        base, steps = atom.base, [0] * len(shape)
        for step, grid in zip(atom.steps, index.grids, strict=True):
            base = affine.plus(base, affine.times(grid.base, step))
            for i, inner in enumerate(grid.steps):
                steps[i] += step * inner
        atoms.append(Atom(atom.kind, base, tuple(steps)))
    return Mask(shape, tuple(atoms), table.table)


@handles("ScatterND")
def scatter_nd(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """Writes a whole mask over another: the indices must be every place in order."""
    data, index, updates = need(x, 0), need(x, 1), need(x, 2)
    sizes = shape_of(data)
    if not isinstance(index, Stacked) or node.attrs.get("reduction", "none") != "none":
        raise Unmatched("ScatterND that is no assignment of a whole tensor")
    for i, grid in enumerate(index.grids):
        wanted = tuple(int(i == j and sizes[j] != 1) for j in range(len(sizes)))
        steps = tuple(0 if sizes[j] == 1 else s for j, s in enumerate(grid.steps))
        if grid.shape != sizes or steps != wanted or grid.base != 0:
            raise Unmatched("ScatterND to other places than all in order")
    if shape_of(updates) != sizes:
        raise Unmatched("ScatterND of a part")
    return updates
