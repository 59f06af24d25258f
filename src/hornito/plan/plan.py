"""The plan of a graph on one device: dispatches per bucket, the arena, and every byte it needs.

A bucket is a kind and a row count: `chunk` (all rows of one slot) or `batch` (a row per slot). Each
has a body and one program per wanted output (tail). All buckets share one arena, because they run
one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hornito.errors import FormatError
from hornito.graph.graph import Graph, Node
from hornito.graph.shapes import Affine, S
from hornito.ops import registry
from hornito.ops.base import (
    BLOCK_POSITIONS,
    RUN,
    Dispatch,
    KvLayout,
    Lowering,
    Operand,
    Tail,
    ceil_div,
    head_ids,
    query_heads,
)
from hornito.ops.matrices import MATRIX_NEEDS
from hornito.ops.variants import DEFAULTS, Choices, Site, meets
from hornito.plan.arena import Layout, LiveRange, pack
from hornito.plan.hazards import Range, barriers
from hornito.quant.formats import weight_format

if TYPE_CHECKING:
    from hornito.vk.caps import Caps

CHUNK_ROWS = (16, 64, 256)
LARGE_CHUNK_ROWS = (16, 64, 256, 512, 1024)
"""Of devices whose products go by cooperative matrices: small chunks would leave them idle."""

BATCH_ROWS = (1, 2, 4, 8, 16)
RING = 256
"""Records kept per row; more steps than that are never in flight."""

LOGITS_ROWS = 16
"""Rows of one `logits` tail of a chunk."""

HEAD_TILE_BYTES = 32 << 20
"""Bound on the logits of one head tile."""


@dataclass(frozen=True, slots=True)
class KvKind:
    """Layers that share a KV block shape: one block table per slot each."""

    window: int
    kv_heads: int
    head_dim: int
    layers: tuple[int, ...]
    half: bool

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of 64 positions, all layers of the kind."""
        per_layer = 2 * self.kv_heads * BLOCK_POSITIONS * self.head_dim * (2 if self.half else 4)
        return per_layer * len(self.layers)


@dataclass(frozen=True, slots=True)
class Program:
    """Dispatches in order, and whether a barrier comes before each."""

    dispatches: tuple[Dispatch, ...]
    barriers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Body and tails of one bucket; `selected` is S of every tail, `sites` where a variant was
    chosen."""

    kind: str
    rows: int
    body: Program
    tails: Mapping[str, Program]
    selected: Mapping[str, int]
    sites: tuple[Site, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before memory is allocated.

    `weight_bytes` are exact tensor sizes; `arena` places the activations of every bucket;
    `vocabulary` is the ids of the head, `width` the numbers of one embedding, `heads` the most
    query heads of a layer; `halves` are the places of the arena that hold values as fp16.
    """

    buckets: Mapping[tuple[str, int], BucketPlan]
    arena: Layout
    kinds: tuple[KvKind, ...]
    table_blocks: int
    weight_bytes: Mapping[str, int]
    layers: int
    vocabulary: int
    width: int
    heads: int
    halves: frozenset[str] = frozenset()

    def kernels(self) -> list[tuple[str, tuple[tuple[int, int], ...], int]]:
        """The distinct pipelines: kernel name, specialisation, push-constant bytes."""
        return [(*d.pipeline_key, d.push.size) for d in self.distinct()]

    def distinct(self) -> list[Dispatch]:
        """One dispatch of each distinct pipeline."""
        seen: dict[tuple[str, tuple[tuple[int, int], ...]], Dispatch] = {}
        for bucket in self.buckets.values():
            for program in (bucket.body, *bucket.tails.values()):
                for dispatch in program.dispatches:
                    seen.setdefault(dispatch.pipeline_key, dispatch)
        return list(seen.values())

    def dispatches_per_layer(self) -> float:
        """Dispatches of one layer at one row."""
        body = self.buckets["batch", 1].body.dispatches
        return sum(d.node.startswith("layer") for d in body) / self.layers


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the caller chose.

    Attributes:
        context: positions per slot.
        kv_half: fp16 keys and values.
        slots: sequences that run at once.
        head_tile_ids: bound on the ids of one head tile (0: by memory).
        guard: bytes of guard band behind every activation (tests).
        barrier_everywhere: a barrier before every dispatch (tests).
        eos_count: how many ids end an answer.
        rewind_budget: positions that sliding layers keep beyond their window.
        half_operands: matrix products may round their operands to fp16 (precision `normal`).
        half_values: values are fp16 in memory, between ops (precision `low`).
        kv_bytes: size of the KV pools; None lets every slot fill its context.
        fp32_nodes: names of nodes whose matrix products keep fp32 operands all the same.
        keep_values: give every value memory of its own, so that all can be read after a call
            (`hornito compare`).
        choices: what departs from the default variants.
    """

    context: int
    kv_half: bool
    slots: int = 1
    head_tile_ids: int = 0
    guard: int = 0
    barrier_everywhere: bool = False
    eos_count: int = 0
    rewind_budget: int = 64
    kv_bytes: int | None = None
    half_operands: bool = False
    half_values: bool = False
    chunk_rows: tuple[int, ...] = CHUNK_ROWS
    fp32_nodes: frozenset[str] = frozenset()
    keep_values: bool = False
    choices: Choices = DEFAULTS


def chunk_sizes(caps: Caps, context: int, *, half_operands: bool) -> tuple[int, ...]:
    """The usual buckets of prompts for a device and a context."""
    matrices = half_operands and all(meets(caps, need) for need in MATRIX_NEEDS)
    if caps.device_kind != "discrete" or not matrices:
        return CHUNK_ROWS
    return tuple(rows for rows in LARGE_CHUNK_ROWS if rows <= CHUNK_ROWS[-1] or rows < 2 * context)


def kv_kinds(graph: Graph, half: bool) -> tuple[KvKind, ...]:
    """The graph's attention layers grouped by window, KV heads and head size."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for node in graph:
        if node.op == "attention":
            key = (node.attr("window"), node.attr("kv_heads"), node.attr("head_dim"))
            groups.setdefault(key, []).append(node.attr("layer"))
    return tuple(
        KvKind(window, kv_heads, head_dim, tuple(layers), half)
        for (window, kv_heads, head_dim), layers in groups.items()
    )


