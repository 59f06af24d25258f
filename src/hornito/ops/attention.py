"""Causal attention of `q [T, heads * D]` over the layer's KV cache.

Row at position i sees keys j with `0 <= i - j` and, with a window W, `i - j < W`. Inputs: q and the
cache token of the append that must come first. Attributes: `layer`, `heads`, `kv_heads`,
`head_dim`, `scale`, `window` (0 for none), `softcap` (0 for none).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hornito.errors import FormatError, UnsupportedError
from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import BLOCK_POSITIONS, Array, Lowering, Push, ceil_div, present
from hornito.ops.gemv import power_of_two
from hornito.ops.matrices import MATRIX_NEEDS
from hornito.ops.variants import Variant

SPLIT_PUSH = Push(
    "rows:u64 table:u64 q:u64 partial:u64 stats:u64 table_stride:u32 layer:u32 window:u32 "
    "scale:f32 softcap:f32"
)
LANES_PUSH = Push(
    "rows:u64 table:u64 q:u64 partial:u64 stats:u64 result:u64 counters:u64 table_stride:u32 "
    "layer:u32 window:u32 scale:f32 softcap:f32"
)
MERGE_PUSH = Push("rows:u64 partial:u64 stats:u64 result:u64 head_dim:u32 window:u32")
FLASH_PUSH = Push(
    "rows:u64 table:u64 q:u64 result:u64 call:u64 table_stride:u32 layer:u32 window:u32 "
    "scale:f32 softcap:f32"
)

MAX_SPLITS = 32
MAX_HEAD_DIM = 256
TILE_FLOATS = 2048
"""Floats of q, or of partial results, that a workgroup keeps in shared memory."""
MATRIX_ROWS = 64
"""Rows of a workgroup of kernels/attention/flash_matrix.comp."""
MATRIX_DIMS = ((64, 64), (128, 32), (256, 32))
"""Its variants: largest head_dim, and keys at a time."""


def infer(graph: Graph, node: Node) -> list[Value]:
    q, _ = node.inputs
    shape = graph.shape(q)
    heads, kv_heads, head_dim = (node.attr(a) for a in ("heads", "kv_heads", "head_dim"))
    if heads % kv_heads or shape[1] != heads * head_dim:
        raise FormatError(
            f"node {node.name}: q is {shape[1]} wide; {heads} heads, {kv_heads} KV heads of "
            f"{head_dim}"
        )
    if head_dim % 4 or head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"node {node.name}: head_dim {head_dim}; attention takes multiples of 4 up to "
            f"{MAX_HEAD_DIM}"
        )
    return [Value(FLOAT, shape)]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    (q,) = present(inputs, 1)
    heads, head_dim = node.attr("heads"), node.attr("head_dim")
    cache = state.layer(node.attr("layer"))
    rows = q.reshape(len(q), heads, head_dim)
    out = np.empty_like(rows)
    for r, position in enumerate(state.positions):
        window = node.attr("window") or int(position) + 1
        seen = range(max(0, int(position) - window + 1), int(position) + 1)
        k = np.stack([cache.keys[j] for j in seen], axis=1)  # [kv_heads, keys, D]
        v = np.stack([cache.values[j] for j in seen], axis=1)
        group = heads // len(k)
        scores = np.einsum("hgd,hjd->hgj", rows[r].reshape(-1, group, head_dim), k)
        scores = scores * node.attr("scale")
        cap = node.attr("softcap")
        if cap:
            scores = cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[r] = np.einsum("hgj,hjd->hgd", weights, v).reshape(heads, head_dim)
    return [out.reshape(q.shape)]


def lower(node: Node, low: Lowering) -> None:
    kv = low.kv[node.attr("layer")]
    key = (
        f"attention {low.kind} {low.rows} of {node.attr('heads')} on {kv.kv_heads} heads of "
        f"{kv.head_dim}, window {node.attr('window')}, {'kv16' if kv.half else 'kv32'}"
    )
    chosen = low.choose(node, key, attention_variants(node, low))
    if chosen.kernel.startswith("attention/flash"):
        _lower_flash(node, low, chosen)
    else:
        _lower_split(node, low, chosen)


def attention_variants(node: Node, low: Lowering) -> list[Variant]:
    """The ways to launch it on this class of device, best first.

    Specialisation 0 is what one workgroup holds: rows of q (flash), or query heads (the others).
    """
    kv = low.kv[node.attr("layer")]
    software = low.caps.device_kind == "software"
    suffix = "kv16" if kv.half else "kv32"
    found = []
    if low.kind == "chunk" and low.rows > 1:
        if low.half_operands and kv.half and kv.head_dim % 8 == 0:
            found.append(_matrix_variant(node, low, kv.head_dim))
        # A GPU is filled by many small tiles; a processor gains from every row that shares a key.
        tile = min(16 if software else 4, TILE_FLOATS // kv.head_dim)
        groups = (ceil_div(low.rows, tile), node.attr("heads"), 1)
        found.append(Variant(f"attention/flash.{suffix}", {0: tile}, groups))
    elif not software and kv.head_dim % 8 == 0:
        found += _lanes_variants(node, low, f"attention/lanes.{suffix}")
    group = node.attr("heads") // kv.kv_heads
    together = max(
        h for h in range(1, 9) if group % h == 0 and (h == 1 or h * kv.head_dim <= TILE_FLOATS)
    )
    groups = (_splits(node, low), kv.kv_heads * (group // together), low.rows)
    return [*found, Variant(f"attention/split.{suffix}", {0: together}, groups, plain=True)]


def _matrix_variant(node: Node, low: Lowering, head_dim: int) -> Variant:
    dims, keys = next(pair for pair in MATRIX_DIMS if pair[0] >= head_dim)
    # Two tiles of keys and values, and fp32 scores of four subgroups of 16 rows.
    shared = 2 * keys * (dims + 8) * 2 + 4 * 16 * (keys + 4) * 4 + 256
    return Variant(
        f"attention/flash_matrix.d{dims}",
        {},
        (ceil_div(low.rows, MATRIX_ROWS), node.attr("heads"), 1),
        (*MATRIX_NEEDS, "shuffle", f"shared>={shared}"),
        full_subgroups=True,
        inexact=True,
    )


def _lanes_variants(node: Node, low: Lowering, kernel: str) -> list[Variant]:
    """One query head a workgroup, which fills a GPU soonest; more of them, which load the keys of
    a long context less often, to be measured."""
    kv = low.kv[node.attr("layer")]
    lanes = max(8, power_of_two(kv.head_dim // 8))
    group = node.attr("heads") // kv.kv_heads
    most = min(8, TILE_FLOATS * low.caps.subgroup_min // (128 * kv.head_dim))
    found = []
    for together in dict.fromkeys((1, 2, 4, group)):
        if together <= min(most, group):
            groups = (_splits(node, low), kv.kv_heads * ceil_div(group, together), low.rows)
            needs = ("shuffle", f"subgroup>={lanes}")
            found.append(
                Variant(
                    kernel,
                    {0: together, 5: lanes},
                    groups,
                    needs,
                    full_subgroups=True,
                    optional=together > 1,
                )
            )
    return found


def _splits(node: Node, low: Lowering) -> int:
    """Parts that the keys of a row may be cut into."""
    blocks, window = low.table_blocks, node.attr("window")
    if window:
        blocks = min(blocks, ceil_div(window, BLOCK_POSITIONS) + 1)
    return min(MAX_SPLITS, blocks)


def _lower_flash(node: Node, low: Lowering, chosen: Variant) -> None:
    q, result = low.operand(node.inputs[0]), low.operand(node.outputs[0])
    kv = low.kv[node.attr("layer")]
    low.emit(
        node,
        chosen.kernel,
        FLASH_PUSH,
        (
            low.row_records,
            kv.table,
            q,
            result,
            low.call,
            low.table_stride,
            kv.layer,
            node.attr("window"),
            node.attr("scale"),
            node.attr("softcap"),
        ),
        chosen.groups,
        reads=(low.row_records, kv.table, q, low.call, low.cache(node.attr("layer"))),
        writes=(result,),
        spec={
            **chosen.spec,
            1: kv.head_dim,
            2: kv.kv_heads,
            3: node.attr("heads") // kv.kv_heads,
        },
        full_subgroups=chosen.full_subgroups,
    )


def _lower_split(node: Node, low: Lowering, chosen: Variant) -> None:
    q, result = low.operand(node.inputs[0]), low.operand(node.outputs[0])
    kv = low.kv[node.attr("layer")]
    heads, head_dim, window = node.attr("heads"), kv.head_dim, node.attr("window")
    splits = _splits(node, low)
    partial = low.scratch(node, "partial", low.rows * heads * splits * head_dim * 4)
    stats = low.scratch(node, "stats", low.rows * heads * splits * 2 * 4)
    joins = chosen.kernel.startswith("attention/lanes.")
    own = (result, low.counters) if joins else ()
    low.emit(
        node,
        chosen.kernel,
        LANES_PUSH if joins else SPLIT_PUSH,
        (
            low.row_records,
            kv.table,
            q,
            partial,
            stats,
            *own,
            low.table_stride,
            kv.layer,
            window,
            node.attr("scale"),
            node.attr("softcap"),
        ),
        chosen.groups,
        reads=(
            *(low.row_records, kv.table, q, low.cache(node.attr("layer"))),
            *((low.counters,) if joins else ()),
        ),
        writes=(partial, stats, *own),
        spec={
            **chosen.spec,
            1: kv.head_dim,
            2: kv.kv_heads,
            3: heads // kv.kv_heads,
            4: splits,
        },
        full_subgroups=chosen.full_subgroups,
    )
    if joins:
        return
    low.emit(
        node,
        "attention/merge.default",
        MERGE_PUSH,
        (low.row_records, partial, stats, result, head_dim, window),
        (heads, low.rows, 1),
        reads=(low.row_records, partial, stats),
        writes=(result,),
        spec={0: splits},
    )
