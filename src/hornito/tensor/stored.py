"""Matrices of tensor graphs in fewer bits, and the two ops that read them.

* `linear`: `x [rows, k], weight, bias [n]? -> x @ weight.T + bias`, on a kernel of text models.
* `lookup`: `table, ids [count] -> table[ids]`, rows of `k` numbers.

Weight and table are constants of words that hold a matrix `[n, k]` in a storage type
(docs/format.md). Products of fp32 numbers and a constant matrix become `linear`, and gathers from
the first axis of a large constant table `lookup`, when the model is compiled so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hornito.errors import FormatError, HornitoError, UsageError
from hornito.graph.weights import ArrayData
from hornito.ops.base import HALF_INPUTS, HALF_RESULTS, Dispatch, ceil_div
from hornito.ops.linear import PUSH, LinearArgs, common_constants, format_constants, push_values
from hornito.quant.formats import Floats, WeightFormat, weight_format
from hornito.quant.storage import pack, unpack
from hornito.tensor.graph import Array, Attr, TensorGraph, TensorNode, TensorValue

if TYPE_CHECKING:
    from hornito.tensor.kernels import TensorLowering

CHOICES = ("fp32", "fp16", "bf16", "int8", "int4", "int4m")
TILE_ROWS, TILE_OUTPUTS = 16, 64

TABLE_FORMAT = "int8g64"
FOUR_BITS = ("int4", "int4m")
TABLE_ROWS = 1024
"""Tables with fewer rows, such as those of positions, stay fp32."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A checked node: `rows` products or ids, and the matrix `[n, k]` in its storage type."""

    rows: int
    n: int
    k: int
    fmt: WeightFormat

    @classmethod
    def of(cls, graph: TensorGraph, node: TensorNode) -> Stored:
        """What a node says, which must fit its values.

        Raises:
            FormatError: it does not.
            UnsupportedError: the storage type is unknown.
        """
        fmt = weight_format(node.text("format"))
        rows, n, k = (node.number(name) for name in ("rows", "n", "k"))
        sizes = [graph.values[name].size for name in (*node.inputs, *node.outputs)]
        kinds = [graph.values[name].kind for name in (*node.inputs, *node.outputs)]
        words = fmt.nbytes((n, k)) / 4 if min(rows, n, k) > 0 and fmt.fits((n, k)) else -1
        if node.op == "lookup":
            wanted = [(words, 2), (rows, 1), (rows * k, 0)]
            fits = k % 8 == 0
        else:
            bias = [(n, 0)] * (len(node.inputs) - 2)
            wanted = [(rows * k, 0), (words, 2), *bias, (rows * n, 0)]
            fits = len(bias) < 2
        if not fits or list(zip(sizes, kinds, strict=True)) != wanted:
            raise FormatError(f"node {node.name} ({node.op}): its values do not fit its attributes")
        return cls(rows, n, k, fmt)


def lower_linear(low: TensorLowering, node: TensorNode) -> None:
    """One launch of the tiled kernel, which asks nothing of a device."""
    made = Stored.of(low.graph, node)
    x, weight, *rest = (low.operand(name) for name in node.inputs)
    result = low.operand(node.outputs[0])
    call = low.table([made.rows])  # the kernel reads the live rows from memory
    groups = (ceil_div(made.n, TILE_OUTPUTS), ceil_div(made.rows, TILE_ROWS), 1)
    low.check_grid(node, groups)
    args = LinearArgs(
        x=x,
        weight=weight,
        result=result,
        rows=made.rows,
        n=made.n,
        k=made.k,
        dtype=made.fmt.name,
        weight_rows=made.n,
        bias=rest[0] if rest else None,
    )
    low.dispatches.append(
        Dispatch(
            f"linear/gemm.m{TILE_ROWS}_{made.fmt.variant}",
            PUSH,
            push_values(args, call),
            groups,
            (x, weight, *rest),
            (result,),
            node.name,
            {
                **common_constants(args),
                3: int(made.k % 8 == 0),
                **format_constants(made.fmt),
                HALF_INPUTS: 0,
                HALF_RESULTS: 0,
            },
        )
    )


def lower_lookup(low: TensorLowering, node: TensorNode) -> None:
    """Eight numbers a thread."""
    made = Stored.of(low.graph, node)
    low.emit(
        node,
        "lookup",
        node.inputs,
        node.outputs[0],
        count=made.rows * made.k // 8,
        constants=format_constants(made.fmt),
        p=(made.n, made.k),
        variant=made.fmt.variant,
    )


def evaluate_lookup(graph: TensorGraph, node: TensorNode, inputs: list[Array]) -> Array:
    """The meaning: the stored rows.

    Raises:
        HornitoError: an id lies outside the table.
    """
    made = Stored.of(graph, node)
    words, ids = inputs
    if ids.size and not -made.n <= int(ids.min()) <= int(ids.max()) < made.n:
        raise HornitoError(f"node {node.source or node.name}: an index lies outside its axis")
    data = words.astype(np.uint32).view(np.uint8)
    return unpack(made.fmt, data, (made.n, made.k)).astype(np.float64)[ids]


def evaluate_linear(graph: TensorGraph, node: TensorNode, inputs: list[Array]) -> Array:
    """The meaning, in the inputs' own precision."""
    made = Stored.of(graph, node)
    x, words, *rest = inputs
    data = words.astype(np.uint32).view(np.uint8)
    weight = unpack(made.fmt, data, (made.n, made.k)).astype(x.dtype)
    out: Array = x.reshape(made.rows, made.k) @ weight.T
    return out + rest[0] if rest else out


