"""Linear: `x [R, K], weight [N, K], bias [N]?, residual [R, N]?, norm [K]?`
`-> activation(x @ weight.T + bias) + residual`.

R is T or S. With a norm, x is first replaced by `rms_norm(x, norm)`. The same kernels serve
`gated_linear`, `qkv_append` and the tiles of `head`, through `emit_linear`.
Attributes: `activation` (optional, none), `eps` (with a norm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hornito.errors import FormatError
from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.graph.shapes import Dim
from hornito.ops.base import Array, Lowering, Operand, Push, ceil_div, present
from hornito.ops.digits import takes_digits
from hornito.ops.gated_activation import activate, activation_number
from hornito.ops.gemv import (
    GEMV_ROWS,
    NORM,
    batch_variant,
    gemv_variants,
    is_gemv,
    norm_apart,
    power_of_two,
)
from hornito.ops.matrices import SPLITS, X_HALF, matrix_variants, tile_of
from hornito.ops.rms_norm import emit_norm, norm
from hornito.ops.variants import Variant
from hornito.quant.formats import WeightFormat, weight_format

FIELDS = (
    "x:u64 w:u64 bias:u64 residual:u64 result:u64 call:u64 norm:u64 live_word:u32 n:u32 "
    "k:u32 first:u32 rows:u32 eps:f32"
)
PUSH, DIGITS_PUSH = Push(FIELDS), Push(f"sums:u64 counters:u64 {FIELDS}")
"""Of all linear kernels, and of those that join parts of K by themselves."""

NO_ACTIVATION = 15
"""The kernels' number for a plain sum (kernels/include/linear.glsl)."""

BATCH_ROWS = 16
"""Up to this many rows that kernel, once per `GEMV_ROWS` of them, may win against a GEMM."""

FEW_GROUPS = 512
"""Fewer workgroups than this leave a discrete GPU waiting for each step of a GEMM's K."""

LARGE_TILE_GROUPS = 2048
"""From this many workgroups on, GEMM takes tiles of 64 rows instead of 16."""

JOIN_WIDTH = 256
"""Weight rows of one workgroup of kernels/linear/join.comp."""

SOFTWARE_GROUPS = 16
"""A software device gets at least this many workgroups of few outputs before it gets long ones."""


@dataclass(frozen=True, slots=True)
class LinearArgs:
    """One launch of a linear kernel over the `n` outputs that row `first` of `weight` begins.

    `weight_rows` counts all rows of the weight; with `gated` an output has two. `softcap` bounds
    what is stored to `softcap * tanh(v / softcap)`; 0 leaves it alone. `norm` and `eps` are of an
    RMS norm of x that comes first.
    """

    x: Operand
    weight: Operand
    result: Operand
    rows: int
    n: int
    k: int
    dtype: str
    weight_rows: int
    first: int = 0
    live_word: int = 0
    bias: Operand | None = None
    residual: Operand | None = None
    gated: bool = False
    activation: int = NO_ACTIVATION
    softcap: float = 0.0
    norm: Operand | None = None
    eps: float = 0.0

    @property
    def products(self) -> int:
        """Weight rows that are multiplied with x."""
        return self.n * (2 if self.gated else 1)

    @property
    def key(self) -> str:
        """What the choice of a kernel depends on."""
        marks = (" gated" if self.gated else "") + (" normed" if self.norm else "")
        return f"linear {self.rows}x{self.n}x{self.k} {self.dtype}{marks}"


def infer(graph: Graph, node: Node) -> list[Value]:
    x, weight, bias, residual = node.inputs[:4]
    rows, width = graph.shape(x)
    n, _ = check_matrix(graph, node, weight, width)
    check_norm(graph, node, node.optional(4), width)
    if "activation" in node.attrs:
        activation_number(node)
    if bias and graph.shape(bias) != (n,):
        raise FormatError(f"node {node.name}: bias has shape {graph.shape(bias)}, not ({n},)")
    if residual and graph.shape(residual) != (rows, n):
        raise FormatError(
            f"node {node.name}: residual has shape {graph.shape(residual)}, not ({rows}, {n})"
        )
    return [Value(FLOAT, (rows, n))]


def check_norm(graph: Graph, node: Node, norm: str, width: Dim) -> None:
    """A norm's weight, where there is one, must fit the width of x; it comes with `eps`.

    Raises:
        FormatError: it does not.
    """
    if not norm:
        return
    if graph.shape(norm) != (width,):
        raise FormatError(
            f"node {node.name}: norm {graph.shape(norm)} does not fit x [.., {width}]"
        )
    node.attr("eps")


