"""The head: `x [S, H], table [V, H] -> logits [S, V]`, reduced as the plan's tail asks.

Attributes: `softcap` (optional, 0 for none): logits become `softcap * tanh(logits / softcap)`.

Tails: `logits` stores them all; `argmax` and `logprob` walk the vocabulary in tiles, so that
S x V is never stored, and end in one record a row (see kernels/head/final.comp). `argmax` of a
`batch` plan also advances the rows, which is what makes a step need no host. `sample` does the
same with a drawn token, and has the logits of its few rows stored (hornito.ops.sampling).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from hornito.errors import FormatError
from hornito.graph.graph import FLOAT, Graph, Node, Value
from hornito.graph.reference import ReferenceState
from hornito.ops.base import RUN, Array, Lowering, Operand, Push, ceil_div, present
from hornito.ops.linear import LinearArgs, check_matrix, emit_linear
from hornito.ops.sampling import lower_sample

PARTIAL_PUSH = Push(
    "logits:u64 next_ids:u64 partial:u64 given:u64 call:u64 live_word:u32 width:u32 "
    "first_id:u32 runs:u32 first_run:u32"
)
FINAL_PUSH = Push(
    "rows:u64 selection:u64 partial:u64 given:u64 eos:u64 records:u64 given_logprob:u64 call:u64 "
    "live_word:u32 runs:u32 eos_count:u32 ring:u32"
)

TAILS = ("argmax", "sample", "logits", "logprob")
RECORD_BYTES = 16


def infer(graph: Graph, node: Node) -> list[Value]:
    x, table = node.inputs
    rows, width = graph.shape(x)
    n, _ = check_matrix(graph, node, table, width)
    return [Value(FLOAT, (rows, n))]


def reference(
    node: Node, inputs: Sequence[Array | None], state: ReferenceState
) -> list[Array | None]:
    x, table = present(inputs, 2)
    logits: Array = x @ table.T
    cap = node.attr_or("softcap", 0.0)
    return [cap * np.tanh(logits / cap) if cap else logits]


def lower(node: Node, low: Lowering) -> None:
    tail = low.tail
    if tail.kind == "logits":
        _emit_tile(node, low, low.operand(node.outputs[0]), 0, low.shape(node.outputs[0])[1])
        return
    selected, vocabulary = low.shape(node.outputs[0])
    tile = min(ceil_div(vocabulary, RUN) * RUN, tail.tile_ids)
    if tail.kind == "sample":
        lower_sample(node, low, vocabulary, tile, partial(_emit_tile, node, low))
        return
    runs = ceil_div(vocabulary, RUN)
    given = int(tail.kind == "logprob")
    logits = low.scratch(node, "tile", selected * min(tile, vocabulary) * 4)
    partials = low.scratch(node, "partial", selected * runs * 16)
    # Without given ids their logits are never touched, and their address is anyone's.
    given_logits = low.scratch(node, "given", selected * 4) if given else partials
    for first in range(0, vocabulary, tile):
        width = min(tile, vocabulary - first)
        part = logits.part(0, selected * width * 4)
        _emit_tile(node, low, part, first, width)
        low.emit(
            node,
            "head/partial.default",
            PARTIAL_PUSH,
            (
                part,
                low.next_ids,
                partials,
                given_logits,
                low.call,
                1,
                width,
                first,
                runs,
                first // RUN,
            ),
            (ceil_div(width, RUN), selected, 1),
            reads=(part, low.next_ids, low.call),
            writes=(partials, given_logits) if given else (partials,),
            spec={0: given},
        )
    update = int(tail.kind == "argmax" and low.kind == "batch")
    low.emit(
        node,
        "head/final.default",
        FINAL_PUSH,
        (
            low.row_records,
            low.selection,
            partials,
            given_logits,
            low.eos,
            low.records,
            low.given_logprob,
            low.call,
            1,
            runs,
            tail.eos_count,
            tail.ring,
        ),
        (selected, 1, 1),
        reads=(low.row_records, low.selection, partials, low.eos, low.call)
        + ((given_logits,) if given else ()),
        writes=(low.records,)
        + ((low.given_logprob,) if given else ())
        + ((low.row_records,) if update else ()),
        spec={0: given, 1: update},
    )


def _emit_tile(node: Node, low: Lowering, result: Operand, first: int, width: int) -> None:
    """Logits of the ids `[first, first + width)`."""
    x, table = node.inputs
    vocabulary, k = low.shape(table)
    if first + width > vocabulary:
        raise FormatError(f"node {node.name}: tile [{first}, {first + width}) of {vocabulary} ids")
    emit_linear(
        node,
        low,
        LinearArgs(
            x=low.operand(x),
            weight=low.operand(table),
            result=result,
            rows=low.selected,
            n=width,
            k=k,
            dtype=low.weight_dtype(table),
            weight_rows=vocabulary,
            first=first,
            live_word=1,
            softcap=float(node.attr_or("softcap", 0.0)),
        ),
    )
