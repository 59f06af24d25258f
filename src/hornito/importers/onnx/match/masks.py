"""Mask chains: comparisons of slots with positions, the attention mask, and all that is done to
them, until an attention asks what the chain means: causal, perhaps a window, perhaps key-valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hornito.graph.shapes import Dim
from hornito.importers.onnx import affine
from hornito.importers.onnx.match.numbers import number
from hornito.importers.onnx.match.shapes import as_grid, need
from hornito.importers.onnx.registry import Inputs, binary, handles, unary
from hornito.importers.onnx.values import (
    Array,
    Atom,
    Const,
    Grid,
    Mask,
    NanFlag,
    Scores,
    Unmatched,
    Value,
    shape_of,
)

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift
    from hornito.importers.onnx.reader import OpNode

#: Atoms of one mask; exports need three.
MAX_ATOMS = 10
#: A bias from here down hides a key whatever its score.
HIDDEN = -1e4

_TABLES: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Max": np.maximum,
    "Min": np.minimum,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
}
COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")


# -- positions ------------------------------------------------------------------------------


@binary("Add", "Sub", "Mul", "Max")
def grids(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """Arithmetic of positions and slots."""
    if not isinstance(a, Grid) and not isinstance(b, Grid):
        return None
    left, right = as_grid(a, shape_of(a)), as_grid(b, shape_of(b))
    if left is None or right is None:
        return None
    shape = affine.broadcast(left.shape, right.shape)
    x, y = _aligned(left, shape), _aligned(right, shape)
    if op in ("Add", "Sub"):
        sign = 1 if op == "Add" else -1
        steps = tuple(p + sign * q for p, q in zip(x.steps, y.steps, strict=True))
        return Grid(shape, affine.plus(x.base, affine.times(y.base, sign)), steps)
    if op == "Max":
        for one, other in ((x, y), (y, x)):
            rises = not any(one.steps) and min(other.steps, default=0) >= 0
            if rises and affine.at_least(other.base, one.base):
                return other
        return None
    for one, other in ((x, y), (y, x)):
        if not any(one.steps) and isinstance(one.base, int):
            steps = tuple(s * one.base for s in other.steps)
            return Grid(shape, affine.times(other.base, one.base), steps)
    return None


def _aligned(grid: Grid, shape: affine.Dims) -> Grid:
    pad = len(shape) - len(grid.shape)
    steps = tuple(0 if d == 1 else s for d, s in zip(grid.shape, grid.steps, strict=True))
    return Grid(shape, grid.base, (0,) * pad + steps)


@binary(*COMPARISONS)
def compare(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """Comparisons of positions and slots become atoms."""
    if not isinstance(a, Grid) and not isinstance(b, Grid):
        return None
    left, right = as_grid(a, shape_of(a)), as_grid(b, shape_of(b))
    if left is None or right is None:
        return None
    cx.note("mask comparison")
    shape = affine.broadcast(left.shape, right.shape)
    x, y = _aligned(left, shape), _aligned(right, shape)
    more = _difference(x, y)  # a - b
    less = _difference(y, x)
    if op == "Equal":
        both = Mask(shape, (more, less), np.array([[False, False], [False, True]]))
        return both
    atom = {"GreaterOrEqual": more, "LessOrEqual": less}.get(op)
    if atom is None:
        base = more if op == "Greater" else less
        atom = Atom("ge0", affine.plus(base.base, -1), base.steps)
    return Mask(shape, (atom,), np.array([False, True]))


def _difference(x: Grid, y: Grid) -> Atom:
    steps = tuple(p - q for p, q in zip(x.steps, y.steps, strict=True))
    return Atom("ge0", affine.minus(x.base, y.base), steps)


# -- tables ---------------------------------------------------------------------------------


def as_mask(value: Value | None) -> Mask | None:
    """A mask, or a constant that is one number everywhere."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, Const) and value.array.dtype != object and value.size:
        numbers = value.numbers()
        first = numbers.reshape(-1)[0]
        if value.size == 1 or (value.size <= 4096 and bool((numbers == first).all())):
            table = np.array(bool(first) if numbers.dtype == bool else float(first))
            return Mask(value.shape, (), table)
    return None


def combine(operation: Callable[..., Any], parts: Sequence[Mask]) -> Mask:
    """An elementwise operation of masks, as one on their tables."""
    shape: affine.Dims = ()
    for part in parts:
        shape = affine.broadcast(shape, part.shape)
    atoms: list[Atom] = []
    tables: list[Array] = []
    placed: list[list[int]] = []
    for part in parts:
        table, where = part.table, []
        for axis, atom in enumerate(part.atoms):
            wanted, flipped = _oriented(atom, part.shape, len(shape))
            if flipped:
                table = np.flip(table, axis)
            if wanted not in atoms:
                atoms.append(wanted)
            where.append(atoms.index(wanted))
        tables.append(table)
        placed.append(where)
    if len(atoms) > MAX_ATOMS:
        raise Unmatched(f"a mask of {len(atoms)} conditions")
    spread = [_spread(t, w, len(atoms)) for t, w in zip(tables, placed, strict=True)]
    with np.errstate(all="ignore"):
        table = np.asarray(operation(*np.broadcast_arrays(*spread)))
    return _without_idle(Mask(shape, tuple(atoms), np.array(table)))