def weight_sizes(graph: Graph) -> dict[str, int]:
    """Bytes of every weight in its storage type."""
    sizes = {}
    for name, weight in graph.weights.items():
        try:
            sizes[name] = weight_format(weight.dtype).nbytes(weight.shape)
        except FormatError as error:
            raise FormatError(f"weight {name}: {error}") from error
    return sizes


def graph_width(graph: Graph, node: Node) -> int:
    """Numbers of one row of an embedding node."""
    return graph.weights[node.inputs[1]].shape[1]


def build_plan(graph: Graph, caps: Caps, options: PlanOptions) -> Plan:
    """Lower the graph for every bucket and place every activation.

    Raises:
        UnsupportedError, FormatError: an op refuses its shapes on this device.
    """
    return _Planner(graph, caps, options).plan()


class _Planner:
    def __init__(self, graph: Graph, caps: Caps, options: PlanOptions) -> None:
        self.graph = graph
        self.caps = caps
        self.options = options
        self.kinds = kv_kinds(graph, options.kv_half)
        self.table_blocks = ceil_div(options.context, BLOCK_POSITIONS)
        self.weight_bytes = weight_sizes(graph)
        self.layouts = self._kv_layouts()
        self.body_nodes = [n for n in graph if not _depends_on_selection(graph, n)]
        self.tail_nodes = [n for n in graph if _depends_on_selection(graph, n)]
        self.vocabulary = head_ids(graph)

    def plan(self) -> Plan:
        lowered = {
            (kind, rows): self._lower_bucket(kind, rows) for kind, rows in self._bucket_keys()
        }
        ranges: dict[str, LiveRange] = {}
        step = 0
        for body, tails in lowered.values():
            step = _live_ranges(ranges, [body, *tails.values()], step)
        arena = pack(
            list(ranges.values()), guard=self.options.guard, share=not self.options.keep_values
        )
        place = _placer(arena)
        buckets = {}
        for (kind, rows), (body, tails) in lowered.items():
            buckets[kind, rows] = BucketPlan(
                kind,
                rows,
                self._program(body, place),
                {name: self._program(low, place) for name, low in tails.items()},
                {name: low.selected for name, low in tails.items()},
                tuple(site for low in (body, *tails.values()) for site in low.sites),
            )
        layers = len({n.attr("layer") for n in self.graph if n.op == "attention"})
        return Plan(
            buckets,
            arena,
            self.kinds,
            self.table_blocks,
            self.weight_bytes,
            max(1, layers),
            self.vocabulary,
            max((graph_width(self.graph, n) for n in self.graph if n.op == "embedding"), default=1),
            query_heads(self.graph),
            frozenset(
                name
                for body, tails in lowered.values()
                for low in (body, *tails.values())
                for name in low.halves
            ),
        )

    def _bucket_keys(self) -> list[tuple[str, int]]:
        batch = [r for r in BATCH_ROWS if r == 1 or r < 2 * self.options.slots]
        return [("batch", r) for r in batch] + [("chunk", r) for r in self.options.chunk_rows]

    def _program(self, low: Lowering, place: Callable[[Operand], Range]) -> Program:
        found = barriers(low.dispatches, place)
        if self.options.barrier_everywhere:
            found = (True,) * len(found)
        return Program(tuple(low.dispatches), found)

    def _lower_bucket(self, kind: str, rows: int) -> tuple[Lowering, dict[str, Lowering]]:
        prefix = f"{kind}{rows}"
        body = self._lowering(kind, rows, rows, Tail("none"), prefix)
        for node in self.body_nodes:
            self._lower_node(node, body)
        tails = {}
        for tail, selected in self._tails(kind, rows).items():
            low = self._lowering(kind, rows, selected, self._tail(tail, selected), prefix)
            low.buffers, low.halves = dict(body.buffers), set(body.halves)
            for node in self.tail_nodes:
                self._lower_node(node, low)
            tails[tail] = low
        return body, tails

    def _lower_node(self, node: Node, low: Lowering) -> None:
        pinned = node.name in self.options.fp32_nodes
        low.half_operands = self.options.half_operands and not pinned
        registry.op(node.op).lower(node, low)

    def _tails(self, kind: str, rows: int) -> dict[str, int]:
        """Tail kinds of a bucket, with S of each."""
        if kind == "batch":
            return {"argmax": rows, "sample": rows, "logits": rows, "logprob": rows}
        return {"argmax": 1, "sample": 1, "logits": LOGITS_ROWS, "logprob": rows}

    def _tail(self, kind: str, selected: int) -> Tail:
        tile = self.options.head_tile_ids or HEAD_TILE_BYTES // (4 * selected)
        return Tail(kind, max(RUN, tile // RUN * RUN), RING, self.options.eos_count)

    def _lowering(self, kind: str, rows: int, selected: int, tail: Tail, prefix: str) -> Lowering:
        return Lowering(
            self.graph,
            self.caps,
            kind=kind,
            rows=rows,
            selected=selected,
            kv=self.layouts,
            table_blocks=self.table_blocks,
            table_stride=self.table_blocks * len(self.kinds),
            context=self.options.context,
            half_operands=self.options.half_operands,
            half_values=self.options.half_values,
            weight_bytes=self.weight_bytes,
            tail=tail,
            slots=self.options.slots,
            prefix=prefix,
            choices=self.options.choices,
        )

    def _kv_layouts(self) -> dict[int, KvLayout]:
        layouts = {}
        entries = self.table_blocks * len(self.kinds) * self.options.slots
        for k, kind in enumerate(self.kinds):
            first = k * self.table_blocks * 8
            table = Operand("tables", first, entries * 8 - first)
            for index, layer in enumerate(kind.layers):
                layouts[layer] = KvLayout(k, index, kind.kv_heads, kind.head_dim, kind.half, table)
        return layouts


def _depends_on_selection(graph: Graph, node: Node) -> bool:
    shape = graph.values[node.outputs[0]].shape
    return any(isinstance(dim, Affine) and dim == S for dim in shape)


def _live_ranges(ranges: dict[str, LiveRange], lowerings: Sequence[Lowering], step: int) -> int:
    """Add the buffers of a body and its tails; a body's value that a tail reads lives on."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for low in lowerings:
        sizes |= low.buffers
        for dispatch in low.dispatches:
            for operand in (*dispatch.reads, *dispatch.writes):
                if operand.name in low.buffers:
                    first.setdefault(operand.name, step)
                    last[operand.name] = step
            step += 1
    body = lowerings[0]
    for name in body.buffers:
        if any(
            operand.name == name
            for low in lowerings[1:]
            for dispatch in low.dispatches
            for operand in dispatch.reads
        ):
            last[name] = step
    for name, begin in first.items():
        ranges[name] = LiveRange(name, sizes[name], begin, last[name])
    return step + 1


def _placer(arena: Layout) -> Callable[[Operand], Range]:
    def place(operand: Operand) -> Range:
        if operand.name in arena.offsets:
            start = arena.offsets[operand.name] + operand.offset
            return ("arena", start, start + operand.size)
        return (operand.name, operand.offset, operand.offset + operand.size)

    return place
