"""Building a tensor graph: the primitives that the op handlers speak.

A primitive whose operands are all known computes with numpy at once, in their own types; that is
how shape arithmetic folds, with exact 64-bit integers. Anything else becomes a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hornito.errors import UnsupportedError
from hornito.importers.onnx_generic.numbers import FOLDED, FOLDED_REDUCTIONS
from hornito.tensor.graph import (
    DTYPES,
    FLOATS,
    MAX_ELEMENTS,
    MAX_RANK,
    Array,
    Attr,
    TensorGraph,
    TensorNode,
    TensorValue,
    round_bfloat16,
    runs,
    to_words,
)
from hornito.tensor.kernels import broadcast_strides, strides_of

MAX_FOLDED = 1 << 22
"""Elements of a constant that is computed with on the host."""
MAX_CONSTANT = 1 << 28
"""Elements of a constant that is made on the host: a file may ask for any size in a few bytes."""


MAX_AXIS = 1 << 24
"""Elements of an axis that is copied by a list of indices."""


class NeedsValue(UnsupportedError):
    """A shape depends on graph inputs, whose values must be given at compile time.

    Attributes:
        inputs: the graph inputs.
    """

    def __init__(self, names: Iterable[str], why: str) -> None:
        self.inputs = sorted(names)
        options = " ".join(f"--value {name}=FILE.npy" for name in self.inputs)
        super().__init__(
            f"{why} depends on the values of {', '.join(self.inputs)}: shapes are static, so fix "
            f"them with {options}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ref:
    """A value while the graph is built: known numbers, or the name of a device value.

    `origins` are the graph inputs that its numbers depend on.
    """

    dtype: str
    shape: tuple[int, ...]
    array: Array | None = None
    name: str = ""
    origins: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        return len(self.shape)


def known(array: Any, dtype: str | None = None) -> Ref:
    """A constant."""
    array = np.asarray(array)
    return Ref(dtype or str(array.dtype), array.shape, array)


def check_size(shape: Sequence[int], most: int = MAX_ELEMENTS) -> None:
    """UnsupportedError where a shape holds more elements than `most`, before it takes memory."""
    if math.prod(shape) > most:
        raise UnsupportedError(
            f"shape {tuple(int(d) for d in shape)} is too large: {math.prod(shape)} elements, at "
            f"most {most} are supported here"
        )


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The host type of an element type."""
    return np.dtype("float32" if dtype == "bfloat16" else dtype)