def _spread(table: Array, where: list[int], count: int) -> Array:
    """A table over some atoms as one over all `count`."""
    if len(set(where)) != len(where):
        # The same atom twice in one mask: only equal truths go together.
        for i, atom in enumerate(where):
            if atom in where[:i]:
                first = where.index(atom)
                diagonal = np.diagonal(table, axis1=first, axis2=i)
                return _spread(np.moveaxis(diagonal, -1, first), where[:i] + where[i + 1 :], count)
    order = np.argsort(where)
    sizes = [1] * count
    for i in where:
        sizes[i] = 2
    return table.transpose(order).reshape(sizes)


def _oriented(atom: Atom, shape: affine.Dims, rank: int) -> tuple[Atom, bool]:
    """The atom over `rank` axes, its first step positive; whether its truth was turned round."""
    steps = tuple(0 if d == 1 else s for d, s in zip(shape, atom.steps, strict=True))
    steps = (0,) * (rank - len(steps)) + steps
    first = next((s for s in steps if s), 0)
    if atom.kind != "ge0" or first >= 0:
        return Atom(atom.kind, atom.base, steps), False
    turned = affine.plus(affine.times(atom.base, -1), -1)
    return Atom("ge0", turned, tuple(-s for s in steps)), True


def _without_idle(mask: Mask) -> Mask:
    """Drops atoms that are always true or always false, or that nothing depends on."""
    atoms, table = list(mask.atoms), mask.table
    for axis in reversed(range(len(atoms))):
        atom = atoms[axis]
        no, yes = np.take(table, 0, axis), np.take(table, 1, axis)
        same = np.array_equal(no, yes, equal_nan=table.dtype.kind == "f")
        fixed = None
        if atom.kind == "ge0" and not any(atom.steps):
            if affine.at_least(atom.base, 0):
                fixed = yes
            elif affine.at_least(affine.plus(affine.times(atom.base, -1), -1), 0):
                fixed = no
        if same or fixed is not None:
            table = yes if fixed is None else fixed
            del atoms[axis]
    return Mask(mask.shape, tuple(atoms), table)


