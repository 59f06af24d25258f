"""Moving axes about, for every kind of value: reshape, transpose, expand, slice, concat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hornito.graph.shapes import Dim
from hornito.importers.onnx.affine import (
    ENDLESS,
    Dims,
    at_least,
    axis_of,
    broadcast,
    equal,
    minus,
    resolve_reshape,
    shape_text,
    whole,
)
from hornito.importers.onnx.blocks import transposed
from hornito.importers.onnx.values import (
    MAX_COMPUTED,
    TABS,
    Array,
    Atom,
    Const,
    Folded,
    Grid,
    Keys,
    Mask,
    Matrix,
    Past,
    Rows,
    Tab,
    Term,
    Unmatched,
    Value,
    shape_of,
)

LAST = 1 << 31
"""Slice ends from here on mean the end of the axis."""


def reshape(value: Value, target: Sequence[Dim], *, allow_zero: bool = False) -> Value:
    """ONNX Reshape."""
    shape = resolve_reshape(shape_of(value), target, allow_zero=allow_zero)
    if isinstance(value, Const):
        return replace(value, array=value.array.reshape(whole(shape)))
    if isinstance(value, Grid | Mask):
        return _index_reshape(value, shape)
    if isinstance(value, TABS):
        return _tab_reshape(value, shape)
    if isinstance(value, Folded):
        return _tab_reshape(value.inner, shape)
    if equal(shape, shape_of(value)):
        return value
    raise Unmatched(f"{type(value).__name__} can't be reshaped to {shape_text(shape)}")


def _tab_reshape(value: Tab, shape: Dims) -> Value:
    where = [i for i, d in enumerate(shape) if d == value.dim]
    before = math.prod(value.arrays[0].shape[: value.axis])
    for axis in where:
        rest = shape[:axis] + shape[axis + 1 :]
        if not all(isinstance(d, int) for d in rest):
            continue
        if math.prod(whole(shape[:axis])) == before:
            sizes = whole([1 if i == axis else d for i, d in enumerate(shape)])
            return value.with_arrays([a.reshape(sizes) for a in value.arrays], axis)
    folded = _fold(value, shape)
    if folded is not None:
        return folded
    raise Unmatched(
        f"a reshape of {shape_text(value.shape)} to {shape_text(shape)} mixes rows and columns"
    )


def _fold(value: Tab, shape: Dims) -> Folded | None:
    """Rows and heads as one axis, as norms of each head are exported by some."""
    for axis, size in enumerate(shape):
        if not isinstance(value, Rows) or isinstance(size, int) or isinstance(value.dim, int):
            continue
        count = size.terms[0][1] // value.dim.terms[0][1]
        if size == value.dim * count and count > 1:
            inner = _tab_reshape(value, (*shape[:axis], value.dim, count, *shape[axis + 1 :]))
            return Folded(inner) if isinstance(inner, Rows) else None
    return None


def _index_reshape(value: Grid | Mask, shape: Dims) -> Value:
    """Only axes of size 1 may come and go."""
    old = [i for i, d in enumerate(value.shape) if d != 1]
    new = [i for i, d in enumerate(shape) if d != 1]
    if [value.shape[i] for i in old] != [shape[i] for i in new]:
        if isinstance(value, Mask) and not value.atoms:
            return replace(value, shape=shape)
        raise Unmatched(f"a mask {shape_text(value.shape)} is reshaped to {shape_text(shape)}")
    moved = dict(zip(new, old, strict=True))

    def steps(previous: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(previous[moved[i]] if i in moved else 0 for i in range(len(shape)))

    return _restep(value, shape, steps)


def _restep(value: Grid | Mask, shape: Dims, steps: Any, shift: Any = None) -> Value:
    """A grid or mask of another shape, its steps mapped and its bases shifted by `shift(steps)`."""

    def base(previous: Dim, old: tuple[int, ...]) -> Dim:
        return previous if shift is None else previous + shift(old)

    if isinstance(value, Grid):
        return Grid(shape, base(value.base, value.steps), steps(value.steps))
    atoms = tuple(Atom(a.kind, base(a.base, a.steps), steps(a.steps)) for a in value.atoms)
    return Mask(shape, atoms, value.table)


def transpose(value: Value, perm: Sequence[int]) -> Value:
    """ONNX Transpose."""
    if sorted(perm) != list(range(len(shape_of(value)))):
        raise ValueError(f"perm {list(perm)} is no order of {len(shape_of(value))} axes")
    if isinstance(value, Const):
        return replace(value, array=value.array.transpose(perm))
    if isinstance(value, Grid | Mask):
        shape = tuple(value.shape[p] for p in perm)
        return _restep(value, shape, lambda steps: tuple(steps[p] for p in perm))
    if isinstance(value, TABS):
        arrays = [a.transpose(perm) for a in value.arrays]
        return value.with_arrays(arrays, list(perm).index(value.axis))
    if isinstance(value, Matrix):
        return value if list(perm) == [0, 1] else Matrix(transposed(value.data))
    raise Unmatched(f"{type(value).__name__} is transposed")


def unsqueeze(value: Value, axes: Sequence[int]) -> Value:
    """ONNX Unsqueeze; the axes count in the result."""
    shape = shape_of(value)
    rank = len(shape) + len(axes)
    at = sorted(axis_of(axis, rank) for axis in axes)
    if len(set(at)) != len(at):
        raise ValueError(f"axes {list(axes)} repeat")
    sizes = list(shape)
    for axis in at:
        sizes.insert(axis, 1)
    return _resize(value, tuple(sizes), [i for i in range(rank) if i not in at])


def squeeze(value: Value, axes: Sequence[int] | None) -> Value:
    """ONNX Squeeze."""
    shape = shape_of(value)
    if axes is None:
        gone = {i for i, d in enumerate(shape) if d == 1}
    else:
        gone = {axis_of(axis, len(shape)) for axis in axes}
        if any(shape[i] != 1 for i in gone):
            raise ValueError(f"axes {list(axes)} of {shape_text(shape)} are not of size 1")
    kept = [i for i in range(len(shape)) if i not in gone]
    return _resize(value, tuple(shape[i] for i in kept), None)


def _resize(value: Value, shape: Dims, kept: list[int] | None) -> Value:
    if isinstance(value, TABS) and kept is not None:
        sizes = [1] * len(shape)
        for i, axis in enumerate(kept):
            sizes[axis] = value.arrays[0].shape[i]
        return value.with_arrays([a.reshape(sizes) for a in value.arrays], kept[value.axis])
    return reshape(value, shape, allow_zero=True)


def expand(value: Value, target: Sequence[Dim]) -> Value:
    """ONNX Expand."""
    shape = broadcast(shape_of(value), target)
    if isinstance(value, Const):
        if all(isinstance(d, int) for d in shape):
            if math.prod(whole(shape)) > MAX_COMPUTED:
                raise Unmatched(f"a constant is expanded to {shape_text(shape)}")
            return replace(value, array=np.broadcast_to(value.array, whole(shape)))
        number = value.scalar()
        if number is None:
            raise Unmatched(f"a table {value.shape} is expanded to {shape_text(shape)}")
        table = np.array(bool(number) if value.array.dtype == bool else number)
        return Mask(shape, (), table)
    if isinstance(value, Grid | Mask):
        rank, old = len(shape), len(value.shape)

        def steps(previous: tuple[int, ...]) -> tuple[int, ...]:
            padded = (0,) * (rank - old) + previous
            sizes = (1,) * (rank - old) + value.shape
            return tuple(0 if d == 1 else s for s, d in zip(padded, sizes, strict=True))

        return _restep(value, shape, steps)
    if isinstance(value, TABS):
        return tab_expand(value, shape)
    if equal(shape, shape_of(value)):
        return value
    raise Unmatched(f"{type(value).__name__} is expanded to {shape_text(shape)}")


def tab_expand(value: Tab, shape: Dims) -> Tab:
    """A table broadcast to a shape that holds its dimension of rows."""
    axis = value.axis + len(shape) - len(value.shape)
    if shape[axis] != value.dim:
        raise Unmatched(f"rows {shape_text(value.shape)} are expanded to {shape_text(shape)}")
    sizes = whole([1 if i == axis else d for i, d in enumerate(shape)])
    if math.prod(sizes) > MAX_COMPUTED:
        raise Unmatched(f"{shape_text(value.shape)} is expanded to {shape_text(shape)}")
    return value.with_arrays([np.broadcast_to(a, sizes) for a in value.arrays], axis)


def span(start: Dim, stop: Dim, size: Dim) -> tuple[Dim, Dim]:
    """Bounds of a slice with step 1, from the front; Unmatched when they depend on the call."""

    def place(at: Dim) -> Dim:
        if isinstance(at, int):
            if at >= LAST:
                return size
            if at <= -LAST:
                return 0
            if isinstance(size, int):
                return min(max(at + size if at < 0 else at, 0), size)
            return size + at if at < 0 else at
        # A bound that is -N counts from the end.
        if at.const <= 0 and all(c < 0 for _, c in at.terms):
            return size + at
        return at

    first, last = place(start), place(stop)
    if at_least(last, size):
        last = size
    if not at_least(last, first) or not at_least(size, last) or not at_least(first, 0):
        raise Unmatched(f"a slice from {start} to {stop} of {size} depends on the call")
    return first, last


def cut(value: Value, axis: int, start: Dim, stop: Dim, step: int = 1) -> Value:
    """A slice along one axis."""
    shape = shape_of(value)
    axis = axis_of(axis, len(shape))
    if isinstance(value, Const):
        if isinstance(start, int) and isinstance(stop, int):
            index: list[Any] = [slice(None)] * len(shape)
            low = -(1 << 62) if step < 0 and stop <= -LAST else stop
            index[axis] = slice(start, None if low == -(1 << 62) else low, step)
            return replace(value, array=value.array[tuple(index)])
        raise Unmatched(f"a constant {value.shape} is sliced from {start} to {stop}")
    lanes = isinstance(value, TABS) and axis != value.axis
    if step < 1 or (step != 1 and not lanes):
        raise Unmatched(f"a slice with step {step}")
    first, last = span(start, stop, shape[axis])
    if first == 0 and last == shape[axis] and step == 1:
        return value
    sizes = (*shape[:axis], minus(last, first), *shape[axis + 1 :])
    if isinstance(value, Grid | Mask):
        return _restep(value, sizes, lambda steps: steps, lambda steps: first * steps[axis])
    if isinstance(value, TABS) and axis != value.axis:
        index = [slice(None)] * len(shape)
        index[axis] = slice(first, last, step)
        return value.with_arrays([a[tuple(index)] for a in value.arrays], value.axis)
    if isinstance(value, Rows) and last == value.dim and minus(last, first) == 1:
        # The last row only, which is what a plan selects anyway.
        return replace(value, dim=1)
    raise Unmatched(
        f"{type(value).__name__} {shape_text(shape)} is cut from {first} to {last} on axis {axis}"
    )


def lower_triangle(value: Const) -> Mask | None:
    """A constant causal mask `[.., n, n]` as what it says, for any n: column <= row."""
    if value.array.ndim < 2 or value.array.size > MAX_COMPUTED:
        return None
    array = value.array
    rows, cols = array.shape[-2:]
    flat = array.reshape(-1, rows, cols)
    if rows != cols or len(flat) != 1 or array.dtype not in (np.bool_, np.uint8):
        return None
    if not np.array_equal(flat[0].astype(bool), np.tri(rows, dtype=bool)):
        return None
    steps = (0,) * (array.ndim - 2) + (1, -1)
    shape = (*array.shape[:-2], ENDLESS, ENDLESS)
    return Mask(shape, (Atom("ge0", 0, steps),), np.array([False, True]))


def concat(values: Sequence[Value], axis: int) -> Value:
    """ONNX Concat, of constants or of tables of one kind along an axis that is not the rows'."""
    first = values[0]
    axis = axis_of(axis, len(shape_of(first)))
    if all(isinstance(v, Const) for v in values):
        arrays = [v.numbers() for v in values if isinstance(v, Const)]
        sources = sum((v.sources for v in values if isinstance(v, Const)), ())
        return Const(np.concatenate(arrays, axis=axis), sources)
    if len(values) == 1:
        return first
    if not isinstance(first, TABS) or axis == first.axis:
        raise Unmatched(f"{type(first).__name__} is joined with {type(values[1]).__name__}")
    if isinstance(first, Rows):
        return _concat_rows(values, axis)
    for other in values:
        alike = type(other) is type(first) and isinstance(other, TABS)
        if not alike or _identity(other) != _identity(first):
            raise Unmatched("tables of different kinds are joined")
    columns = zip(*(v.arrays for v in values if isinstance(v, TABS)), strict=True)
    return first.with_arrays([np.concatenate(c, axis=axis) for c in columns], first.axis)


