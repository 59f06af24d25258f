"""What every op file is written against: operands, push-constant blocks, dispatches, lowering.

An op module in this folder provides three functions:

* `infer(graph, node) -> list[Value]`: the shape rule.
* `reference(node, inputs, state) -> list[array]`: the meaning, in float64-capable numpy.
* `lower(node, low) -> None`: kernel choice and dispatch geometry, through `Lowering.emit`.

A node that has no kernel on any device does not get this far: importers refuse it by name.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError
from hornito.graph.graph import CACHE, Graph, Node
from hornito.graph.shapes import S, bind_shape
from hornito.ops.variants import Choices, Site, Variant, pick

if TYPE_CHECKING:
    from hornito.vk.caps import Caps

Array = npt.NDArray[Any]

BLOCK_POSITIONS = 64
"""Positions of one KV block; the kernels hold the same number as `KV_BLOCK`."""

ROW_BYTES = 32
"""Bytes of one row record: token, position, slot, flags, limit, emitted, ring length, free."""

RUN = 1024
"""Ids of one partial record of the head; its tiles are whole runs."""

SAMPLING_BYTES = 64
"""Bytes of a row's sampling parameters (kernels/include/sampling.glsl)."""

MOST_TILES = 1024
"""Tiles of a product whose parts of K join by themselves (digits.comp)."""

MOST_BIASES = 1024
"""Biased ids of a row."""

MOST_TOP = 20
"""Most likely tokens that a step reports."""

HALF_INPUTS, HALF_RESULTS = 30, 31
"""Specialisation of kernels/include/values.glsl: what a dispatch reads, and writes, is fp16."""

ROW_LIVE = 1
ROW_IGNORE_EOS = 2
ROW_EMBEDDED = 4


@dataclass(frozen=True, slots=True)
class Operand:
    """A byte range of a named buffer: a value, a weight, scratch, or a plan-level buffer."""

    name: str
    offset: int
    size: int

    def part(self, offset: int, size: int) -> Operand:
        """A range inside this one."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"{self.name}: [{offset}, {offset + size}) lies outside {self.size}")
        return Operand(self.name, self.offset + offset, size)


_SIZES = {"u64": 8, "u32": 4, "i32": 4, "f32": 4}
_CODES = {"u64": "Q", "u32": "I", "i32": "i", "f32": "f"}


class Push:
    """A push-constant block, declared as `"x:u64 rows:u32 eps:f32"` in the kernel's order.

    64-bit fields hold device addresses and come first, so that natural alignment leaves no holes.
    """

    def __init__(self, text: str) -> None:
        self.fields = [tuple(item.split(":")) for item in text.split()]
        kinds = [kind for _, kind in self.fields]
        if kinds != sorted(kinds, key=lambda kind: kind != "u64"):
            raise ValueError(f"64-bit fields must come first: {text}")
        self.size = sum(_SIZES[kind] for kind in kinds)
        if self.size > 128:
            raise ValueError(f"{self.size} bytes of push constants; the baseline has 128")
        self._packer = struct.Struct("<" + "".join(_CODES[kind] for kind in kinds))

    def offsets(self) -> dict[str, int]:
        """Byte offset of every field, for the test against SPIR-V."""
        result, at = {}, 0
        for name, kind in self.fields:
            result[name] = at
            at += _SIZES[kind]
        return result

    def pack(self, values: Sequence[int | float]) -> bytes:
        """The block's bytes."""
        return self._packer.pack(*values)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One kernel launch with the ranges it reads and writes.

    `args` follow `push.fields`; an `Operand` stands for its device address. `full_subgroups` says
    that the kernel counts on every subgroup being full.
    """

    kernel: str
    push: Push
    args: tuple[Operand | int | float, ...]
    groups: tuple[int, int, int]
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    node: str
    spec: Mapping[int, int] = field(default_factory=dict)
    full_subgroups: bool = False

    @property
    def pipeline_key(self) -> tuple[str, tuple[tuple[int, int], ...]]:
        """What tells pipelines apart: the kernel and its specialisation."""
        return self.kernel, tuple(sorted(self.spec.items()))


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Where one layer's keys and values lie inside a block of its kind.

    A block is `[layer][K, V][kv_head][64][head_dim]`; `layer` counts within the kind.
    """

    kind: int
    layer: int
    kv_heads: int
    head_dim: int
    half: bool
    table: Operand

    @property
    def element_bytes(self) -> int:
        return 2 if self.half else 4

    @property
    def layer_bytes(self) -> int:
        """Bytes of this layer's keys and values in one block."""
        return 2 * self.kv_heads * BLOCK_POSITIONS * self.head_dim * self.element_bytes


@dataclass(frozen=True, slots=True)
class Tail:
    """What a plan computes behind the body: `none`, `argmax`, `sample`, `logits` or `logprob`.

    `tile_ids` bounds the ids of one head tile, `ring` is the records kept per row, `eos_count` how
    many ids end an answer.
    """

    kind: str
    tile_ids: int = 1 << 20
    ring: int = 1
    eos_count: int = 0


