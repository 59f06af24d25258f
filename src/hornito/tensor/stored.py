"""Matrices of tensor graphs in fewer bits: `linear`, a product with a stored constant.

`linear`: `x [rows, k], weight, bias [n]? -> x @ weight.T + bias`. The weight is a constant of words
that hold a matrix `[n, k]` in a storage type (docs/format.md); it runs on a kernel that text models
use. Products of fp32 numbers and a constant matrix become it when the model is compiled so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hornito.errors import FormatError, UsageError
from hornito.graph.weights import ArrayData
from hornito.ops.base import Dispatch, ceil_div
from hornito.ops.linear import NO_ACTIVATION, PUSH, float_bits, format_constants
from hornito.quant.formats import Floats, WeightFormat, weight_format
from hornito.quant.storage import pack, unpack
from hornito.tensor.graph import Array, Attr, TensorGraph, TensorNode, TensorValue

if TYPE_CHECKING:
    from hornito.tensor.kernels import TensorLowering

CHOICES = ("fp32", "fp16", "bf16", "int8", "int4")
TILE_ROWS, TILE_OUTPUTS = 16, 64


@dataclass(frozen=True, slots=True)
class Linear:
    """A checked `linear` node."""

    rows: int
    n: int
    k: int
    fmt: WeightFormat

    @classmethod
    def of(cls, graph: TensorGraph, node: TensorNode) -> Linear:
        """What a node says, which must fit its values.

        Raises:
            FormatError: it does not.
            UnsupportedError: the storage type is unknown.
        """
        fmt = weight_format(node.text("format"))
        rows, n, k = (node.number(name) for name in ("rows", "n", "k"))
        sizes = [graph.values[name].size for name in (*node.inputs, *node.outputs)]
        kinds = [graph.values[name].kind for name in (*node.inputs, *node.outputs)]
        bias = len(node.inputs) == 3
        fits = (
            min(rows, n, k) > 0
            and len(node.inputs) in (2, 3)
            and len(node.outputs) == 1
            and fmt.fits((n, k))
            and sizes[:2] == [rows * k, fmt.nbytes((n, k)) // 4]
            and fmt.nbytes((n, k)) % 4 == 0
            and (not bias or sizes[2] == n)
            and sizes[-1] == rows * n
            and kinds == [0, 2, *([0] if bias else []), 0]
        )
        if not fits:
            raise FormatError(f"node {node.name} (linear): its values do not fit its attributes")
        return cls(rows, n, k, fmt)


def lower_linear(low: TensorLowering, node: TensorNode) -> None:
    """One launch of the tiled kernel, which asks nothing of a device."""
    made = Linear.of(low.graph, node)
    x, weight, *rest = (low.operand(name) for name in node.inputs)
    result = low.operand(node.outputs[0])
    call = low.table([made.rows])  # the kernel reads the live rows from memory
    groups = (ceil_div(made.n, TILE_OUTPUTS), ceil_div(made.rows, TILE_ROWS), 1)
    low.check_grid(node, groups)
    bias = rest[0] if rest else x
    low.dispatches.append(
        Dispatch(
            f"linear/gemm.m{TILE_ROWS}_{made.fmt.variant}",
            PUSH,
            (x, weight, bias, x, result, call, 0, made.n, made.k, 0, made.n),
            groups,
            (x, weight, *rest),
            (result,),
            node.name,
            {
                0: int(bool(rest)),
                1: 0,
                2: NO_ACTIVATION,
                3: int(made.k % 8 == 0),
                6: float_bits(0.0),
                **format_constants(made.fmt),
            },
        )
    )


def evaluate_linear(graph: TensorGraph, node: TensorNode, inputs: list[Array]) -> Array:
    """The meaning, in the inputs' own precision."""
    made = Linear.of(graph, node)
    x, words, *rest = inputs
    data = words.astype(np.uint32).view(np.uint8)
    weight = unpack(made.fmt, data, (made.n, made.k)).astype(x.dtype)
    out: Array = x.reshape(made.rows, made.k) @ weight.T
    return out + rest[0] if rest else out


def store_matrices(graph: TensorGraph, weights: str) -> tuple[dict[str, dict[str, float]], str]:
    """Turn products with constant matrices into `linear`; other constants stay fp32.

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
    fmt = weight_format(weights)
    aliases = graph.aliases()
    stored: dict[tuple[str, bool], str] = {}
    counts: Counter[str] = Counter()
    odd: list[str] = []
    for at, node in enumerate(graph.nodes):
        if node.op != "matmul":
            continue
        found = _constant_product(graph, node, aliases)
        if found is None:
            continue
        rows, n, k, base, flipped = found
        if not fmt.fits((n, k)) or fmt.nbytes((n, k)) % 4:
            odd.append(node.name)
            continue
        if (base, flipped) not in stored:
            matrix = graph.constants[base].view(np.float32)
            matrix = matrix.reshape((n, k) if flipped else (k, n))
            name = f"{base}.{weights}" + ("" if flipped else ".t")
            _add_matrix(graph, name, fmt, matrix if flipped else matrix.T)
            stored[base, flipped] = name
            counts["matrices"] += 1
            counts["bytes"] += fmt.nbytes((n, k))
        names = (node.inputs[0], stored[base, flipped], *node.inputs[2:])
        attrs: dict[str, Attr] = {"rows": rows, "n": n, "k": k, "format": weights}
        graph.nodes[at] = TensorNode("linear", node.name, names, node.outputs, attrs, node.source)
    graph.drop_unused()
    note = ""
    if odd:
        note = f"{len(odd)} matrices whose rows are no multiple of {fmt.block} long stay fp32"
    made: dict[str, float] = {**counts, "bits": round(fmt.bits, 4)}
    return ({weights: made} if counts else {}), note


def _add_matrix(graph: TensorGraph, name: str, fmt: WeightFormat, matrix: Floats) -> None:
    pieces = pack(fmt, ArrayData(np.ascontiguousarray(matrix, np.float32)))
    data = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
    words = data.view(np.uint32)
    graph.add_value(name, TensorValue("uint32", words.shape))
    graph.constants[name] = words


def _constant_product(
    graph: TensorGraph, node: TensorNode, aliases: dict[str, str]
) -> tuple[int, int, int, str, bool] | None:
    """(rows, n, k, the constant, whether it is `[n, k]`) of a product that `linear` computes."""
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
    return None if graph.values[node.inputs[0]].size != rows * k else (rows, n, k, base, flipped)