def check_matrix(graph: Graph, node: Node, weight: str, width: Dim) -> tuple[int, int]:
    """The weight's (N, K), which must fit the width of x.

    Raises:
        FormatError: it does not.
    """
    shape = graph.weights[weight].shape if weight in graph.weights else ()
    if len(shape) != 2 or shape[1] != width:
        raise FormatError(f"node {node.name}: weight {weight} {shape} does not fit x [.., {width}]")
    return shape[0], shape[1]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    x, weight = present(inputs, 2)
    bias, residual, scale = (*inputs[2:], None)[:3]
    if scale is not None:
        x = norm(x, scale, node.attr("eps"))
    out = x @ weight.T
    if bias is not None:
        out = out + bias
    if "activation" in node.attrs:
        out = activate(node.attr("activation"), out)
    return [out if residual is None else out + residual]


def lower(node: Node, low: Lowering) -> None:
    x, weight, bias, residual = node.inputs[:4]
    rows, n = low.shape(node.outputs[0])
    first = node.optional(4)
    emit_linear(
        node,
        low,
        LinearArgs(
            x=low.operand(x),
            weight=low.operand(weight),
            result=low.operand(node.outputs[0]),
            rows=rows,
            n=n,
            k=low.shape(x)[1],
            dtype=low.weight_dtype(weight),
            weight_rows=n,
            live_word=low.live_word(node.outputs[0]),
            bias=low.operand(bias) if bias else None,
            residual=low.operand(residual) if residual else None,
            activation=activation_number(node) if "activation" in node.attrs else NO_ACTIVATION,
            norm=low.operand(first) if first else None,
            eps=node.attr("eps") if first else 0.0,
        ),
    )


def emit_linear(node: Node, low: Lowering, args: LinearArgs) -> None:
    """Choose a kernel for the device and the row count, and launch it."""
    chosen = low.choose(node, args.key, linear_variants(low, args))
    spec = {**chosen.spec, **format_constants(weight_format(args.dtype))}
    matrices = chosen.kernel.startswith("linear/coopmat.")
    apart = args.norm is not None and not _takes_norm(args, chosen)
    if apart:
        args = norm_first(node, low, args, half=matrices)
    if matrices:
        spec[X_HALF] = int(apart or low.half_values)
    splits = chosen.groups[2]
    if splits == 1 or takes_digits(chosen):
        _emit(node, low, args, chosen, spec)
        return
    padded = chosen.groups[1] * tile_of(chosen.kernel).rows
    sums = _sums(node, low, splits * padded * args.products)
    parts = replace(args, result=sums, bias=None, residual=None)
    _emit(node, low, parts, chosen, spec)
    emit_join(node, low, replace(args, x=sums), splits, padded)


def emit_join(node: Node, low: Lowering, args: LinearArgs, splits: int, padded: int) -> None:
    """End a product whose x holds the raw sums of parts of K, `[splits, padded rows, products]`."""
    join = Variant(
        "linear/join." + ("gated" if args.gated else "default"),
        {SPLITS: splits},
        (ceil_div(args.products, JOIN_WIDTH), args.rows, 1),
    )
    _emit(node, low, replace(args, k=padded, weight=args.x), join, join.spec)


def _sums(node: Node, low: Lowering, count: int) -> Operand:
    """Room for so many raw sums of parts of K; a head's last tile may have fewer than others."""
    return low.scratch(node, f"{count} sums", count * 4)


def _takes_norm(args: LinearArgs, chosen: Variant) -> bool:
    """Whether the norm goes into the kernel."""
    return takes_digits(chosen) or (is_gemv(chosen) and not norm_apart(args))


def norm_first(node: Node, low: Lowering, args: LinearArgs, *, half: bool) -> LinearArgs:
    """Launch the norm on its own, with its result as fp16 if asked for; the arguments with that
    result as x."""
    if args.norm is None:
        return args
    shape = (args.rows, args.k)
    if half and not low.half_values:
        normed = low.scratch(node, "normed", args.rows * args.k * 2)
    else:
        normed = low.scratch_values(node, "normed", args.rows * args.k)
    emit_norm(node, low, args.x, args.norm, normed, shape, args.eps, args.live_word, half=half)
    return replace(args, x=normed, norm=None)


def _emit(
    node: Node, low: Lowering, args: LinearArgs, chosen: Variant, spec: Mapping[int, int]
) -> None:
    optional = [o for o in (args.bias, args.residual, args.norm) if o is not None]
    own: dict[int, int] = {}
    if is_gemv(chosen) or takes_digits(chosen):
        own[NORM] = int(args.norm is not None)
    push, values = PUSH, push_values(args, low.call)
    joined: tuple[Operand, ...] = ()
    if takes_digits(chosen):
        push = DIGITS_PUSH
        if chosen.groups[2] > 1:
            sums = _sums(node, low, chosen.groups[2] * 2 * ceil_div(args.products, 2))
            joined = (sums, low.counters)
        values = (*(joined or (args.x, args.x)), *values)
    low.emit(
        node,
        chosen.kernel,
        push,
        values,
        chosen.groups,
        reads=(args.x, args.weight, low.call, *optional, *joined),
        writes=(args.result, *joined),
        spec={**common_constants(args), **spec, **own},
        full_subgroups=chosen.full_subgroups,
    )