def store_matrices(graph: TensorGraph, weights: str) -> tuple[dict[str, dict[str, float]], str]:
    """Turn products with constant matrices into `linear`, and gathers from large tables into
    `lookup`; other constants stay fp32.

    Beside 4 bits, tables are stored as int8 in groups of 64, as those of text models are.

    Returns:
        of each storage type how many matrices, their bytes and bits a weight; and what the user
        should know of those that stay fp32, or ''.

    Raises:
        UsageError: an unknown choice.
    """
    if weights not in CHOICES:
        raise UsageError(f"weights must be one of {', '.join(CHOICES)}, not {weights!r}")
    if weights == "fp32":
        return {}, ""
    aliases = graph.aliases()
    counts: dict[str, dict[str, float]] = {}
    odd = 0
    for at, node in enumerate(graph.nodes):
        found = _found(graph, node, aliases)
        if found is None:
            continue
        table = node.op == "gather"
        fmt = weight_format(TABLE_FORMAT if table and weights in FOUR_BITS else weights)
        shape = (found.n, found.k)
        if not fmt.fits(shape) or fmt.nbytes(shape) % 4:
            odd += 1
            continue
        stored = _store(graph, found, fmt, counts)
        if table:
            op, names = "lookup", [stored, node.inputs[1]]
        else:
            op, names = "linear", [node.inputs[0], stored, *node.inputs[2:]]
        attrs: dict[str, Attr] = {
            "rows": found.rows,
            "n": found.n,
            "k": found.k,
            "format": fmt.name,
        }
        graph.nodes[at] = TensorNode(op, node.name, tuple(names), node.outputs, attrs, node.source)
    graph.drop_unused()
    return counts, f"{odd} matrices stay fp32: their rows do not fit {weights}" if odd else ""


@dataclass(frozen=True, slots=True)
class _Found:
    """A constant that a node may read in fewer bits; `turned` says that it is `[k, n]`."""

    rows: int
    n: int
    k: int
    base: str
    turned: bool


def _found(graph: TensorGraph, node: TensorNode, aliases: dict[str, str]) -> _Found | None:
    if node.op == "matmul":
        return _constant_product(graph, node, aliases)
    if node.op == "gather" and node.text("fn") == "gather":
        return _constant_table(graph, node, aliases)
    return None


def _store(
    graph: TensorGraph, found: _Found, fmt: WeightFormat, counts: dict[str, dict[str, float]]
) -> str:
    """The name of the stored matrix, made when first asked for."""
    name = f"{found.base}.{fmt.name}" + (".t" if found.turned else "")
    if name not in graph.constants:
        matrix = graph.constants[found.base].view(np.float32)
        matrix = matrix.reshape((found.k, found.n) if found.turned else (found.n, found.k))
        _add_matrix(graph, name, fmt, matrix.T if found.turned else matrix)
        entry = counts.setdefault(fmt.name, {"matrices": 0, "bytes": 0, "bits": round(fmt.bits, 4)})
        entry["matrices"] += 1
        entry["bytes"] += fmt.nbytes((found.n, found.k))
    return name


def _add_matrix(graph: TensorGraph, name: str, fmt: WeightFormat, matrix: Floats) -> None:
    source = ArrayData(np.ascontiguousarray(matrix, np.float32), (name,))
    pieces = pack(fmt, source)
    data = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
    words = data.view(np.uint32)
    graph.add_value(name, TensorValue("uint32", words.shape))
    graph.constants[name] = words


def _constant_product(
    graph: TensorGraph, node: TensorNode, aliases: dict[str, str]
) -> _Found | None:
    """The matrix of a product that `linear` computes."""
    base = graph.base(node.inputs[1], aliases)
    m, n, k = node.numbers("sizes")
    a_m, a_k, b_k, b_n, c_m, c_n = node.numbers("strides")
    floats = all(graph.values[name].dtype == "float32" for name in (*node.inputs, *node.outputs))
    if base not in graph.constants or graph.values[base].size != n * k or not floats:
        return None
    if min(m, n, k) < 1 or node.real("alpha", 1.0) != 1.0:
        return None
    if len(node.inputs) > 2:
        bias = graph.values[node.inputs[2]].size == n and (c_m, c_n) == (0, 1)
        if not bias or node.real("beta", 1.0) != 1.0:
            return None
    if (m > 1 and a_m != k) or (k > 1 and a_k != 1):
        return None
    flipped = (b_k, b_n) == (1, k)
    if not flipped and (b_k, b_n) != (n, 1):
        return None
    rows = m
    batch = node.numbers("batch")
    for i in range(len(batch) - 3, -1, -3):  # from the innermost on
        dim, a_stride, b_stride = batch[i : i + 3]
        if dim > 1 and (a_stride != rows * k or b_stride):
            return None
        rows *= dim
    if graph.values[node.inputs[0]].size != rows * k:
        return None
    return _Found(rows, n, k, base, not flipped)


def _constant_table(graph: TensorGraph, node: TensorNode, aliases: dict[str, str]) -> _Found | None:
    """The table of a gather of whole rows."""
    base = graph.base(node.inputs[0], aliases)
    n, k, count, _ = node.numbers("p")
    value = graph.values[base]
    if base not in graph.constants or value.dtype != "float32" or value.size != n * k:
        return None
    return _Found(count, n, k, base, False) if n >= TABLE_ROWS and k % 8 == 0 else None
