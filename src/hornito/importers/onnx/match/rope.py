"""RoPE: tables from positions and frequencies, turned columns, and tables made at export."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hornito.importers.families import decimal
from hornito.importers.onnx import affine
from hornito.importers.onnx.layout import nothing, tab_expand
from hornito.importers.onnx.match.numbers import number
from hornito.importers.onnx.match.shapes import row_axis
from hornito.importers.onnx.registry import binary, unary
from hornito.importers.onnx.values import (
    Angles,
    Const,
    Floats,
    Grid,
    Lookup,
    Rows,
    Term,
    Trig,
    Unmatched,
    Value,
    widen,
)

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift

#: Rows of a table that are read at a time.
_PART = 1 << 14


@binary("Mul")
def angles(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """Positions times frequencies."""
    for grid, table in ((a, b), (b, a)):
        if isinstance(grid, Grid) and isinstance(table, Const) and table.array.dtype.kind == "f":
            return turn_angles(cx, grid, table)
    return None


def turn_angles(cx: Lift, grid: Grid, table: Const) -> Angles:
    """`position * frequency`, the table constant along the axis of rows."""
    axis = row_axis(cx, grid)
    shape = affine.broadcast(grid.shape, table.shape)
    axis += len(shape) - len(grid.shape)
    cx.note("RoPE angles")
    sizes = [1 if i == axis else d for i, d in enumerate(shape)]
    numbers = table.numbers().astype(np.float64)
    return Angles(axis, grid.shape[axis - len(shape)], np.broadcast_to(numbers, sizes))  # type: ignore[arg-type]


@unary("Cos", "Sin")
def trig(cx: Lift, op: str, value: Value) -> Value | None:
    """Cos and sin of angles."""
    if not isinstance(value, Angles):
        return None
    one = np.broadcast_to(np.float64(1.0), value.freq.shape)
    return Trig(1 if op == "Cos" else 2, value.axis, value.dim, value.freq, one)


@binary("Mul", "Div")
def scaled(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """The attention scaling of the tables, the scale of activations."""
    for value, factor in ((a, b), (b, a)):
        by = number(factor)
        if by is None or (op == "Div" and value is b):
            continue
        by = 1.0 / by if op == "Div" else by
        if isinstance(value, Trig):
            return replace(value, coef=value.coef * exact(by))
        if isinstance(value, Angles):
            return replace(value, freq=value.freq * by)
        if isinstance(value, Rows):
            return scale_rows(cx, value, by)
    return None


def exact(by: float) -> float:
    """1 where fp32 noise hides it."""
    return 1.0 if abs(by - 1.0) < 1e-7 else by


def scale_rows(cx: Lift, rows: Rows, by: float) -> Rows:
    """Activations times a number; that of the embedding is an attribute of it."""
    node = cx.dag.nodes[rows.value]
    fresh = node.op == "embedding" and "scale" not in node.attrs
    if fresh and rows.plain and rows.factor == 1.0 and by != 1.0:
        scale = root_of(by, node.width)
        made = cx.dag.emit(
            "embedding", node.inputs, {"scale": scale}, width=node.width, root=cx.now
        )
        return replace(rows, value=made)
    return replace(rows, factor=rows.factor * by)


def root_of(by: float, width: int) -> float:
    """`sqrt(width)` when `by` is that in fp32 or fp16, else `by` itself."""
    near = float(width**0.5)
    half = float(np.float16(near))
    return near if abs(by / near - 1) < 1e-6 or by == half else decimal(by)


@binary("Mul")
def turned(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """Columns times cos or sin."""
    for rows, table in ((a, b), (b, a)):
        if isinstance(table, Lookup) and isinstance(rows, Rows):
            raise Unmatched("activations are multiplied by rows of a table")
        if isinstance(rows, Rows) and isinstance(table, Trig):
            return _turn(rows, table)
    return None


def _turn(rows: Rows, table: Trig) -> Rows:
    shape = affine.broadcast(rows.shape, table.shape)
    left, right = tab_expand(rows, shape), tab_expand(table, shape)
    if left.axis != right.axis or not isinstance(left, Rows) or not isinstance(right, Trig):
        raise Unmatched("columns and rotations along different axes")
    terms = []
    for term in left.terms:
        if (term.kind[term.coef != 0] != 0).any():
            raise Unmatched("columns that are turned twice")
        kind = np.broadcast_to(np.int8(right.kind), term.kind.shape)
        terms.append(Term(term.cols, term.coef * right.coef, kind, right.freq))
    return replace(left, terms=tuple(terms))


@binary("Add", "Sub")
def rotation_sum(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """The sum of turned columns of one value."""
    if not isinstance(a, Rows) or not isinstance(b, Rows) or a.value != b.value:
        return None
    if not any(t.kind.any() for r in (a, b) for t in r.terms):
        return None
    if a.shape != b.shape or a.axis != b.axis or a.factor != b.factor:
        return None
    sign = 1.0 if op == "Add" else -1.0
    minus = tuple(replace(t, coef=t.coef * sign) for t in b.terms)
    return replace(a, terms=tuple(_merged([*a.terms, *minus])))


def _merged(terms: list[Term]) -> list[Term]:
    """Terms without those that add nothing anywhere."""
    live = [t for t in terms if (t.coef != 0).any()]
    return live or [nothing(terms[0])]


@unary("Neg")
def negated(cx: Lift, op: str, value: Value) -> Value | None:
    """Columns with the sign turned."""
    if isinstance(value, Rows):
        terms = tuple(replace(t, coef=t.coef * -1.0) for t in value.terms)
        return replace(value, terms=terms)
    return None


def from_tables(cos: Const, sin: Const) -> tuple[Floats, float]:
    """Frequencies `[R/2]` and scale of tables `[positions, R/2]` of cos and sin.

    The phase of every frequency is followed through ever longer steps, so that its error is that of
    the table divided by the table's length.

    Raises:
        Unmatched: they are no such tables.
    """
    length = cos.array.shape[0] if cos.array.ndim else 0
    if cos.array.ndim != 2 or cos.shape != sin.shape or length < 2:
        raise Unmatched(f"tables {cos.shape} and {sin.shape} are no cos and sin of positions")
    # Tables for 131072 positions are large: they are read in parts.
    some = slice(None, None, max(1, length // 4096))
    scale = float(np.median(np.hypot(_rows(cos, some), _rows(sin, some))))
    half = cos.array.dtype == np.float16 or cos.bf16
    scale = 1.0 if abs(scale - 1) < (2e-3 if half else 1e-6) else scale
    first = slice(1, 2)
    freq: Floats = np.arctan2(_rows(sin, first), _rows(cos, first))[0]
    step = 2
    while step < length:
        freq = _refined(freq, step, cos, sin)
        step *= 2
    freq = _refined(freq, length - 1, cos, sin)
    for start in range(0, length, _PART):
        part = slice(start, min(start + _PART, length))
        angle = np.arange(part.start, part.stop)[:, None] * freq[None]
        worst = np.maximum(
            np.abs(np.cos(angle) * scale - _rows(cos, part)),
            np.abs(np.sin(angle) * scale - _rows(sin, part)),
        )
        # An angle in fp32 is off by its own rounding and by that of its frequency.
        allowed = scale * ((2e-2 if half else 1e-5) + np.abs(angle) * 2.0**-23)
        if not bool((worst <= allowed).all()):
            raise Unmatched(
                f"tables that are no cos and sin of positions (off by {worst.max():.2g})"
            )
    return freq, scale


def _rows(table: Const, rows: slice) -> Floats:
    part = table.array[rows]
    return (widen(part) if table.bf16 else part).astype(np.float64)


def _refined(freq: Floats, step: int, cos: Const, sin: Const) -> Floats:
    row = slice(step, step + 1)
    phase = np.arctan2(_rows(sin, row), _rows(cos, row))[0]
    turns = np.round((freq * step - phase) / (2 * np.pi))
    refined: Floats = (phase + 2 * np.pi * turns) / step
    return refined


def snapped(freq: Floats, tolerance: float) -> npt.NDArray[np.float64]:
    """Plain RoPE's frequencies when these are them within a tolerance, relative to the table."""
    half = len(freq)
    index = np.arange(half) / half
    if half < 2 or (freq <= 0).any():
        return freq
    theta = float(np.exp(-np.dot(index, np.log(freq)) / np.dot(index, index)))
    for digits in (1, 2, 3):
        exact_freq = float(f"{theta:.{digits - 1}e}") ** -index
        if float(np.abs(exact_freq - freq).max()) < tolerance:
            near = np.abs(exact_freq / freq - 1)
            if float(near.max()) < 0.05:
                return exact_freq
    return freq


def trig_of(cx: Lift, value: Value, kind: int, other: Value) -> Trig | None:
    """A table of cos or sin looked up by position, as what it holds."""
    if not isinstance(value, Lookup) or not isinstance(other, Lookup):
        return None
    pair = (value.table, other.table) if kind == 1 else (other.table, value.table)
    freq, scale = from_tables(*pair)
    table = freq[value.cols]
    return Trig(kind, value.axis, value.dim, table, np.full(table.shape, scale))
