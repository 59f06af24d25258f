"""Which kernel runs a tensor op, with its tables and grid; every index is checked here.

The kernels lie in `kernels/tensor`, one a family, and share one push block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError
from hornito.ops.base import Dispatch, Operand, Push, ceil_div
from hornito.tensor.graph import (
    EXACT,
    MAX_RANK,
    TensorGraph,
    TensorNode,
    TensorValue,
    unrolled,
)
from hornito.tensor.stored import lower_linear, lower_lookup

if TYPE_CHECKING:
    from hornito.tensor.plan import GroupLimits

PUSH = Push(
    "a:u64 b:u64 c:u64 result:u64 table:u64 status:u64 "
    "count:u32 node:u32 p0:u32 p1:u32 p2:u32 p3:u32 x:f32 y:f32"
)
TABLES, STATUS = "tables", "status"
MISSING = 0xFFFFFFFF
THREADS = 64
TILES = (32, 64)

_UNARY = (
    "identity cast abs neg ceil floor round sqrt reciprocal exp log sin cos tan asin acos atan "
    "sinh cosh tanh asinh acosh atanh erf sigmoid softplus softsign relu elu selu celu leaky_relu "
    "thresholded_relu hard_sigmoid hard_swish gelu gelu_tanh mish swish shrink sign is_nan is_inf "
    "not bit_not"
)
_BINARY = (
    "add sub mul div pow max min mod fmod prelu equal less less_equal greater greater_equal and or "
    "xor shift_left shift_right"
)
FUNCTIONS = {
    **{name: i for i, name in enumerate(_UNARY.split())},
    **{name: 64 + i for i, name in enumerate(_BINARY.split())},
    "where": 128,
}
_TYPES = "float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
TYPES = tuple(_TYPES.split())
_REDUCTIONS = "sum mean max min prod l1 l2 sum_square log_sum log_sum_exp arg_max arg_min"
REDUCTIONS = tuple(_REDUCTIONS.split())
ROWS = ("softmax", "log_softmax", "hardmax", "layer_norm", "rms_norm")
GATHERS = ("gather", "elements", "tuples", "one_hot")
SCATTERS = ("none", "add", "mul", "max", "min")


def type_code(dtype: str) -> int:
    """The number by which kernels know an element type; float64 is computed as float32."""
    return 0 if dtype == "float64" else TYPES.index(dtype)


def strides_of(shape: Sequence[int]) -> list[int]:
    """Row-major strides in elements."""
    out = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        out[i] = out[i + 1] * shape[i + 1]
    return out


def broadcast_strides(shape: Sequence[int], result: Sequence[int]) -> list[int]:
    """Strides that read `shape` as if it were `result`; 0 along axes that it repeats."""
    lead = len(result) - len(shape)
    own = strides_of(shape)
    return [0] * lead + [0 if d == 1 else s for d, s in zip(shape, own, strict=True)]


@dataclass(slots=True)
class TensorLowering:
    """The dispatches of a graph, the tables they read and the values they use."""

    graph: TensorGraph
    caps: GroupLimits
    dispatches: list[Dispatch] = field(default_factory=list)
    tables: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    table_words: int = 0
    aliases: dict[str, str] = field(default_factory=dict)
    index: int = 0

    def run(self) -> TensorLowering:
        """Lower every node."""
        self.aliases = self.graph.aliases()
        for index, node in enumerate(self.graph.nodes):
            self.index = index
            if all(self.graph.values[name].size == 0 for name in node.outputs):
                continue
            if node.op != "alias":
                _LOWER[node.op](self, node)
        return self

    def value(self, name: str) -> TensorValue:
        """Type and shape of a value."""
        return self.graph.values[name]

    def operand(self, name: str) -> Operand:
        """The memory of a value."""
        size = max(4, self.value(name).size * 4)
        return Operand(self.graph.base(name, self.aliases), 0, size)

    def table(self, words: Sequence[int] | npt.NDArray[np.int64]) -> Operand:
        """Words that a kernel reads, as an operand."""
        array = np.asarray(words, np.int64)
        if array.size and (array.min() < 0 or array.max() > MISSING):
            raise FormatError("a kernel's table holds a number that 32 bits do not")
        start = self.table_words
        self.tables.append(array.astype(np.uint32))
        self.table_words += array.size
        return Operand(TABLES, start * 4, array.size * 4)

    def emit(
        self,
        node: TensorNode,
        kernel: str,
        inputs: Sequence[str],
        result: str,
        *,
        count: int,
        groups: tuple[int, int, int] | None = None,
        table: Operand | None = None,
        spec: Sequence[int] = (),
        p: Sequence[int] = (),
        x: float = 0.0,
        y: float = 0.0,
        second: str = "",
        variant: str = "default",
        constants: Mapping[int, int] | None = None,
    ) -> None:
        """Append a dispatch; `second` is another result, in the place of b. `constants` are
        specialisation constants by number, where `spec` does not count them from 0."""
        reads = [self.operand(name) for name in inputs]
        writes = [self.operand(result)] + ([self.operand(second)] if second else [])
        slots = [*reads, *([writes[1]] if second else [])]
        slots += [writes[0]] * (3 - len(slots))
        table = table or Operand(TABLES, 0, 4)
        status = Operand(STATUS, 0, 4)
        numbers = (*p, *[0] * (4 - len(p)))
        groups = groups or self.grid(node, ceil_div(count, THREADS))
        self.check_grid(node, groups)
        args: tuple[Operand | int | float, ...] = (
            *(*slots, writes[0], table, status),
            *(count, self.index, *numbers, x, y),
        )
        self.dispatches.append(
            Dispatch(
                f"tensor/{kernel}.{variant}",
                PUSH,
                args,
                groups,
                tuple(reads),
                tuple(writes),
                node.name,
                dict(enumerate(spec)) | dict(constants or {}),
            )
        )

    def check_grid(self, node: TensorNode, groups: tuple[int, int, int]) -> None:
        """Raise FormatError when the device has fewer workgroups."""
        limits = self.caps.max_workgroup_count
        if any(g > limit for g, limit in zip(groups, limits, strict=True)):
            raise FormatError(f"node {node.name}: {groups} workgroups; the device has {limits}")

    def grid(self, node: TensorNode, count: int) -> tuple[int, int, int]:
        """`count` workgroups over two dimensions."""
        width = min(count, self.caps.max_workgroup_count[0], 65535)
        return width, ceil_div(count, width), 1


def _fail(node: TensorNode, what: str) -> FormatError:
    return FormatError(f"node {node.name} ({node.op}): {what}")


def _need(node: TensorNode, fits: bool, what: str) -> None:
    if not fits:
        raise _fail(node, what)


def _padded(node: TensorNode, numbers: Sequence[int]) -> list[int]:
    _need(node, len(numbers) <= MAX_RANK, f"rank {len(numbers)}; at most {MAX_RANK}")
    return [*numbers, *[0] * (MAX_RANK - len(numbers))]


def _choice(node: TensorNode, names: Sequence[str]) -> int:
    name = node.text("fn")
    _need(node, name in names, f"no function {name!r}")
    return list(names).index(name)


def _map(low: TensorLowering, node: TensorNode) -> None:
    fn = node.text("fn")
    _need(node, fn in FUNCTIONS, f"no function {fn!r}")
    code = FUNCTIONS[fn]
    operands = 1 if code < 64 else 2 if code < 128 else 3
    _need(node, len(node.inputs) == operands, f"{fn} takes {operands} operands")
    result = low.value(node.outputs[0])
    shape = node.numbers("dims") if "dims" in node.attrs else list(result.shape)
    _need(node, math.prod(shape) == result.size, "dims of another size")
    given = node.numbers("strides")
    strides, plain = [], True
    for i, name in enumerate(node.inputs):
        value = low.value(name)
        rank = len(shape)
        if given:
            own = given[i * rank : (i + 1) * rank]
        elif value.shape == tuple(shape):
            own = strides_of(shape)
        else:
            own = broadcast_strides(value.shape, shape)
        plain = plain and not given and value.size == result.size
        _need(node, len(own) == rank and min(own, default=0) >= 0, "wrong strides")
        last = sum((d - 1) * s for d, s in zip(shape, own, strict=True))
        _need(node, last < value.size, f"{name} of shape {value.shape} does not fit {shape}")
        strides.append(own)
    table = None
    if not plain:
        words = [len(shape), *_padded(node, shape)]
        for own in strides:
            words += _padded(node, own)
        table = low.table(words)
    kind = low.value(node.inputs[1 if fn == "where" else 0]).kind
    spec = (code, kind, type_code(result.dtype), operands, int(plain))
    low.emit(
        node,
        "map",
        node.inputs,
        node.outputs[0],
        count=result.size,
        table=table,
        spec=spec,
        x=node.real("x", 0.0),
        y=node.real("y", 0.0),
    )


def _view(low: TensorLowering, node: TensorNode) -> None:
    source, result = low.value(node.inputs[0]), low.value(node.outputs[0])
    dims = node.numbers("dims")
    maps = [unrolled(node.numbers(f"map{i}")) for i in range(len(dims))]
    _need(node, math.prod(dims) == result.size, "dims of another size")
    _need(node, [len(m) for m in maps] == dims, "a map of another length than its axis")
    reach = 0
    for entries in maps:
        _need(node, int(entries.min(initial=0)) >= -1, "a map below its source")
        reach += max(0, int(entries.max(initial=0)))
    _need(node, reach < max(1, source.size), "a map beyond its source")
    if source.size == 0:
        _need(node, any(bool((m == -1).all()) for m in maps), "reads an empty value")
    starts, at = [], 1 + 2 * MAX_RANK
    for entries in maps:
        starts.append(at)
        at += len(entries)
    words = [len(dims), *_padded(node, dims), *_padded(node, starts)]
    table = low.table(np.concatenate([words, *[np.where(m < 0, MISSING, m) for m in maps]]))
    p = (node.number("fill", 0) & MISSING, result.size, 0, 0)
    low.emit(node, "view", node.inputs, node.outputs[0], count=result.size, table=table, p=p)


def _concat(low: TensorLowering, node: TensorNode) -> None:
    result = low.value(node.outputs[0])
    axis = node.number("axis")
    _need(node, 0 <= axis < len(result.shape), "no such axis")
    behind = math.prod(result.shape[axis + 1 :])
    start = 0
    for name in node.inputs:
        part = low.value(name)
        same = part.shape[:axis] == result.shape[:axis]
        same = same and part.shape[axis + 1 :] == result.shape[axis + 1 :]
        _need(node, same, f"{name} of shape {part.shape} does not fit {result.shape}")
        if part.size:
            _part(low, node, name, start * behind, result.shape[axis] * behind, axis)
        start += part.shape[axis]
    _need(node, start == result.shape[axis], "parts do not add up")


def _part(
    low: TensorLowering, node: TensorNode, name: str, offset: int, pitch: int, axis: int
) -> None:
    """One part of a concatenation: a copy with a pitch."""
    part = low.value(name)
    inner = math.prod(part.shape[axis:])
    outer = part.size // inner
    base = 1 + 2 * MAX_RANK
    words = [2, outer, inner, *[0] * 6, base, base + outer, *[0] * 6]
    rows = np.arange(outer, dtype=np.int64) * inner
    table = low.table(np.concatenate([words, rows, np.arange(inner, dtype=np.int64)]))
    p = (0, inner, pitch, offset)
    low.emit(node, "view", [name], node.outputs[0], count=part.size, table=table, p=p)


def _line(low: TensorLowering, node: TensorNode) -> tuple[TensorValue, TensorValue, int, int]:
    """Source and result of an op over rows, the rows and their width."""
    source, result = low.value(node.inputs[0]), low.value(node.outputs[0])
    width = node.number("width")
    _need(node, width > 0 and source.size % width == 0, f"rows of {width}")
    return source, result, source.size // width, width


def _reduce(low: TensorLowering, node: TensorNode) -> None:
    source, result, rows, width = _line(low, node)
    _need(node, result.size == rows, "one number a row")
    code = _choice(node, REDUCTIONS)
    exact = int(source.dtype in EXACT)
    spec = (code, source.kind, exact, type_code(result.dtype))
    p = (width, node.number("last", 0))
    groups = low.grid(node, rows)
    low.emit(
        node, "reduce", node.inputs, node.outputs[0], count=rows, groups=groups, spec=spec, p=p
    )


def _rows(low: TensorLowering, node: TensorNode) -> None:
    source, result, rows, width = _line(low, node)
    _need(node, result.size == source.size and source.kind == 0, "floats of one shape")
    spec = (_choice(node, ROWS),)
    low.emit(
        node,
        "rows",
        node.inputs,
        node.outputs[0],
        count=rows,
        groups=low.grid(node, rows),
        spec=spec,
        p=(width,),
        x=node.real("epsilon", 0.0),
    )


def _matmul(low: TensorLowering, node: TensorNode) -> None:
    m, n, k = sizes = node.numbers("sizes")
    strides = node.numbers("strides")
    batch = node.numbers("batch")
    result = low.value(node.outputs[0])
    a_starts = b_starts = np.zeros(1, np.int64)
    for i in range(0, len(batch), 3):
        dim, a_stride, b_stride = batch[i : i + 3]
        steps = np.arange(dim, dtype=np.int64)
        a_starts = (a_starts[:, None] + steps * a_stride).reshape(-1)
        b_starts = (b_starts[:, None] + steps * b_stride).reshape(-1)
    _need(node, len(strides) == 6 and min(*strides, *batch, *sizes, 0) >= 0, "wrong strides")
    _need(node, len(a_starts) * m * n == result.size, "result of another size")
    ends = [
        int(a_starts.max()) + (m - 1) * strides[0] + (k - 1) * strides[1],
        int(b_starts.max()) + (k - 1) * strides[2] + (n - 1) * strides[3],
        (m - 1) * strides[4] + (n - 1) * strides[5],
    ]
    for name, end in zip(node.inputs, ends, strict=False):
        _need(node, end < low.value(name).size, f"{name} is too small")
    starts = np.stack([a_starts, b_starts], axis=1).reshape(-1)
    table = low.table(np.concatenate([[*sizes, *strides], starts]))
    tile = max(TILES) if min(m, n) >= max(TILES) else min(TILES)
    spec = (
        low.value(node.inputs[0]).kind,
        int(len(node.inputs) > 2),
        int(result.dtype in EXACT),
    )
    low.emit(
        node,
        "matmul",
        node.inputs,
        node.outputs[0],
        count=result.size,
        groups=(ceil_div(n, tile), ceil_div(m, tile), len(a_starts)),
        table=table,
        spec=spec,
        x=node.real("alpha", 1.0),
        y=node.real("beta", 1.0),
        variant=f"t{tile}",
    )


def _gather(low: TensorLowering, node: TensorNode) -> None:
    mode = node.text("fn")
    code = _choice(node, GATHERS)
    data, indices = (low.value(name) for name in node.inputs)
    result = low.value(node.outputs[0])
    p = node.numbers("p")
    _need(node, len(p) == 4 and min(p) >= 0 and indices.kind == 1, "wrong attributes")
    table = None
    if mode == "gather":
        axis, inner, count, _ = p
        outer = data.size // (axis * inner)
        fits = outer * axis * inner == data.size and indices.size == count
        _need(node, fits and result.size == outer * count * inner, "wrong sizes")
    elif mode == "elements":
        dims, strides = node.numbers("dims"), node.numbers("strides")
        at = p[2]
        _need(node, len(dims) == len(strides) and at < len(dims), "wrong axis")
        reach = [(p[0] if i == at else d) - 1 for i, d in enumerate(dims)]
        last = sum(r * s for r, s in zip(reach, strides, strict=True))
        fits = last < data.size and min(strides) >= 0
        _need(node, fits and indices.size == result.size == math.prod(dims), "wrong sizes")
        table = low.table([len(dims), *_padded(node, dims), *_padded(node, strides)])
    elif mode == "tuples":
        dims, strides = node.numbers("dims"), node.numbers("strides")
        batch, inner, depth, tuples = p
        _need(node, len(dims) == len(strides) == depth and min(*p, *strides) >= 0, "wrong table")
        end = sum((d - 1) * s for d, s in zip(dims, strides, strict=True)) + inner
        batches = result.size // (inner * tuples)
        _need(node, (batches - 1) * batch + end <= data.size, "wrong sizes")
        _need(node, result.size // inner * depth == indices.size, "wrong indices")
        table = low.table([*_padded(node, dims), *_padded(node, strides)])
    else:
        _need(node, data.size == 2 and indices.size * p[0] == result.size, "wrong sizes")
    low.emit(
        node,
        "gather",
        node.inputs,
        node.outputs[0],
        count=result.size,
        table=table,
        spec=(code,),
        p=p,
    )


def _scatter(low: TensorLowering, node: TensorNode) -> None:
    tuples = node.number("tuples")
    data, indices, updates = (low.value(name) for name in node.inputs)
    result = low.value(node.outputs[0])
    _need(node, data.size == result.size and indices.kind == 1, "wrong operands")
    dims, strides = node.numbers("dims"), node.numbers("strides")
    p = node.numbers("p")
    if tuples:
        count, inner, depth, _ = p
        fits = len(dims) == len(strides) == depth and min(*strides, *p) >= 0
        _need(node, fits and indices.size == count * depth, "wrong indices")
        _need(node, updates.size == count * inner, "wrong updates")
        table = low.table([*_padded(node, dims), *_padded(node, strides)])
    else:
        own = list(indices.shape)
        fits = len(own) == len(dims) and tuple(dims) == data.shape and p[0] < len(dims)
        _need(node, fits and updates.shape == indices.shape, "wrong shapes")
        words = [len(dims), *_padded(node, dims), *_padded(node, own)]
        table = low.table([*words, *_padded(node, strides_of(own))])
    spec = (
        tuples,
        _choice(node, SCATTERS),
        data.kind,
        int(data.dtype in EXACT),
        type_code(data.dtype),
    )
    low.emit(
        node,
        "scatter",
        node.inputs,
        node.outputs[0],
        count=result.size,
        table=table,
        spec=spec,
        p=p,
    )


def _scan(low: TensorLowering, node: TensorNode) -> None:
    source, result = low.value(node.inputs[0]), low.value(node.outputs[0])
    length, inner = node.number("length"), node.number("inner")
    lines = source.size // length
    fits = result.size == source.size == lines * length and lines % inner == 0
    _need(node, fits, "wrong sizes")
    product = node.text("fn") == "prod"
    spec = (int(product), source.kind, int(source.dtype in EXACT), type_code(result.dtype))
    flags = node.number("exclusive", 0) | 2 * node.number("reverse", 0)
    p = (length, inner, flags)
    low.emit(node, "scan", node.inputs, node.outputs[0], count=lines, spec=spec, p=p)


def _topk(low: TensorLowering, node: TensorNode) -> None:
    source, values, rows, width = _line(low, node)
    k = node.number("k")
    indices = low.value(node.outputs[1])
    _need(node, 0 < k <= width and values.size == indices.size == rows * k, "wrong sizes")
    low.emit(
        node,
        "topk",
        node.inputs,
        node.outputs[0],
        count=source.size,
        spec=(source.kind,),
        p=(width, k, node.number("largest", 1)),
        second=node.outputs[1],
    )


_LOWER = {
    "map": _map,
    "view": _view,
    "concat": _concat,
    "reduce": _reduce,
    "rows": _rows,
    "matmul": _matmul,
    "linear": lower_linear,
    "lookup": lower_lookup,
    "gather": _gather,
    "scatter": _scatter,
    "scan": _scan,
    "topk": _topk,
}