@binary(*_TABLES)
def masks(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """An operation of masks and numbers."""
    if not isinstance(a, Mask) and not isinstance(b, Mask):
        return None
    left, right = as_mask(a), as_mask(b)
    if left is None or right is None:
        return None
    return combine(_TABLES[op], [left, right])


@unary("Not", "Neg", "Abs")
def mask_unary(cx: Lift, op: str, value: Value) -> Value | None:
    """An operation of one mask."""
    if not isinstance(value, Mask):
        return None
    function = {"Not": np.logical_not, "Neg": np.negative, "Abs": np.abs}[op]
    return Mask(value.shape, value.atoms, np.asarray(function(value.table)))


@handles("Where")
def where(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """A choice by a mask, the guard against NaN, or a constant condition."""
    from hornito.importers.onnx.match.attention import mask_scores

    condition, a, b = (need(x, i) for i in range(3))
    if isinstance(condition, NanFlag):
        if number(a) == 0.0 and isinstance(b, Scores) and b.soft:
            cx.note("NaN guard")
            return b
        raise Unmatched("a NaN guard that is no zero")
    if isinstance(condition, Const) and condition.size and condition.array.dtype == bool:
        flags = condition.numbers()
        if isinstance(a, Const) and isinstance(b, Const):
            return _where_const(flags, a, b)
        if bool(flags.all()) or not bool(flags.any()):
            chosen = a if bool(flags.all()) else b
            if shape_of(chosen) == affine.broadcast(
                affine.broadcast(shape_of(a), shape_of(b)), condition.shape
            ):
                return chosen
    mask = as_mask(condition)
    if mask is None:
        raise Unmatched(f"a choice by {type(condition).__name__}")
    for scores, other, keep in ((a, b, True), (b, a, False)):
        if isinstance(scores, Scores) and number(other) is not None:
            return mask_scores(cx, scores, mask, float(number(other) or 0.0), keep=keep)
    left, right = as_mask(a), as_mask(b)
    if left is not None and right is not None:
        return combine(np.where, [mask, left, right])
    only_valid = [atom.kind for atom in mask.atoms] == ["valid"]
    if only_valid and isinstance(a, Grid) and bool(mask.table[1]):
        return a  # positions of slots that hold nothing are never looked at
    if only_valid and isinstance(b, Grid) and not bool(mask.table[1]):
        return b
    raise Unmatched(f"a choice between {type(a).__name__} and {type(b).__name__}")


def _where_const(flags: Array, a: Const, b: Const) -> Const:
    left, right = a.numbers(), b.numbers()
    out = np.where(flags, left, right)
    if left.dtype == object or right.dtype == object:
        return Const(affine.simplified(affine.objects(out)), a.sources + b.sources)
    return Const(out, a.sources + b.sources)


@handles("Trilu")
def trilu(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """A triangle of a mask, zero elsewhere."""
    value = need(x, 0)
    shift = 0
    if len(x) > 1 and x[1] is not None:
        shift = int(number(x[1]) or 0)
    if isinstance(value, Const):
        cut = np.triu if node.attrs.get("upper", 1) else np.tril
        return Const(cut(value.numbers(), shift), value.sources)
    if not isinstance(value, Mask) or len(value.shape) < 2:
        raise Unmatched(f"a triangle of {type(value).__name__}")
    cx.note("mask triangle")
    lead = (0,) * (len(value.shape) - 2)
    if node.attrs.get("upper", 1):
        atom = Atom("ge0", -shift, (*lead, -1, 1))  # column - row >= shift
    else:
        atom = Atom("ge0", shift, (*lead, 1, -1))
    triangle = Mask(value.shape, (atom,), np.array([False, True]))
    zero = Mask(value.shape, (), np.array(False if value.table.dtype == bool else 0.0))
    return combine(np.where, [triangle, value, zero])


# -- meaning --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a mask lets a row see: keys at distance `0 <= d < window` (0: all), if valid."""

    window: int
    key_valid: bool


def meaning(mask: Mask | None, past: Dim) -> Meaning:
    """The meaning of a mask whose last axes are rows and slots.

    Raises:
        Unmatched: it is not causal, or has a condition that is not explained.
    """
    if mask is None:
        raise Unmatched(_NOT_CAUSAL)
    shown = _visible(combine(lambda t: t, [mask]))
    distances: dict[int, int] = {}  # threshold t: the atom says that row - slot >= t
    others: list[int] = []
    valid: list[int] = []
    for i, atom in enumerate(shown.atoms):
        offset = affine.minus(atom.base, past)
        lead_free = not any(atom.steps[:-2])
        if atom.kind == "valid" and lead_free and atom.steps[-2:] == (0, 1) and atom.base == 0:
            valid.append(i)
        elif atom.kind == "ge0" and lead_free and atom.steps[-2:] == (1, -1):
            if isinstance(offset, int):
                distances[-offset] = i
            else:
                others.append(i)
        else:
            raise Unmatched(f"a mask with a condition that is not explained: {_text(atom)}")
    bounds = sorted(distances)
    seen: list[bool] = []
    for region in range(len(bounds) + 1):
        truths: dict[int, int] = {distances[t]: int(k < region) for k, t in enumerate(bounds)}
        seen.append(_region(shown, truths, valid, others, True))
        if valid and seen[-1] and _region(shown, truths, valid, others, False):
            raise Unmatched("a mask that shows some keys that the attention mask hides")
    edges = [None, *bounds, None]
    visible = [(edges[i], edges[i + 1]) for i, flag in enumerate(seen) if flag]
    if not visible or visible[0][0] is None or visible[0][0] < 0:
        raise Unmatched(_NOT_CAUSAL)
    whole = all(a[1] == b[0] for a, b in pairwise(visible))
    if visible[0][0] != 0 or not whole:
        raise Unmatched("a mask that hides near keys and shows far ones")
    return Meaning(visible[-1][1] or 0, bool(valid))


_NOT_CAUSAL = (
    "attention without a causal mask: the model was probably traced with one token, which bakes a "
    "mask that is right for single steps only. Export it again with a longer dummy input"
)


def _text(atom: Atom) -> str:
    return f"{atom.kind} {atom.base} steps {atom.steps}"


def _visible(mask: Mask) -> Mask:
    """The mask as truth: shown or hidden."""
    if mask.table.dtype == bool:
        return mask
    table = mask.table.astype(np.float64)
    shown, hidden = np.abs(table) <= 1e-6, table <= HIDDEN
    if not bool((shown | hidden).all()):
        odd = table[~(shown | hidden)].reshape(-1)[0]
        raise Unmatched(f"a mask that adds {odd} to scores")
    return Mask(mask.shape, mask.atoms, shown)


def _region(
    mask: Mask, truths: dict[int, int], valid: list[int], others: list[int], is_valid: bool
) -> bool:
    """Whether keys are shown where the atoms have these truths; atoms in `others` (slots compared
    with rows as if there were no past) may take any truth that does not contradict them."""
    answers = set()
    for bits in range(1 << len(others)):
        index = [0] * len(mask.atoms)
        for i, truth in truths.items():
            index[i] = truth
        for i in valid:
            index[i] = int(is_valid)
        for k, i in enumerate(others):
            index[i] = bits >> k & 1
        if _possible(mask.atoms, index, [*truths, *others]):
            answers.add(bool(mask.table[tuple(index)]))
    if len(answers) != 1:
        raise Unmatched("a mask that compares slots with rows, not with positions")
    return answers.pop()


def _possible(atoms: Sequence[Atom], truth: list[int], which: list[int]) -> bool:
    """Whether no atom that is true implies one that is false (all have the same steps)."""
    for i in which:
        for j in which:
            stronger = affine.at_least(atoms[j].base, atoms[i].base)
            if truth[i] and not truth[j] and stronger:
                return False
    return True