class Builder:
    """A tensor graph in the making."""

    def __init__(self) -> None:
        self.graph = TensorGraph()
        self.source = ""
        self._constants: dict[object, str] = {}
        self._kept: list[Array] = []

    # -- values -----------------------------------------------------------------------------

    def input(self, name: str, dtype: str, shape: tuple[int, ...]) -> Ref:
        """A graph input."""
        self.graph.add_value(name, TensorValue(dtype, shape))
        self.graph.inputs.append(name)
        return Ref(dtype, shape, None, name, frozenset((name,)))

    def place(self, ref: Ref) -> str:
        """The device value of a ref; a constant is stored once."""
        if ref.array is None:
            return ref.name
        if len(ref.shape) > MAX_RANK:
            raise UnsupportedError(f"rank {len(ref.shape)}; at most {MAX_RANK} is supported")
        words = to_words(ref.array, ref.dtype, "a constant")
        key = (ref.dtype, ref.shape, words.tobytes() if words.size < 4096 else id(ref.array))
        if key not in self._constants:
            name = f"const{len(self._constants)}"
            self._constants[key] = self.graph.add_constant(name, ref.dtype, ref.array)
            self._kept.append(ref.array)  # it lives as long as its id stands for it
        return self._constants[key]

    def numbers(self, ref: Ref | None, why: str) -> Array:
        """The known numbers of a ref.

        Raises:
            NeedsValue: it depends on graph inputs.
        """
        if ref is None:
            raise UnsupportedError(f"{why} is absent")
        if ref.array is not None:
            return ref.array
        raise NeedsValue(ref.origins, why)

    def integers(self, ref: Ref | None, why: str) -> list[int]:
        """The known integers of a ref, flat."""
        return [int(v) for v in self.numbers(ref, why).reshape(-1)]

    def node(
        self,
        op: str,
        inputs: Sequence[Ref],
        dtype: str,
        shape: Sequence[int],
        attrs: Mapping[str, Attr] | None = None,
    ) -> Ref:
        """Append a node with one result."""
        shape = tuple(int(d) for d in shape)
        if len(shape) > MAX_RANK:
            raise UnsupportedError(f"rank {len(shape)}; at most {MAX_RANK} is supported")
        if math.prod(shape) == 0:
            return known(np.zeros(shape, numpy_dtype(dtype)), dtype)
        names = tuple(self.place(ref) for ref in inputs)
        name = f"{op}{len(self.graph.nodes)}"
        self.graph.add_value(name, TensorValue(dtype, shape))
        self.graph.nodes.append(
            TensorNode(op, name, names, (name,), dict(attrs or {}), self.source)
        )
        return Ref(dtype, shape, None, name, _origins(inputs))

    def pair(
        self,
        op: str,
        inputs: Sequence[Ref],
        dtypes: tuple[str, str],
        shape: Sequence[int],
        attrs: Mapping[str, Attr],
    ) -> tuple[Ref, Ref]:
        """Append a node with two results of one shape."""
        shape = tuple(shape)
        names = tuple(self.place(ref) for ref in inputs)
        name = f"{op}{len(self.graph.nodes)}"
        made = (name, f"{name}b")
        for result, dtype in zip(made, dtypes, strict=True):
            self.graph.add_value(result, TensorValue(dtype, shape))
        self.graph.nodes.append(TensorNode(op, name, names, made, dict(attrs), self.source))
        origins = _origins(inputs)
        first, second = (
            Ref(dtype, shape, None, result, origins)
            for result, dtype in zip(made, dtypes, strict=True)
        )
        return first, second

    # -- shapes -----------------------------------------------------------------------------

    def reshape(self, x: Ref, shape: Sequence[int]) -> Ref:
        """The same numbers under another shape."""
        shape = tuple(int(d) for d in shape)
        if math.prod(shape) != x.size or any(d < 0 for d in shape):
            raise UnsupportedError(f"shape {x.shape} can't become {shape}")
        if x.array is not None:
            return Ref(x.dtype, shape, x.array.reshape(shape))
        if shape == x.shape:
            return x
        return self.node("alias", [x], x.dtype, shape)

    def view(
        self, x: Ref, shape: Sequence[int], maps: Sequence[Sequence[int]], fill: float | int = 0
    ) -> Ref:
        """`result[i, j, ..] = x.flat[maps[0][i] + maps[1][j] + ..]`, or `fill` where one is -1."""
        shape = tuple(int(d) for d in shape)
        arrays = [np.asarray(m, np.int64) for m in maps]
        dims = [len(m) for m in arrays]
        kind = numpy_dtype(x.dtype)
        if x.array is not None:
            total = np.zeros((), np.int64)
            missing = np.zeros((), bool)
            for entries in arrays:
                total = total[..., None] + np.maximum(entries, 0)
                missing = missing[..., None] | (entries < 0)
            flat = x.array.reshape(-1) if x.size else np.zeros(1, kind)
            found = np.where(missing, np.asarray(fill).astype(kind), flat[total])
            return Ref(x.dtype, shape, found.astype(kind).reshape(shape))
        word = int(to_words(np.asarray([fill]).astype(kind), x.dtype, "a fill value")[0])
        attrs: dict[str, Attr] = {"dims": dims, "fill": word}
        attrs.update({f"map{i}": runs(m.tolist()) for i, m in enumerate(arrays)})
        return self.node("view", [x], x.dtype, shape, attrs)

    def _check_view(self, x: Ref, shape: Sequence[int]) -> None:
        check_size(shape, MAX_ELEMENTS if x.array is None else MAX_CONSTANT)
        check_size((max(shape, default=1),), MAX_AXIS)

    def transpose(self, x: Ref, order: Sequence[int]) -> Ref:
        """Axes in another order."""
        shape = [x.shape[a] for a in order]
        moved = [a for a in order if x.shape[a] != 1]
        if moved == sorted(moved):
            return self.reshape(x, shape)
        own = strides_of(x.shape)
        return self.view(x, shape, [[i * own[a] for i in range(x.shape[a])] for a in order])

    def take(self, x: Ref, axis_maps: Mapping[int, Sequence[int]], fill: float | int = 0) -> Ref:
        """Indices along axes, -1 for `fill`; other axes stay."""
        own = strides_of(x.shape)
        sizes = [len(axis_maps.get(axis, range(dim))) for axis, dim in enumerate(x.shape)]
        self._check_view(x, sizes)
        maps = []
        for axis, dim in enumerate(x.shape):
            chosen = axis_maps.get(axis, range(dim))
            maps.append([-1 if i < 0 else i * own[axis] for i in chosen])
        shape = [len(m) for m in maps]
        if all(
            list(m) == [i * s for i in range(d)] for m, s, d in zip(maps, own, x.shape, strict=True)
        ):
            return x
        return self.view(x, shape, maps, fill)

    def expand(self, x: Ref, shape: Sequence[int]) -> Ref:
        """Broadcast to a shape."""
        shape = tuple(int(d) for d in shape)
        if x.shape == shape:
            return x
        if x.size == math.prod(shape):
            return self.reshape(x, shape)
        self._check_view(x, shape)
        steps = broadcast_strides(x.shape, shape)
        return self.view(
            x, shape, [[i * s for i in range(d)] for d, s in zip(shape, steps, strict=True)]
        )

    def concat(self, parts: Sequence[Ref], axis: int) -> Ref:
        """Parts along an axis."""
        shape = list(parts[0].shape)
        for part in parts[1:]:
            same = part.shape[:axis] + part.shape[axis + 1 :]
            if same != tuple(shape[:axis] + shape[axis + 1 :]):
                raise UnsupportedError(f"parts of shapes {[p.shape for p in parts]}")
        shape[axis] = sum(p.shape[axis] for p in parts)
        arrays = [p.array for p in parts if p.array is not None]
        if len(arrays) == len(parts):
            return Ref(parts[0].dtype, tuple(shape), np.concatenate(arrays, axis))
        dtype, parts = parts[0].dtype, [p for p in parts if p.size]
        if not parts:
            return self.full(shape, 0, dtype)
        if len(parts) == 1:
            return parts[0]
        return self.node("concat", parts, parts[0].dtype, shape, {"axis": axis})

    # -- numbers ----------------------------------------------------------------------------

    def map(
        self, fn: str, operands: Sequence[Ref], dtype: str | None = None, x: float = 0, y: float = 0
    ) -> Ref:
        """A function of elements with broadcasting; the result's type is the last operand's."""
        dtype = dtype or operands[-1].dtype
        try:
            shape = np.broadcast_shapes(*(ref.shape for ref in operands))
        except ValueError as error:
            raise UnsupportedError(
                f"shapes {[ref.shape for ref in operands]} do not broadcast"
            ) from error
        arrays = [ref.array for ref in operands if ref.array is not None]
        if len(arrays) == len(operands) and fn in FOLDED and math.prod(shape) <= MAX_FOLDED:
            with np.errstate(all="ignore"):
                result = np.asarray(FOLDED[fn](*arrays))
            return Ref(dtype, shape, result.astype(numpy_dtype(dtype)).reshape(shape))
        attrs: dict[str, Attr] = {"fn": fn}
        if x or y:
            attrs.update(x=float(x), y=float(y))
        if all(ref.shape == shape for ref in operands) or math.prod(shape) == 0:
            return self.node("map", operands, dtype, shape, attrs)
        dims, steps = _merged(shape, [broadcast_strides(ref.shape, shape) for ref in operands])
        attrs["dims"] = dims
        attrs["strides"] = [s for own in steps for s in own]
        return self.node("map", operands, dtype, shape, attrs)

    def strided(self, fn: str, x: Ref, shape: Sequence[int], strides: Sequence[int]) -> Ref:
        """A function of one operand read through strides (diagonals)."""
        attrs: dict[str, Attr] = {"fn": fn, "dims": list(shape), "strides": list(strides)}
        return self.node("map", [x], x.dtype, shape, attrs)

    def cast(self, x: Ref, dtype: str) -> Ref:
        """Numbers in another type."""
        if dtype not in DTYPES:
            raise UnsupportedError(f"type {dtype} is not supported")
        if x.dtype == dtype:
            return x
        if x.array is not None:
            with np.errstate(all="ignore"):
                array = x.array.astype(numpy_dtype(dtype))
            return Ref(dtype, x.shape, round_bfloat16(array) if dtype == "bfloat16" else array)
        return self.map("cast", [x], dtype)

    def full(self, shape: Sequence[int], number: float | int, dtype: str) -> Ref:
        """A constant of equal numbers."""
        check_size(shape, MAX_CONSTANT)
        return known(np.full(tuple(shape), number, numpy_dtype(dtype)), dtype)

    def rows_last(self, x: Ref, axes: Sequence[int]) -> tuple[Ref, list[int], list[int]]:
        """`x` with `axes` moved to the end, and the kept axes."""
        kept = [a for a in range(x.rank) if a not in axes]
        return self.transpose(x, [*kept, *axes]), kept, list(axes)

    def reduce(
        self,
        fn: str,
        x: Ref,
        axes: Sequence[int],
        keep: bool,
        dtype: str | None = None,
        last: bool = False,
    ) -> Ref:
        """One number of all along `axes`."""
        axes = sorted({a % x.rank for a in axes}) if x.rank else []
        shape = [1 if a in axes else d for a, d in enumerate(x.shape)]
        out: list[int] = shape if keep else [d for a, d in enumerate(x.shape) if a not in axes]
        dtype = dtype or x.dtype
        if x.array is not None and fn in FOLDED_REDUCTIONS and x.size <= MAX_FOLDED and x.size:
            result = FOLDED_REDUCTIONS[fn](x.array, tuple(axes))
            return Ref(dtype, tuple(out), np.asarray(result, numpy_dtype(dtype)).reshape(out))
        width = math.prod(x.shape[a] for a in axes)
        if width == 0 and 0 not in out:
            return self.full(out, _empty(fn, dtype), dtype)
        moved, _, _ = self.rows_last(x, axes)
        attrs: dict[str, Attr] = {"fn": fn, "width": width}
        if last:
            attrs["last"] = 1
        return self.node("reduce", [moved], dtype, out, attrs)

    def rows(self, fn: str, x: Ref, axes: Sequence[int], epsilon: float = 0.0) -> Ref:
        """Lines along `axes` normalised."""
        axes = [a % x.rank for a in axes]
        moved, kept, _ = self.rows_last(x, axes)
        width = math.prod(x.shape[a] for a in axes)
        attrs: dict[str, Attr] = {"fn": fn, "width": width, "epsilon": float(epsilon)}
        made = self.node("rows", [moved], x.dtype, moved.shape, attrs)
        order = [*kept, *axes]
        return self.transpose(made, [order.index(a) for a in range(x.rank)])

    def matmul(
        self,
        a: Ref,
        b: Ref,
        *,
        flip_a: bool = False,
        flip_b: bool = False,
        alpha: float = 1.0,
        c: Ref | None = None,
        beta: float = 1.0,
    ) -> Ref:
        """`alpha * a @ b + beta * c` over broadcast batches; `flip` swaps the last two axes."""
        m, k = a.shape[-2:][:: -1 if flip_a else 1]
        k2, n = b.shape[-2:][:: -1 if flip_b else 1]
        if k != k2:
            raise UnsupportedError(f"shapes {a.shape} and {b.shape} can't be multiplied")
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        if k == 0:
            return self.full((*batch, m, n), 0, a.dtype)
        a_step = [1, m] if flip_a else [k, 1]
        b_step = [1, k] if flip_b else [n, 1]
        a_batch = [s * m * k for s in broadcast_strides(a.shape[:-2], batch)]
        b_batch = [s * k * n for s in broadcast_strides(b.shape[:-2], batch)]
        table = [v for entry in zip(batch, a_batch, b_batch, strict=True) for v in entry]
        rows = m
        if b.size == k * n and a.size == math.prod(batch) * m * k and not flip_a:
            m, table = m * math.prod(batch), []  # one matrix on the right: batches are more rows
        c_step = [0, 0] if c is None else broadcast_strides(c.shape, (m, n))
        attrs: dict[str, Attr] = {
            "sizes": [m, n, k],
            "strides": [*a_step, *b_step, *c_step],
            "batch": table,
            "alpha": float(alpha),
            "beta": float(beta),
        }
        operands = [a, b] if c is None else [a, b, c]
        return self.node("matmul", operands, a.dtype, (*batch, rows, n), attrs)


