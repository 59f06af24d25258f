"""ONNX Attention and RotaryEmbedding of opset 23 and later, as products, masks and a softmax."""

from __future__ import annotations

import math

import numpy as np

from hornito.errors import UnsupportedError
from hornito.importers.onnx.reader import OpNode
from hornito.importers.onnx_generic.builder import Builder, Ref, known, numpy_dtype
from hornito.importers.onnx_generic.table import (
    handles,
    inputs,
    integer,
    number,
    of_type,
    optional,
)
from hornito.tensor.graph import FLOATS, SIGNED, Attr


@handles("Attention")
def _attention(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    q, k, v = (of_type(a, FLOATS) for a in inputs(x, 3))
    packed = q.rank == 3
    if packed:
        heads, kv_heads = integer(node, "q_num_heads", 0), integer(node, "kv_num_heads", 0)
        q, k, v = _split(b, q, heads), _split(b, k, kv_heads), _split(b, v, kv_heads)
    past_key, past_value, valid = optional(x, 4), optional(x, 5), optional(x, 6)
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        k, v = b.concat([past_key, k], 2), b.concat([past_value, v], 2)
    scale = number(node, "scale", 0.0) or 1 / math.sqrt(q.shape[3])
    batch, heads, rows, _ = q.shape
    columns = k.shape[2]
    raw = _grouped(b, q, k, scale)
    capped = raw
    softcap = number(node, "softcap", 0.0)
    if softcap:
        cap = known(np.asarray(softcap, numpy_dtype(q.dtype)), q.dtype)
        capped = b.map("mul", [b.map("tanh", [b.map("div", [raw, cap])]), cap])
    biased = capped
    for part in _masks(b, node, optional(x, 3), past, valid, (rows, columns), q.dtype):
        biased = b.map("add", [biased, part])
    weights = b.rows("softmax", biased, [3])
    if biased is not capped:  # a row without any key gives zeros
        top = b.reduce("max", biased, [3], True)
        dead = b.map("equal", [top, b.full((), -math.inf, q.dtype)], "bool")
        weights = b.map("where", [dead, b.full((), 0, q.dtype), weights], q.dtype)
    result = _grouped(b, weights, v, None)
    if packed:
        result = b.reshape(b.transpose(result, (0, 2, 1, 3)), (batch, rows, heads * v.shape[3]))
    mode = integer(node, "qk_matmul_output_mode", 0)
    return [result, k, v, (raw, capped, biased, weights)[mode]][: len(node.outputs)]


def _split(b: Builder, a: Ref, heads: int) -> Ref:
    """`[batch, rows, heads * size]` as `[batch, heads, rows, size]`."""
    batch, rows, width = a.shape
    if heads < 1 or width % heads:
        raise UnsupportedError(f"{heads} heads of a width of {width}")
    return b.transpose(b.reshape(a, (batch, rows, heads, width // heads)), (0, 2, 1, 3))


def _grouped(b: Builder, a: Ref, c: Ref, scale: float | None) -> Ref:
    """The product of every head with its KV head: `scale * a @ c.T`, or `a @ c` without a scale."""
    batch, heads, rows, width = a.shape
    kv_heads = c.shape[1]
    if heads % kv_heads:
        raise UnsupportedError(f"{heads} heads over {kv_heads} KV heads")
    # Heads of one KV head are more rows of it.
    left = b.reshape(a, (batch, kv_heads, heads // kv_heads * rows, width))
    made = b.matmul(left, c, flip_b=scale is not None, alpha=1.0 if scale is None else scale)
    return b.reshape(made, (batch, heads, rows, made.shape[3]))


def _masks(
    b: Builder,
    node: OpNode,
    mask: Ref | None,
    past: int,
    valid: Ref | None,
    shape: tuple[int, int],
    dtype: str,
) -> list[Ref]:
    """What is added to the scores: the given mask, the causal rule and the window, padding."""
    rows, columns = shape
    none, zero = b.full((), -math.inf, dtype), b.full((), 0, dtype)
    found = []

    def add(allowed: Ref) -> None:
        found.append(b.map("where", [allowed, zero, none], dtype))

    if mask is not None:
        missing = columns - mask.shape[-1]
        if missing > 0:
            at = [*range(mask.shape[-1]), *[-1] * missing]
            mask = b.take(mask, {mask.rank - 1: at}, 0 if mask.dtype == "bool" else -math.inf)
        if mask.dtype == "bool":
            add(mask)
        else:
            found.append(b.cast(mask, dtype))
    at_row = known(np.arange(rows, dtype=np.int64).reshape(rows, 1))
    at_column = known(np.arange(columns, dtype=np.int64).reshape(1, columns))
    offset = known(np.asarray(past, np.int64))
    if valid is not None:
        count = b.reshape(valid, (valid.size, 1, 1, 1))
        add(b.map("less", [at_column, count], "bool"))
        offset = b.map("sub", [count, known(np.asarray(rows, np.int64))])
    place = b.map("add", [at_row, offset])
    left, right = (integer(node, f"{side}_window_size", -1) for side in ("left", "right"))
    if integer(node, "is_causal", 0):
        add(b.map("less_equal", [at_column, place], "bool"))
    if left >= 0:
        first = b.map("sub", [place, known(np.asarray(left, np.int64))])
        add(b.map("greater_equal", [at_column, first], "bool"))
    if right >= 0:
        last = b.map("add", [place, known(np.asarray(right, np.int64))])
        add(b.map("less_equal", [at_column, last], "bool"))
    return found


@handles("RotaryEmbedding")
def _rotary(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, cosines, sines = inputs(x, 3)
    positions = optional(x, 3)
    packed = of_type(a, FLOATS).rank == 3
    turned = _split(b, a, integer(node, "num_heads", 0)) if packed else a
    batch, _, rows, width = turned.shape
    rotated = integer(node, "rotary_embedding_dim", 0) or width
    half = rotated // 2
    if positions is not None:
        cosines, sines = (_looked_up(b, table, positions) for table in (cosines, sines))
    cosines, sines = (b.reshape(t, (t.shape[0], 1, rows, half)) for t in (cosines, sines))
    if integer(node, "interleaved", 0):
        at = [list(range(0, rotated, 2)), list(range(1, rotated, 2))]
    else:
        at = [list(range(half)), list(range(half, rotated))]
    first, second = (b.take(turned, {3: chosen}) for chosen in at)
    real = b.map("sub", [b.map("mul", [cosines, first]), b.map("mul", [sines, second])])
    imaginary = b.map("add", [b.map("mul", [sines, first]), b.map("mul", [cosines, second])])
    rest = b.take(turned, {3: list(range(rotated, width))})
    back = {source: i for i, source in enumerate([*at[0], *at[1], *range(rotated, width)])}
    whole = b.concat([real, imaginary, rest], 3)
    whole = b.take(whole, {3: [back[i] for i in range(width)]})
    if not packed:
        return [whole]
    return [b.reshape(b.transpose(whole, (0, 2, 1, 3)), (batch, rows, a.shape[2]))]


def _looked_up(b: Builder, table: Ref, positions: Ref) -> Ref:
    """Rows of a table `[positions, half]` by index."""
    attrs: dict[str, Attr] = {
        "fn": "gather",
        "p": [table.shape[0], table.shape[1], positions.size, 0],
    }
    shape = (*positions.shape, table.shape[1])
    return b.node("gather", [table, of_type(positions, SIGNED)], table.dtype, shape, attrs)
