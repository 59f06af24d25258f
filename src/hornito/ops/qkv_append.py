"""Fused twin of what lies between the residual stream and attention: RMS norm, the projections of
q, k and v in one matrix `[q; k; v]`, RoPE on q and k, `kv_append`. All but the projections may be
absent.

`x [T, K], weight [(heads + 2 kv_heads) * D, K], bias [..]?, norm [K]?, positions [T]?,
inv_freq [R/2] or [2, R/2]? -> q [T, heads * D], cache token`.
Attributes: those of `rope_append`, but `eps` is of the norm of x.
"""

from __future__ import annotations

from collections.abc import Sequence

from hornito.errors import FormatError
from hornito.graph.graph import Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops import rope_append
from hornito.ops.base import Array, Lowering, Operand, Push, present
from hornito.ops.gemv import GEMV_ROWS, NORM, qkv_variants
from hornito.ops.linear import (
    LinearArgs,
    check_matrix,
    check_norm,
    emit_linear,
    format_constants,
)
from hornito.ops.rms_norm import norm
from hornito.ops.rope import lower_set
from hornito.ops.variants import Variant
from hornito.quant.formats import weight_format

PUSH = Push(
    "rows:u64 table:u64 x:u64 w:u64 bias:u64 norm:u64 inv_freq:u64 q:u64 table_stride:u32 "
    "layer:u32 heads:u32 kv_heads:u32 head_dim:u32 half_dim:u32 k:u32 count:u32 scale:f32 eps:f32"
)


def infer(graph: Graph, node: Node) -> list[Value]:
    x, weight, bias, scale = node.inputs[:4]
    rows, width = graph.shape(x)
    n, _ = check_matrix(graph, node, weight, width)
    check_norm(graph, node, scale, width)
    if bias and graph.shape(bias) != (n,):
        raise FormatError(f"node {node.name}: bias has shape {graph.shape(bias)}, not ({n},)")
    return rope_append.infer_rows(graph, node, (rows, n), node.inputs[4], node.inputs[5])


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    x, weight = present(inputs, 2)
    bias, scale, positions, inv_freq = inputs[2:]
    if scale is not None:
        x = norm(x, scale, node.attr("eps"))
    qkv: Array = x @ weight.T
    if bias is not None:
        qkv = qkv + bias
    return rope_append.reference(node, [qkv, positions, inv_freq], state)


def lower(node: Node, low: Lowering) -> None:
    x, weight, bias, scale = node.inputs[:4]
    rows, k = low.shape(x)
    n, _ = low.shape(weight)
    args = LinearArgs(
        x=low.operand(x),
        weight=low.operand(weight),
        result=low.scratch_values(node, "qkv", rows * n),
        rows=rows,
        n=n,
        k=k,
        dtype=low.weight_dtype(weight),
        weight_rows=n,
        bias=low.operand(bias) if bias else None,
        norm=low.operand(scale) if scale else None,
        eps=node.attr("eps") if scale else 0.0,
    )
    chosen = low.choose(node, args.key + " append", _variants(node, low, args))
    if chosen.plain:
        emit_linear(node, low, args)
        rope_append.emit_rows(node, low, args.result, node.inputs[5], [])
    else:
        _emit(node, low, args, chosen)


def _variants(node: Node, low: Lowering, args: LinearArgs) -> list[Variant]:
    """One kernel for few rows on GPUs; then the launches apart, for which the last one stands."""
    kv = low.kv[node.attr("layer")]
    suffix = "kv16" if kv.half else "kv32"
    apart = Variant(f"rope_append/rotate_append.{suffix}", plain=True)
    if low.caps.device_kind == "software" or args.rows > GEMV_ROWS:
        return [apart]
    return [*qkv_variants(args, low, suffix), apart]


def _emit(node: Node, low: Lowering, args: LinearArgs, chosen: Variant) -> None:
    kv = low.kv[node.attr("layer")]
    q = low.operand(node.outputs[0])
    rotary: list[Operand] = []
    half = 0
    if node.inputs[5]:
        inv_freq, half = lower_set(node, node.inputs[5], low)
        rotary = [inv_freq]
    optional = [o for o in (args.bias, args.norm) if o is not None]
    low.emit(
        node,
        chosen.kernel,
        PUSH,
        (
            low.row_records,
            kv.table,
            args.x,
            args.weight,
            args.bias or args.x,
            args.norm or args.x,
            *(rotary or [args.x]),
            q,
            low.table_stride,
            kv.layer,
            node.attr("heads"),
            kv.kv_heads,
            kv.head_dim,
            half,
            args.k,
            args.rows,
            float(node.attr_or("scale", 1.0)),
            args.eps,
        ),
        chosen.groups,
        reads=(low.row_records, kv.table, args.x, args.weight, *rotary, *optional),
        writes=(q, low.cache(node.attr("layer"))),
        spec={
            0: int(args.bias is not None),
            NORM: int(args.norm is not None),
            **chosen.spec,
            **format_constants(weight_format(args.dtype)),
        },
        full_subgroups=chosen.full_subgroups,
    )
