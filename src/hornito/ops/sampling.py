"""The `sample` tail of the head: the next token is drawn on the device (docs/sampling.md).

Five passes over `S` rows, without a sort: `adjust` (per head tile), `histogram`, `cut`, `collect`
and `draw` (kernels/sample). Their scratch is `[S, V]` rounded up to runs of 1024 ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hornito.errors import UnsupportedError
from hornito.graph.graph import Node
from hornito.ops.base import RUN, Lowering, Operand, Push, ceil_div

ADJUST_PUSH = Push(
    "logits:u64 raw:u64 adjusted:u64 partial:u64 params:u64 biases:u64 counts:u64 masks:u64 "
    "histogram:u64 rows:u64 selection:u64 call:u64 live_word:u32 width:u32 first_id:u32 runs:u32 "
    "vocabulary:u32"
)
HISTOGRAM_PUSH = Push(
    "adjusted:u64 partial:u64 params:u64 histogram:u64 rows:u64 selection:u64 call:u64 "
    "live_word:u32 runs:u32 vocabulary:u32"
)
CUT_PUSH = Push("params:u64 histogram:u64 cut:u64 rows:u64 selection:u64 call:u64 live_word:u32")
COLLECT_PUSH = Push(
    "adjusted:u64 partial:u64 cut:u64 list:u64 params:u64 rows:u64 selection:u64 call:u64 "
    "live_word:u32 runs:u32 vocabulary:u32"
)
DRAW_PUSH = Push(
    "rows:u64 selection:u64 raw:u64 adjusted:u64 partial:u64 cut:u64 list:u64 params:u64 "
    "counts:u64 eos:u64 records:u64 top:u64 call:u64 live_word:u32 runs:u32 eos_count:u32 "
    "ring:u32 vocabulary:u32"
)

GREEDY, PENALTIES, TOP_K, TOP_P, MASKED = 1, 2, 4, 8, 16
"""Bits of a parameter record's first word."""

BINS = 1024
MOST_IDS = 512 * RUN
"""Ids of the largest vocabulary that `draw` has shared memory for."""

LIVE_WORD = 1


def mask_bytes(vocabulary: int) -> int:
    """Bytes of a row's mask: one bit for each id, in 32-bit words."""
    return ceil_div(vocabulary, 32) * 4


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What the passes hand to each other."""

    tile: Operand
    raw: Operand
    adjusted: Operand
    partial: Operand
    histogram: Operand
    cut: Operand
    list: Operand


def lower_sample(
    node: Node,
    low: Lowering,
    vocabulary: int,
    tile: int,
    emit_tile: Callable[[Operand, int, int], None],
) -> None:
    """Emit the head's tiles and the passes of sampling behind them.

    Args:
        tile: ids of one head tile, whole runs unless it is the whole vocabulary.
        emit_tile: `(result, first id, width)` emits the logits of a tile.

    Raises:
        UnsupportedError: the vocabulary has more ids than the kernels hold.
    """
    if vocabulary > MOST_IDS:
        raise UnsupportedError(
            f"sampling holds up to {MOST_IDS:,} ids; the vocabulary has {vocabulary:,}"
        )
    selected, runs = low.selected, ceil_div(vocabulary, RUN)
    padded = selected * runs * RUN * 4
    buffers = _Buffers(
        low.scratch(node, "tile", selected * min(tile, vocabulary) * 4),
        low.scratch(node, "raw", padded),
        low.scratch(node, "adjusted", padded),
        low.scratch(node, "partial", selected * runs * 32),
        low.scratch(node, "histogram", selected * 3 * BINS * 4),
        low.scratch(node, "cut", selected * 32),
        low.scratch(node, "list", padded),
    )
    for first in range(0, vocabulary, tile):
        width = min(tile, vocabulary - first)
        part = buffers.tile.part(0, selected * width * 4)
        emit_tile(part, first, width)
        _emit_adjust(node, low, buffers, part, first, width, vocabulary)
    _emit_filters(node, low, buffers, vocabulary)
    _emit_draw(node, low, buffers, vocabulary)


def _emit_adjust(
    node: Node, low: Lowering, b: _Buffers, part: Operand, first: int, width: int, vocabulary: int
) -> None:
    masks = Operand("masks", 0, low.selected * mask_bytes(vocabulary))
    inputs = (low.sampling, low.biases, low.counts, masks)
    low.emit(
        node,
        "sample/adjust.default",
        ADJUST_PUSH,
        (
            *(part, b.raw, b.adjusted, b.partial, *inputs, b.histogram),
            *(low.row_records, low.selection, low.call),
            *(LIVE_WORD, width, first, ceil_div(vocabulary, RUN), vocabulary),
        ),
        (ceil_div(width, RUN), low.selected, 1),
        reads=(part, *inputs, low.row_records, low.selection, low.call),
        writes=(b.raw, b.adjusted, b.partial, b.histogram),
    )


def _emit_filters(node: Node, low: Lowering, b: _Buffers, vocabulary: int) -> None:
    runs = ceil_div(vocabulary, RUN)
    call = (low.row_records, low.selection, low.call)
    low.emit(
        node,
        "sample/histogram.default",
        HISTOGRAM_PUSH,
        (b.adjusted, b.partial, low.sampling, b.histogram, *call, LIVE_WORD, runs, vocabulary),
        (runs, low.selected, 1),
        reads=(b.adjusted, b.partial, low.sampling, b.histogram, *call),
        writes=(b.histogram,),
    )
    low.emit(
        node,
        "sample/cut.default",
        CUT_PUSH,
        (low.sampling, b.histogram, b.cut, *call, LIVE_WORD),
        (low.selected, 1, 1),
        reads=(low.sampling, b.histogram, *call),
        writes=(b.cut,),
    )
    low.emit(
        node,
        "sample/collect.default",
        COLLECT_PUSH,
        (
            *(b.adjusted, b.partial, b.cut, b.list, low.sampling, *call),
            *(LIVE_WORD, runs, vocabulary),
        ),
        (runs, low.selected, 1),
        reads=(b.adjusted, b.partial, b.cut, low.sampling, *call),
        writes=(b.partial, b.list),
    )


def _emit_draw(node: Node, low: Lowering, b: _Buffers, vocabulary: int) -> None:
    update = low.kind == "batch"
    found = (b.raw, b.adjusted, b.partial, b.cut, b.list)
    low.emit(
        node,
        "sample/draw.default",
        DRAW_PUSH,
        (
            *(low.row_records, low.selection, *found),
            *(low.sampling, low.counts, low.eos, low.records, low.top, low.call),
            *(LIVE_WORD, ceil_div(vocabulary, RUN), low.tail.eos_count, low.tail.ring),
            vocabulary,
        ),
        (low.selected, 1, 1),
        reads=(
            *(low.row_records, low.selection, *found, low.sampling),
            *(low.counts, low.eos, low.call),
        ),
        writes=(b.cut, low.counts, low.records, low.top, *((low.row_records,) if update else ())),
        spec={1: int(update)},
    )