class Lowering:
    """Collects the dispatches of one plan bucket.

    Attributes:
        caps: what the device can do.
        kind: `chunk` (all rows of one slot, contiguous positions) or `batch` (a row per slot).
        rows: the bucket's row count, the value of the symbol T.
        selected: rows whose output is wanted, the value of the symbol S.
        table_blocks: entries of one block table.
        table_stride: entries from one slot's table to the next slot's.
        context: positions that a slot can hold; some models choose their RoPE by it.
        slots: sequences that have token counts.
        half_operands: whether matrix products may round their operands to fp16.
        half_values: whether values are fp16 in memory (those of a head, the logits, never are).
        tail: what the head is reduced to.
        sites: the choices among variants that were made.
        buffers: bytes of each arena buffer.
        halves: those of them that hold values as fp16.
    """

    def __init__(
        self,
        graph: Graph,
        caps: Caps,
        *,
        kind: str,
        rows: int,
        selected: int,
        kv: Mapping[int, KvLayout],
        table_blocks: int,
        weight_bytes: Mapping[str, int],
        tail: Tail,
        table_stride: int | None = None,
        context: int | None = None,
        slots: int = 1,
        half_operands: bool = False,
        half_values: bool = False,
        prefix: str = "",
        choices: Choices | None = None,
    ) -> None:
        self.graph = graph
        self.caps = caps
        self.kind = kind
        self.rows = rows
        self.selected = selected
        self.kv = kv
        self.table_blocks = table_blocks
        self.tail = tail
        self.table_stride = table_blocks if table_stride is None else table_stride
        self.context = table_blocks * BLOCK_POSITIONS if context is None else context
        self.slots = slots
        self.half_operands = half_operands
        self.half_values = half_values
        self._weight_bytes = weight_bytes
        self._prefix = prefix
        self._choices = choices or Choices()
        self._logits = {name for n in graph if n.op == "head" for name in n.outputs}
        self.dispatches: list[Dispatch] = []
        self.sites: list[Site] = []
        self.buffers: dict[str, int] = {}
        self.halves: set[str] = set()

    @property
    def symbols(self) -> dict[str, int]:
        return {"T": self.rows, "S": self.selected}

    @property
    def row_records(self) -> Operand:
        """The row records of the call, `ROW_BYTES` each."""
        return Operand("rows", 0, self.rows * ROW_BYTES)

    def embedded(self, width: int) -> Operand:
        """Rows that the host gave as embeddings instead of ids, `[T, width]` fp32."""
        return Operand("embedded", 0, self.rows * width * 4)

    @property
    def selection(self) -> Operand:
        """Indices of the rows whose output is wanted, 32-bit."""
        return Operand("selection", 0, self.selected * 4)

    @property
    def call(self) -> Operand:
        """The call header: live rows (word 0), live selected rows (word 1)."""
        return Operand("call", 0, 16)

    @property
    def next_ids(self) -> Operand:
        """Given next ids of the selected rows, 32-bit (`logprob`)."""
        return Operand("next_ids", 0, self.selected * 4)

    @property
    def eos(self) -> Operand:
        """The ids that end an answer, 32-bit."""
        return Operand("eos", 0, max(1, self.tail.eos_count) * 4)

    @property
    def records(self) -> Operand:
        """What a tail tells the host: `ring` records of 16 bytes for every selected row."""
        return Operand("records", 0, self.selected * self.tail.ring * 16)

    @property
    def sampling(self) -> Operand:
        """Sampling parameters of the selected rows (`sample`)."""
        return Operand("sampling", 0, self.selected * SAMPLING_BYTES)

    @property
    def biases(self) -> Operand:
        """Biased ids of the selected rows: id and fp32 bias (`sample`)."""
        return Operand("biases", 0, self.selected * MOST_BIASES * 8)

    @property
    def counts(self) -> Operand:
        """How often each slot's sequence has each id, 32-bit `[slots, V]` (`sample`)."""
        return Operand("counts", 0, self.slots * self.vocabulary * 4)

    @property
    def counters(self) -> Operand:
        """32-bit counters for workgroups that join what others did, zero between dispatches."""
        return Operand("counters", 0, counter_bytes(self.rows, query_heads(self.graph)))

    @property
    def top(self) -> Operand:
        """The most likely tokens of each record: id and fp32 log-probability (`sample`)."""
        return Operand("top", 0, self.selected * self.tail.ring * MOST_TOP * 8)

    @property
    def vocabulary(self) -> int:
        """Ids of the head."""
        return head_ids(self.graph)

    @property
    def given_logprob(self) -> Operand:
        """Log-probabilities of the given next ids, fp32 (`logprob`)."""
        return Operand("given_logprob", 0, self.selected * 4)

    def live_word(self, name: str) -> int:
        """Which word of the call header counts the live rows of the value `name`."""
        return 1 if self.graph.shape(name)[0] == S else 0

    def shape(self, name: str) -> tuple[int, ...]:
        """The bound shape of a value or weight."""
        return bind_shape(self.graph.shape(name), self.symbols)

    def weight_dtype(self, name: str) -> str:
        """The storage type of a weight."""
        return self.graph.weights[name].dtype

    def operand(self, name: str) -> Operand:
        """The whole of a value, weight or graph input."""
        if name in self.graph.weights:
            return Operand(name, 0, self._weight_bytes[name])
        value = self.graph.values[name]
        if value.dtype == CACHE:
            raise ValueError(f"{name} is a cache token, not data")
        count = int(np.prod(self.shape(name), dtype=np.int64))
        of_tail = self.live_word(name) == 1
        if name in self._logits:
            return self._buffer(name, count * 4, of_tail)
        return self._values(name, count, of_tail)

    def scratch(self, node: Node, label: str, size: int) -> Operand:
        """Bytes that live only between the dispatches of one node."""
        return self._buffer(f"{node.name}:{label}", size, node.op == "head")

    def scratch_values(self, node: Node, label: str, count: int) -> Operand:
        """The same for `count` numbers that are stored as values are."""
        return self._values(f"{node.name}:{label}", count, node.op == "head")

    def _values(self, name: str, count: int, of_tail: bool) -> Operand:
        """A buffer of `count` numbers as fp32, or as fp16 in whole words."""
        if not self.half_values:
            return self._buffer(name, count * 4, of_tail)
        operand = self._buffer(name, ceil_div(count, 2) * 4, of_tail)
        self.halves.add(operand.name)
        return operand

    def _buffer(self, name: str, size: int, of_tail: bool) -> Operand:
        """An arena buffer of this bucket; those of a tail are apart from other tails'."""
        full = f"{self._prefix}/{name}" + (f"@{self.tail.kind}" if of_tail else "")
        if self.buffers.setdefault(full, size) != size:
            raise ValueError(f"{full}: {size} bytes, declared as {self.buffers[full]}")
        return Operand(full, 0, size)

    def _half(self, operands: Sequence[Operand]) -> int:
        """Whether there are values among them that are fp16, as a specialisation value."""
        return int(any(operand.name in self.halves for operand in operands))

    def cache(self, layer: int) -> Operand:
        """The range that stands for a layer's KV cache in hazard tracking."""
        return Operand(f"kv:{layer}", 0, 1)

    def choose(self, node: Node, key: str, variants: Sequence[Variant]) -> Variant:
        """The variant to launch, of a list in order of preference that ends in a plain twin.

        Args:
            key: op, shapes and storage type: nodes of one key have the same choice.

        Raises:
            UnsupportedError: the device admits none.
        """
        key += ", fp16 values" if self.half_values else ""
        site = pick(key, node.name, variants, self.caps, self._choices)
        self.sites.append(site)
        return site.taken

    def emit(
        self,
        node: Node,
        kernel: str,
        push: Push,
        args: Sequence[Operand | int | float],
        groups: tuple[int, int, int],
        *,
        reads: Sequence[Operand],
        writes: Sequence[Operand],
        spec: Mapping[int, int] | None = None,
        full_subgroups: bool = False,
    ) -> None:
        """Append a dispatch; its grid is checked against the device's limits.

        Whether it reads and writes values as fp16 is added to the specialisation.
        """
        if len(args) != len(push.fields):
            raise ValueError(f"{kernel}: {len(args)} arguments for {len(push.fields)} fields")
        for count, limit in zip(groups, self.caps.max_workgroup_count, strict=True):
            if not 0 < count <= limit:
                raise FormatError(
                    f"node {node.name}: {kernel} needs {groups} workgroups; the device allows "
                    f"{tuple(self.caps.max_workgroup_count)}"
                )
        self.dispatches.append(
            Dispatch(
                kernel,
                push,
                tuple(args),
                groups,
                tuple(reads),
                tuple(writes),
                node.name,
                {HALF_INPUTS: self._half(reads), HALF_RESULTS: self._half(writes), **(spec or {})},
                full_subgroups,
            )
        )


def head_ids(graph: Graph) -> int:
    """Ids of the graph's head; 1 without a head."""
    return max((graph.weights[n.inputs[1]].shape[0] for n in graph if n.op == "head"), default=1)


def counter_bytes(rows: int, heads: int) -> int:
    """Bytes of `Lowering.counters`: for rows and query heads, or for tiles of a product."""
    return max(rows * heads, MOST_TILES) * 4


def query_heads(graph: Graph) -> int:
    """The most query heads of a layer; 1 without attention."""
    return max((n.attr("heads") for n in graph if n.op == "attention"), default=1)


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def present(inputs: Sequence[Array | None], count: int) -> list[Array]:
    """The first `count` inputs of a reference, none of which may be absent."""
    found = [array for array in inputs[:count] if array is not None]
    if len(found) != count:
        raise ValueError(f"an input among the first {count} is absent")
    return found