def _origins(refs: Iterable[Ref]) -> frozenset[str]:
    return frozenset().union(*(ref.origins for ref in refs))


def _empty(fn: str, dtype: str) -> float | int:
    """What a reduction of nothing gives."""
    if fn in ("max", "min"):
        if dtype in FLOATS:
            return -math.inf if fn == "max" else math.inf
        if dtype == "bool":
            return fn == "min"
        info = np.iinfo(dtype)
        return int(info.min if fn == "max" else info.max)
    return {"prod": 1, "log_sum": -math.inf, "log_sum_exp": -math.inf}.get(fn, 0)


def _merged(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """Fewer axes with the same walk: neighbours join where every operand steps through both."""
    dims: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis in range(len(shape)):
        if shape[axis] == 1:
            continue
        joins = bool(dims) and all(
            own[-1] == theirs[axis] * shape[axis]
            for own, theirs in zip(steps, strides, strict=True)
        )
        if joins:
            dims[-1] *= shape[axis]
        else:
            dims.append(shape[axis])
        for own, theirs in zip(steps, strides, strict=True):
            if joins:
                own[-1] = theirs[axis]
            else:
                own.append(theirs[axis])
    return dims or [1], [own or [0] for own in steps]


Handler = Callable[["Builder", Any, list[Ref | None]], list[Ref]]
