"""Quantised weights: MatMulNBits, blocks, int8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hornito.graph.weights import FloatArray, TransposedData, WeightData
from hornito.importers.onnx.blocks import BlockData
from hornito.importers.onnx.match.columns import as_rows
from hornito.importers.onnx.match.linear import project, with_bias
from hornito.importers.onnx.match.shapes import need
from hornito.importers.onnx.registry import Inputs, binary, handles
from hornito.importers.onnx.values import (
    Array,
    Const,
    Ids,
    Matrix,
    Scaled,
    Unmatched,
    Value,
    widen,
)

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift
    from hornito.importers.onnx.reader import OpNode


def floats(value: Const) -> FloatArray:
    """Scales and the like, as fp32."""
    return widen(value.array) if value.bf16 else value.array.astype(np.float32)


def unpack(packed: Array, bits: int) -> Array:
    """Numbers of `bits` bits along the last axis of bytes, the low ones first."""
    if bits == 8:
        return packed
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    split = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return split.reshape(*packed.shape[:-1], -1)


def span(data: Array) -> tuple[int, int]:
    """The least and the largest number of unpacked weights."""
    return (int(data.min()), int(data.max())) if data.size else (0, 0)


def n_bits(node: OpNode, x: Inputs) -> BlockData:
    """The weight `[N, K]` of a MatMulNBits: blocks along K, scales and zero points flat or `[N,
    blocks]`, zero points packed, of the scales' type, or absent (the middle)."""
    size, rows = int(node.attrs["K"]), int(node.attrs["N"])
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs["block_size"])
    if bits not in (2, 4, 8) or block < 1 or size < 1 or rows < 1:
        raise Unmatched(f"weights of {bits} bits in blocks of {block}")
    packed, scale = need(x, 1), need(x, 2)
    zero = x[3] if len(x) > 3 else None
    if len(x) > 4 and x[4] is not None:
        raise Unmatched("a permutation of blocks (g_idx)")
    if not isinstance(packed, Const) or not isinstance(scale, Const):
        raise Unmatched("weights that are computed")
    blocks = -(-size // block)
    data = packed.array.reshape(rows, -1)
    if data.dtype != np.uint8 or data.shape[1] != blocks * block * bits // 8:
        raise ValueError(f"{packed.array.shape} does not hold {rows} x {size} numbers")
    scales = scale.array.reshape(rows, blocks)
    factors = Const(scales, scale.sources, scale.bf16)
    zeros = _zero_points(zero, rows, blocks, bits)
    sources = packed.sources + scale.sources + (zero.sources if isinstance(zero, Const) else ())
    return BlockData(
        (rows, size),
        block,
        sources,
        lambda a, b: unpack(data[a:b], bits),
        lambda a, b: floats(Const(factors.array[a:b], (), factors.bf16)),
        zeros,
        (0, (1 << bits) - 1),
    )


def _zero_points(
    zero: Value | None, rows: int, blocks: int, bits: int
) -> Callable[[int, int], Array]:
    if zero is None:
        middle = np.float32(1 << (bits - 1))
        return lambda a, b: np.full((b - a, blocks), middle)
    if not isinstance(zero, Const):
        raise Unmatched("zero points that are computed")
    array = zero.array
    if array.dtype == np.uint8 and not zero.bf16:
        packed = array.reshape(rows, -1)
        if packed.shape[1] != -(-blocks * bits // 8):
            raise ValueError(f"zero points {array.shape} for {rows} x {blocks} blocks")
        return lambda a, b: unpack(packed[a:b], bits)[:, :blocks]
    plain = array.reshape(rows, blocks)
    return lambda a, b: floats(Const(plain[a:b], (), zero.bf16))


@handles("com.microsoft:MatMulNBits")
def matmul_n_bits(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """A projection by a weight of few bits."""
    weight = n_bits(node, x)
    key = tuple(v.array.__array_interface__["data"][0] for v in x[1:3] if isinstance(v, Const))
    shared = cx.facts.setdefault("n_bits", {}).setdefault((key, weight.shape), weight)
    cx.note(f"weight of {node.attrs.get('bits', 4)} bits")
    rows = project(cx, need(x, 0), shared, 0)
    bias = x[5] if len(x) > 5 else None
    if bias is None:
        return rows
    found = with_bias(cx, rows, bias)
    if found is None:
        raise Unmatched("a bias that is no constant vector")
    return found


@handles("com.microsoft:GatherBlockQuantized")
def gather_block_quantized(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """An embedding of few bits: `[V, H / values per byte]` bytes, or unpacked 4-bit numbers."""
    table, ids, scale = need(x, 0), need(x, 1), need(x, 2)
    zero = x[3] if len(x) > 3 else None
    if not isinstance(table, Const) or not isinstance(scale, Const) or not isinstance(ids, Ids):
        raise Unmatched("blocks that are no constant, or not gathered by token ids")
    facts = node.attrs
    bits, block = int(facts.get("bits", 4)), int(facts.get("block_size", 128))
    data = table.array
    if facts.get("gather_axis", 0) != 0 or data.ndim != 2:
        raise Unmatched("blocks that are gathered along another axis than the first")
    if facts.get("quantize_axis", 1) not in (1, -1):
        raise Unmatched("blocks along another axis than the last")
    rows, blocks = data.shape[0], scale.array.reshape(data.shape[0], -1).shape[1]
    signed = data.dtype == np.int8
    bytes_of_4 = data.dtype == np.uint8 and data.shape[1] * 8 == blocks * block * bits
    width = data.shape[1] * 8 // bits if bytes_of_4 else data.shape[1]
    scales = Const(scale.array.reshape(rows, blocks), scale.sources, scale.bf16)
    if zero is None and not bytes_of_4:
        zeros: Callable[[int, int], Array] = lambda a, b: np.zeros((b - a, blocks), np.float32)  # noqa: E731
    elif zero is None:
        zeros = _zero_points(None, rows, blocks, bits)
    elif isinstance(zero, Const) and not bytes_of_4:
        plain = zero.array.reshape(rows, blocks)
        zeros = lambda a, b: plain[a:b]  # noqa: E731
    else:
        zeros = _zero_points(zero, rows, blocks, bits)
    weight = BlockData(
        (rows, width),
        block,
        table.sources + scale.sources + (zero.sources if isinstance(zero, Const) else ()),
        lambda a, b: unpack(data[a:b], bits) if bytes_of_4 else data[a:b],
        lambda a, b: floats(Const(scales.array[a:b], (), scales.bf16)),
        zeros,
        (0, (1 << bits) - 1) if bytes_of_4 else span(data),
    )
    if signed and zero is None:
        cx.note("signed blocks")
    return embed_quantised(cx, weight, ids)


def embed_quantised(cx: Lift, weight: WeightData, ids: Ids) -> Value:
    """Rows of a quantised embedding."""
    from hornito.importers.onnx.match.linear import embed

    return embed(cx, Matrix(weight), ids, 0)


@handles("DequantizeLinear")
def dequantize_linear(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """A weight of 8 or 4 bits: one scale, one a row or column, or blocks (opset 21)."""
    table, scale = need(x, 0), need(x, 1)
    zero = x[2] if len(x) > 2 else None
    if not isinstance(table, Const) or not isinstance(scale, Const):
        raise Unmatched("a dequantisation of what is computed")
    if zero is not None and not isinstance(zero, Const):
        raise Unmatched("zero points that are computed")
    axis, block = node.attrs.get("axis", 1), node.attrs.get("block_size", 0)
    array = table.array
    sources = table.sources + scale.sources + (zero.sources if zero is not None else ())
    if array.ndim != 2 or array.size <= 4096:
        return Const(_dequantised(array, scale, zero, axis, block), sources)
    axis %= 2
    whole, offset = floats(scale), None if zero is None else zero.array
    cx.note("dequantised weight")
    # Along which axis a scale holds for a run of numbers, and how many.
    along, run = (axis, int(block)) if block else (1 - axis, array.shape[1 - axis])
    if whole.size == 1:
        along, run = 1, array.shape[1]
    if along == 1:
        return Matrix(_lazily(array, whole, offset, run, sources))
    turned = None if offset is None else offset.T
    return Matrix(TransposedData(_lazily(array.T, whole.T, turned, run, sources)))


def _lazily(
    array: Array, scale: FloatArray, zero: Array | None, run: int, sources: tuple[str, ...]
) -> BlockData:
    """A matrix whose scales hold for runs along its rows: `[rows, blocks]`, one a row, or one."""
    rows = array.shape[0]
    blocks = -(-array.shape[1] // run)
    single = scale.size == 1
    full = np.broadcast_to(
        scale.reshape(1, 1) if single else scale.reshape(rows, -1), (rows, blocks)
    )
    offsets = np.zeros(1, np.int8) if zero is None else zero
    offsets = offsets.reshape(1, 1) if offsets.size == 1 else offsets.reshape(rows, -1)
    zeros = np.broadcast_to(offsets, (rows, blocks))
    turned = None
    if single and run == array.shape[1]:
        turned = lambda: _lazily(array.T, scale, zero, array.shape[0], sources)  # noqa: E731
    return BlockData(
        (rows, array.shape[1]),
        run,
        sources,
        lambda a, b: array[a:b],
        lambda a, b: np.ascontiguousarray(full[a:b], np.float32),
        lambda a, b: zeros[a:b],
        span(array),
        turned,
    )


def _dequantised(
    array: Array, scale: Const, zero: Const | None, axis: int, block: int
) -> FloatArray:
    factors = floats(scale)
    offsets = np.zeros((), np.float32) if zero is None else zero.array.astype(np.float32)
    if factors.ndim == 1 and factors.size > 1 and not block:
        sizes = [1] * array.ndim
        sizes[axis] = -1
        factors = factors.reshape(sizes)
        offsets = offsets.reshape(sizes) if offsets.size > 1 else offsets
    if block:
        factors = np.repeat(factors, block, axis)[: array.shape[0], ...]
        if offsets.size > 1:
            offsets = np.repeat(offsets, block, axis)[: array.shape[0], ...]
        cut = tuple(slice(0, d) for d in array.shape)
        factors, offsets = factors[cut], offsets[cut] if offsets.ndim else offsets
    return ((array.astype(np.float32) - offsets) * factors.reshape(factors.shape)).astype(
        np.float32
    )


@handles("DynamicQuantizeLinear")
def dynamic_quantize(cx: Lift, node: OpNode, x: Inputs) -> list[Value | None]:
    """Activations rounded to 8 bits; Hornito keeps them as they are, which is more exact."""
    rows = as_rows(cx, need(x, 0), cx.root(0))
    return [Scaled(rows, part) for part in ("quantised", "scale", "zero")]


@handles("MatMulInteger")
def matmul_integer(cx: Lift, node: OpNode, x: Inputs) -> Value:
    """A product with a weight of 8 bits, its scales still to come."""
    a, weight = need(x, 0), need(x, 1)
    zero = x[3] if len(x) > 3 else None
    if not isinstance(a, Scaled) or a.part != "quantised" or not isinstance(weight, Const):
        raise Unmatched("an integer product that is no quantised projection")
    if not isinstance(zero, Const | None) or weight.array.ndim != 2:
        raise Unmatched("zero points that are computed")
    return Scaled(a.x, "product", weight, zero)


@binary("Mul")
def integer_scale(cx: Lift, op: str, a: Value, b: Value) -> Value | None:
    """The scales of an integer product: the projection by the dequantised weight."""
    for value, other in ((a, b), (b, a)):
        if not isinstance(value, Scaled):
            continue
        if value.part == "scale" and isinstance(other, Const):
            return replace(value, part="factor", scale=other)
        if value.part == "product" and isinstance(other, Scaled) and other.part == "factor":
            return _dequantised_projection(cx, value, other)
    return None


def _dequantised_projection(cx: Lift, product: Scaled, factor: Scaled) -> Value:
    weight, scale = product.weight, factor.scale
    if weight is None or scale is None or product.x is not factor.x:
        raise Unmatched("an integer product scaled by other activations' scale")
    rows, width = weight.array.shape[::-1]
    turned = weight.array.T  # [out, in]
    factors = np.broadcast_to(floats(scale).reshape(-1, 1), (rows, 1))
    plain = np.zeros(1) if product.zero is None else product.zero.array
    zeros = np.broadcast_to(plain.reshape(-1, 1), (rows, 1))
    cx.note("weight of 8 bits; activations are not rounded")
    data = BlockData(
        (rows, width),
        width,
        weight.sources + scale.sources,
        lambda a, b: turned[a:b],
        lambda a, b: np.ascontiguousarray(factors[a:b], np.float32),
        lambda a, b: zeros[a:b],
        span(turned),
    )
    return project(cx, product.x, data, 0)