def _identity(tab: Value) -> tuple[Any, ...]:
    """What two tables must share to be parts of one."""
    if isinstance(tab, Rows):
        return (tab.value, tab.axis, tab.dim, tab.factor)
    if isinstance(tab, Past):
        return (tab.layer, tab.part, tab.axis, tab.dim)
    if isinstance(tab, Keys):
        return (tab.layer, tab.part, tab.value, tab.axis, tab.dim, tab.factor)
    kind = getattr(tab, "kind", 0)
    table = id(getattr(tab, "table", None))
    return (kind, table, tab.axis, tab.dim)  # type: ignore[union-attr]


def _concat_rows(values: Sequence[Value], axis: int) -> Value:
    rows = [v for v in values if isinstance(v, Rows)]
    first = rows[0]
    if len(rows) != len(values) or any(_identity(r) != _identity(first) for r in rows):
        raise Unmatched("columns of different activations are joined")
    count = max(len(r.terms) for r in rows)
    terms = []
    for i in range(count):
        parts = [r.terms[i] if i < len(r.terms) else nothing(r.terms[0]) for r in rows]
        joined = [
            np.concatenate([getattr(p, name) for p in parts], axis=axis)
            for name in ("cols", "coef", "kind", "freq")
        ]
        terms.append(Term(*joined))
    return Rows(first.value, first.axis, first.dim, tuple(terms), first.factor)


def nothing(like: Term) -> Term:
    """A term that adds zero."""
    shape = like.cols.shape
    zero: Array = np.broadcast_to(np.float64(0.0), shape)
    return Term(like.cols, zero, np.broadcast_to(np.int8(0), shape), zero)