def push_values(args: LinearArgs, call: Operand) -> tuple[Operand | int | float, ...]:
    """The values of `PUSH`; `call` is the word group whose word `live_word` counts the rows."""
    return (
        args.x,
        args.weight,
        args.bias or args.x,
        args.residual or args.x,
        args.result,
        call,
        args.norm or args.x,
        args.live_word,
        args.n,
        args.k,
        args.first,
        args.weight_rows,
        args.eps,
    )


def common_constants(args: LinearArgs) -> dict[int, int]:
    """The specialisation that every linear kernel has."""
    return {
        0: int(args.bias is not None),
        1: int(args.residual is not None),
        2: args.activation,
        6: float_bits(args.softcap),
    }


def linear_variants(low: Lowering, args: LinearArgs) -> list[Variant]:
    """The ways to launch it on this class of device, best first."""
    stored = weight_format(args.dtype)
    if not stored.fits((args.weight_rows, args.k)):
        raise FormatError(f"rows of {args.k} weights can't be stored as {args.dtype}")
    name = ("gated_" if args.gated else "") + stored.variant
    if low.caps.device_kind == "software":
        found = _software_variants(args, stored, name)
    elif args.rows <= GEMV_ROWS:
        found = gemv_variants(args, low, name)
    else:
        found = matrix_variants(args, name, low.half_values) if low.half_operands else []
        if args.rows <= BATCH_ROWS:
            few = low.caps.device_kind == "discrete" and ceil_div(args.n, 64) < FEW_GROUPS
            batch = batch_variant(args, low, name, optional=not few)
            found = [batch, *found] if args.rows <= 2 * GEMV_ROWS else [*found, batch]
        found += _gemm_variants(args, name)
    rows = min(4, power_of_two(args.rows))
    groups = (ceil_div(args.n, 64), ceil_div(args.rows, rows), 1)
    plain = {3: rows, 4: int(args.k % 8 == 0)}
    return [*found, Variant(f"linear/lane_row.{name}", plain, groups, plain=True)]


def _software_variants(args: LinearArgs, stored: WeightFormat, name: str) -> list[Variant]:
    """Sixteen sums a lane at most; more output rows a lane where there are fewer rows of x."""
    if args.k % 8:
        return []
    needs = ("ballot", "subgroup>=8")
    found = []
    if args.rows == 1 and stored.variant != "q":
        outputs = 8 if args.gated else 16
        groups = (ceil_div(args.n, outputs), 1, 1)
        found.append(Variant(f"linear/words.{name}", {3: outputs}, groups, needs))
    elif args.rows == 1 and args.k % 32 == 0:
        outputs = 4 if args.gated else 8
        while outputs > 1 and ceil_div(args.n, 8 * outputs) < SOFTWARE_GROUPS:
            outputs //= 2
        groups = (ceil_div(args.n, 8 * outputs), 1, 1)
        found.append(Variant(f"linear/groups.{name}", {3: outputs}, groups, needs))
    rows = min(8, power_of_two(args.rows))
    outputs = {1: 8, 2: 4, 4: 2, 8: 2}[rows] // (2 if args.gated else 1)
    groups = (ceil_div(args.n, 8 * outputs), ceil_div(args.rows, rows), 1)
    return [*found, Variant(f"linear/broadcast.{name}", {3: rows, 4: outputs}, groups, needs)]


def _gemm_variants(args: LinearArgs, name: str) -> list[Variant]:
    found = []
    # Large tiles only where small ones would be more than fill the device.
    large = ceil_div(args.n, 64) * ceil_div(args.rows, 64) >= LARGE_TILE_GROUPS
    for tile in (64, 16) if large else (16, 64):
        groups = (ceil_div(args.n, 64), ceil_div(args.rows, tile), 1)
        found.append(Variant(f"linear/gemm.m{tile}_{name}", {3: int(args.k % 8 == 0)}, groups))
    return found


def format_constants(stored: WeightFormat) -> dict[int, int]:
    """Specialisation of the q variants (kernels/include/quants.glsl)."""
    if stored.variant != "q":
        return {}
    return {7: stored.number, 8: stored.group, 9: stored.outliers}


def float_bits(value: float) -> int:
    """The bits of an fp32 number, as a specialisation constant takes them."""
    return int(np.float32(value).view(np.uint32))
