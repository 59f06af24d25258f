"""Runs a small graph on a device and watches every byte around it.

All buffers of a run lie in one image that starts as NaN: values, scratch, weights, rows, tables and
KV blocks, each between guard bands. The NaNs of every place differ, so that one that was carried
elsewhere shows. The image runs three times; every bit of it must come out the same, and nothing may
differ from the start but what the dispatches declare to write.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hornito.graph.graph import CACHE, Graph
from hornito.graph.reference import ReferenceState, evaluate
from hornito.graph.shapes import S, T
from hornito.graph.weights import ArrayData
from hornito.ops import registry
from hornito.ops.base import (
    ROW_EMBEDDED,
    ROW_IGNORE_EOS,
    ROW_LIVE,
    Array,
    Dispatch,
    KvLayout,
    Lowering,
    Operand,
    Tail,
)
from hornito.ops.kernels import load_spirv
from hornito.ops.variants import DEFAULTS, Choices
from hornito.plan.hazards import Range, barriers
from hornito.plan.plan import weight_sizes
from hornito.quant.formats import weight_format
from hornito.quant.storage import pack, plain, unpack
from hornito.vk.caps import Caps, CoopMat
from hornito.vk.device import Device
from hornito.vk.memory import Buffer
from hornito.vk.record import Recorder
from ops.kv_pool import POISON, KvPool

Words = npt.NDArray[np.uint32]


def stored_bytes(array: Array, dtype: str) -> Array:
    """A weight as memory holds it; bytes are taken to be that already.

    Plain numbers need not be finite, as they must be in a package.
    """
    if array.dtype == np.uint8:
        return array
    fmt, values = weight_format(dtype), array.astype(np.float32)
    if not fmt.quantised:
        return np.frombuffer(plain(fmt, values).tobytes(), np.uint8)
    pieces = pack(fmt, ArrayData(values))
    return np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])


def stored_values(array: Array, dtype: str, shape: tuple[int, ...] | None = None) -> Array:
    """The numbers that a kernel should find in it; `shape` is needed for bytes."""
    return unpack(weight_format(dtype), stored_bytes(array, dtype), shape or array.shape)


GUARD = 1024
"""Poisoned bytes before and after every buffer."""

REPEATS = 3

PLACEHOLDER = "placeholder"
"""Where arguments point that a dispatch neither reads nor writes: poison, never to change."""


def poison(count: int) -> Words:
    """NaNs, as fp32 and in both halves as fp16, whose payload tells their place."""
    at = np.arange(count, dtype=np.uint32)
    words = (0x7FC0 | (at >> 8) & 0x3F) << 16 | 0x7E00 | at & 0xFF | 1
    return words.astype(np.uint32)


def device_class(caps: Caps, name: str) -> Caps:
    """The device as one of the classes that kernels are chosen by.

    `software` is a CPU driver with subgroups, `plain` one without, `gpu` hardware with the device's
    own subgroups, `dot_gpu` such with fast integer dot products, `bare_gpu` one without subgroups,
    `matrix_gpu` one with subgroups of 32 and cooperative matrices, and `small_grid` one that allows
    few workgroups.
    """
    none = {
        "subgroup_size": 1,
        "subgroup_min": 1,
        "subgroup_max": 1,
        "subgroup_ops": frozenset(),
        "subgroup_in_compute": False,
    }
    if name == "gpu":
        return replace(caps, device_kind="discrete", has_fast_dot_product=False)
    if name == "dot_gpu":
        return replace(
            caps,
            device_kind="discrete",
            has_fast_dot_product=True,
            shared_memory_bytes=max(32768, caps.shared_memory_bytes),
            max_workgroup_invocations=max(256, caps.max_workgroup_invocations),
        )
    if name == "small_grid":
        return replace(caps, device_kind="discrete", max_workgroup_count=(20, 65535, 65535))
    if name == "matrix_gpu":
        return replace(
            caps,
            device_kind="discrete",
            subgroup_size=32,
            subgroup_min=32,
            subgroup_max=32,
            subgroup_ops=caps.subgroup_ops | {"basic", "shuffle"},
            has_full_subgroups=True,
            max_workgroup_invocations=1024,
            shared_memory_bytes=49152,
            has_float16=True,
            coopmat=(CoopMat(16, 16, 16, "f16", "f16", "f32", "f32", False),),
        )
    if name == "bare_gpu":
        return replace(caps, device_kind="discrete", **none)
    if name == "plain":
        return replace(caps, device_kind="software", **none)
    if name != "software":
        raise ValueError(name)
    return replace(caps, device_kind="software")


def rows_of(
    positions: Sequence[int],
    *,
    bucket: int = 0,
    tokens: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    inactive: Sequence[int] = (),
    ignore_eos: Sequence[int] = (),
    embedded: Sequence[int] = (),
    limits: Sequence[int] | None = None,
    emitted: Sequence[int] | None = None,
) -> Words:
    """Row records `[bucket, 8]`; those past the positions, and inactive ones, hold nonsense."""
    count = len(positions)
    rows = np.full((max(bucket, count), 8), 0xFFFFFFF0, np.uint32)
    rows[:, 3] = 0
    for r, position in enumerate(positions):
        flags = ROW_LIVE | (ROW_IGNORE_EOS if r in ignore_eos else 0)
        if r in embedded:
            flags |= ROW_EMBEDDED
        if r in inactive:
            flags &= ~ROW_LIVE
        rows[r] = (
            tokens[r] if tokens is not None else 0,
            position,
            slots[r] if slots is not None else 0,
            flags,
            limits[r] if limits is not None else 1 << 30,
            emitted[r] if emitted is not None else 0,
            0,
            0,
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a graph on the device.

    Attributes:
        inputs: float inputs of the graph, rows up to the bucket's; missing rows are poison.
        weights: by name, in fp32, rounded to the graph's storage type; or the stored bytes, uint8.
        rows: row records, see `rows_of`; the bucket is their number.
        live: rows in the call header (default: up to the last live record).
        selection: rows whose output is wanted; padded to `selected` with row 0.
        device: see `device_class`.
        padding: whether rows past the live ones must stay as they were.
        slots: sequences that have token counts.
        state: contents of the plan's other buffers, by name (`embedded`; those of `sample`).
        context: positions that the plan allows; the block table's by default.
        half_operands: whether matrix products may round their operands.
        half_values: whether values are stored as fp16; inputs are rounded to it.
        allow_nan: whether live results may hold NaN.
        choices: what departs from the default variants.
    """

    graph: Graph
    rows: Words
    inputs: Mapping[str, Array] = field(default_factory=dict)
    weights: Mapping[str, Array] = field(default_factory=dict)
    kind: str = "chunk"
    live: int = -1
    selection: Sequence[int] = ()
    selected: int = 0
    tail: Tail = field(default_factory=lambda: Tail("none"))
    kv: KvPool | None = None
    table_stride: int = 0
    next_ids: Sequence[int] = ()
    eos: Sequence[int] = ()
    slots: int = 1
    half_operands: bool = False
    half_values: bool = False
    state: Mapping[str, Array] = field(default_factory=dict)
    context: int = 0
    device: str = "software"
    padding: bool = True
    allow_nan: bool = False
    barrier_everywhere: bool = False
    choices: Choices = DEFAULTS

    @property
    def live_rows(self) -> int:
        if self.live >= 0:
            return self.live
        flagged = np.flatnonzero(self.rows[:, 3] & ROW_LIVE)
        return int(flagged[-1]) + 1 if len(flagged) else 0

    @property
    def bucket_selected(self) -> int:
        return max(1, self.selected, len(self.selection))

    def expected(self, state: ReferenceState | None = None) -> dict[str, Array]:
        """Outputs of the live rows by the numpy evaluator, in float64."""
        live = self.live_rows
        inputs: dict[str, Array] = {
            "ids": self.rows[:live, 0].astype(np.int64),
            "positions": self.rows[:live, 1].astype(np.int64),
            "selection": np.asarray(self.selection, np.int64),
        }
        for name, value in self.graph.inputs.items():
            if value.dtype == CACHE:
                inputs[name] = np.zeros(0)
            elif name in self.inputs:
                count = len(self.selection) if value.shape[0] == S else live
                stored = np.float16 if self.half_values else np.float32
                inputs[name] = self.inputs[name][:count].astype(stored).astype(np.float64)
        rounded: dict[str, Array] = {}
        for name, array in self.weights.items():
            weight = self.graph.weights[name]
            rounded[name] = stored_values(array, weight.dtype, weight.shape)
        state = state or ReferenceState()
        state.context = self.context
        return evaluate(self.graph, inputs, rounded, state, keep=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left behind."""

    call: Call
    low: Lowering
    image: Words
    places: Mapping[str, tuple[int, int]]
    blocks: KvPool | None

    @property
    def dispatches(self) -> list[Dispatch]:
        return self.low.dispatches

    @property
    def kernels(self) -> list[str]:
        return [d.kernel for d in self.low.dispatches]

    def words(self, operand: Operand) -> Words:
        """The words of an operand."""
        start = self.places[operand.name][0] + operand.offset
        return self.image[start // 4 : (start + operand.size) // 4]

    def all_rows(self, name: str) -> Array:
        """A value `[bucket rows, width]` as it is stored."""
        shape, operand = self.low.shape(name), self.low.operand(name)
        dtype = np.float16 if operand.name in self.low.halves else np.float32
        return self.words(operand).view(dtype)[: math.prod(shape)].reshape(shape)

    def value(self, name: str) -> Array:
        """A value's live rows."""
        selected = self.low.live_word(name) == 1
        count = len(self.call.selection) if selected else self.call.live_rows
        return self.all_rows(name)[:count]

    @property
    def rows(self) -> Words:
        return self.words(self.low.row_records).reshape(-1, 8)

    @property
    def records(self) -> Words:
        """`[S, ring, 4]`."""
        return self.words(self.low.records).reshape(self.low.selected, -1, 4)

    @property
    def given_logprob(self) -> Array:
        return self.words(self.low.given_logprob).view(np.float32)


def lower(call: Call, caps: Caps) -> Lowering:
    """The call's graph as dispatches, without a device."""
    kv: dict[int, KvLayout] = {}
    table_blocks, slots = 1, 1
    if call.kv is not None:
        slots, table_blocks = call.kv.table.shape
        stride = call.table_stride or table_blocks
        table = Operand("tables", 0, slots * stride * 8)
        layers = {n.attr("layer") for n in call.graph if "layer" in n.attrs}
        kv = {layer: call.kv.layout(table, layer) for layer in layers}
    low = Lowering(
        call.graph,
        device_class(caps, call.device),
        kind=call.kind,
        rows=len(call.rows),
        selected=call.bucket_selected,
        kv=kv,
        table_blocks=table_blocks,
        table_stride=call.table_stride or None,
        context=call.context or None,
        weight_bytes=weight_sizes(call.graph),
        tail=call.tail,
        slots=call.slots,
        half_operands=call.half_operands,
        half_values=call.half_values,
        choices=call.choices,
    )
    for node in call.graph:
        registry.op(node.op).lower(node, low)
    return low


class Bench:
    """A device with one buffer that every image is copied into."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._buffer: Buffer | None = None

    def run(self, call: Call, repeats: int = REPEATS) -> Outcome:
        """Run the call three times from the same start and check everything that holds for all."""
        low = lower(call, self.device.caps)
        image, places = _lay_out(call, low)
        buffer = self._hold(image.nbytes)
        start = image.copy()
        _write_tables(call, start, places, buffer.address)
        recording = self._record(low, places, buffer, everywhere=call.barrier_everywhere)
        after = self._submit(recording, buffer, start)
        for _ in range(repeats - 1):
            again = self._submit(recording, buffer, start)
            assert np.array_equal(after, again), f"{_where(after != again, places)} not repeatable"
        recording.free()
        outcome = Outcome(call, low, after, places, _pool_after(call, after, places))
        _check_writes(low, start, after, places)
        _check_rows(outcome, start)
        return outcome

    def steps(self, call: Call, count: int) -> Outcome:
        """Run the call `count` times in one submission, each on what the one before left."""
        low = lower(call, self.device.caps)
        image, places = _lay_out(call, low)
        buffer = self._hold(image.nbytes)
        recording = self._record(low, places, buffer, everywhere=call.barrier_everywhere)
        self.device.upload([(buffer, 0, image)])
        self.device.wait(self.device.submit([recording] * count), timeout_s=300)
        after = np.frombuffer(self.device.download(buffer, 0, image.nbytes), np.uint32)
        recording.free()
        return Outcome(call, low, after, places, None)

    def _hold(self, size: int) -> Buffer:
        if self._buffer is None or self._buffer.size < size:
            if self._buffer is not None:
                self._buffer.free()
            self._buffer = self.device.allocate(max(size, 1 << 24), "device", "op tests")
            assert self._buffer.address % 256 == 0
        return self._buffer

    def _record(
        self,
        low: Lowering,
        places: Mapping[str, tuple[int, int]],
        buffer: Buffer,
        *,
        everywhere: bool,
    ) -> Recorder:
        recording = self.device.command_buffer("op test")
        needed = barriers(low.dispatches, lambda o: _range(o, places))
        for dispatch, barrier in zip(low.dispatches, needed, strict=True):
            if barrier or everywhere:
                recording.barrier()
            pipeline = self.device.pipeline(
                load_spirv(dispatch.kernel),
                name=dispatch.kernel,
                spec=dispatch.spec,
                push_size=dispatch.push.size,
                full_subgroups=dispatch.full_subgroups,
            )
            values = [_number(arg, dispatch, places, buffer) for arg in dispatch.args]
            recording.dispatch(pipeline, dispatch.push.pack(values), dispatch.groups)
        recording.end()
        return recording

    def _submit(self, recording: Recorder, buffer: Buffer, start: Words) -> Words:
        self.device.upload([(buffer, 0, start)])
        self.device.wait(self.device.submit([recording]), timeout_s=120)
        return np.frombuffer(self.device.download(buffer, 0, start.nbytes), np.uint32)


def _number(
    arg: Operand | int | float,
    dispatch: Dispatch,
    places: Mapping[str, tuple[int, int]],
    buffer: Buffer,
) -> int | float:
    """An argument as it goes into the push block; undeclared operands get the placeholder."""
    if not isinstance(arg, Operand):
        return arg
    declared = {o.name for o in (*dispatch.reads, *dispatch.writes)}
    if arg.name not in declared:
        return buffer.address + places[PLACEHOLDER][0]
    return buffer.address + places[arg.name][0] + arg.offset


def _range(operand: Operand, places: Mapping[str, tuple[int, int]]) -> Range:
    if operand.name.startswith("kv:"):
        return (operand.name, 0, 1)
    start = places[operand.name][0] + operand.offset
    return ("image", start, start + operand.size)


def _lay_out(call: Call, low: Lowering) -> tuple[Words, dict[str, tuple[int, int]]]:
    """The image with its contents, and where every buffer lies: name to (offset, size)."""
    contents = _contents(call, low)
    sizes = {
        o.name: 0 for d in low.dispatches for o in (*d.reads, *d.writes) if o.name[:3] != "kv:"
    }
    for dispatch in low.dispatches:
        for operand in (*dispatch.reads, *dispatch.writes):
            if operand.name in sizes:
                end = operand.offset + operand.size
                sizes[operand.name] = max(sizes[operand.name], end)
    sizes |= {name: data.nbytes for name, data in contents.items()}
    sizes |= {name: size for name, size in low.buffers.items() if name not in contents}
    sizes[PLACEHOLDER] = 4096
    places: dict[str, tuple[int, int]] = {}
    at = GUARD
    for name, size in sizes.items():
        places[name] = (at, size)
        at = -(-(at + size) // 256) * 256 + GUARD
    image = poison(at // 4)
    raw = image.view(np.uint8)
    for name, data in contents.items():
        start = places[name][0]
        raw[start : start + data.nbytes] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    return image, places


def _contents(call: Call, low: Lowering) -> dict[str, Array]:
    """What is in memory before the call, by buffer name."""
    found: dict[str, Array] = {
        "rows": call.rows,
        "call": np.array([call.live_rows, len(call.selection), POISON, POISON], np.uint32),
    }
    if call.selection:
        padded = [*call.selection, *([0] * (low.selected - len(call.selection)))]
        found["selection"] = np.array(padded, np.uint32)
    if call.next_ids:
        found["next_ids"] = np.array(call.next_ids, np.uint32)
    if call.eos:
        found["eos"] = np.array(call.eos, np.uint32)
    found["counters"] = np.zeros(low.counters.size // 4, np.uint32)
    found |= call.state
    for name, array in call.weights.items():
        weight = call.graph.weights[name]
        assert array.shape == weight.shape or array.dtype == np.uint8
        found[name] = stored_bytes(array, weight.dtype)
    for name, array in call.inputs.items():
        operand = low.operand(name)
        dtype = np.float16 if call.half_values else np.float32
        padded_rows = poison(operand.size // 4).view(dtype)
        padded_rows[: array.size] = array.reshape(-1)
        found[operand.name] = padded_rows
    if call.kv is not None:
        slots, blocks = call.kv.table.shape
        found["tables"] = np.zeros((slots, call.table_stride or blocks, 2), np.uint32)
        found["pool"] = call.kv.data
    return found


def _write_tables(
    call: Call, image: Words, places: Mapping[str, tuple[int, int]], address: int
) -> None:
    """Addresses of the KV blocks, once the buffer's own address is known."""
    if call.kv is None:
        return
    blocks = address + places["pool"][0] + call.kv.table * call.kv.block_bytes
    unowned = address + places["pool"][0]
    slots, count = call.kv.table.shape
    table = np.full((slots, call.table_stride or count), unowned, np.uint64)
    table[:, :count] = blocks.astype(np.uint64)
    start = places["tables"][0] // 4
    image[start : start + 2 * table.size] = table.view(np.uint32).reshape(-1)


def _pool_after(call: Call, image: Words, places: Mapping[str, tuple[int, int]]) -> KvPool | None:
    if call.kv is None:
        return None
    start, size = places["pool"]
    twin = call.kv.copy()
    words = image[start // 4 : (start + size) // 4]
    twin.data = words.view(call.kv.dtype).reshape(call.kv.data.shape)
    return twin


def _check_writes(
    low: Lowering, start: Words, after: Words, places: Mapping[str, tuple[int, int]]
) -> None:
    """Nothing changed but the ranges that some dispatch declares to write."""
    allowed = np.zeros(len(start), bool)
    for dispatch in low.dispatches:
        for operand in dispatch.writes:
            if operand.name.startswith("kv:"):
                first, size = places["pool"]
            else:
                first, size = places[operand.name][0] + operand.offset, operand.size
            allowed[first // 4 : (first + size) // 4] = True
    wrong = (start != after) & ~allowed
    assert not wrong.any(), f"undeclared writes at {_where(wrong, places)}"


def _where(wrong: npt.NDArray[np.bool_], places: Mapping[str, tuple[int, int]]) -> str:
    """The first wrong word, as the distance from the buffer before it."""
    at = int(np.flatnonzero(wrong)[0]) * 4
    name = max((n for n in places if places[n][0] <= at), key=lambda n: places[n][0])
    start, size = places[name]
    return f"{name} + {at - start} of {size} bytes ({int(wrong.sum())} words)"


def _check_rows(outcome: Outcome, start: Words) -> None:
    """Live rows of every result are numbers; all others are as they were."""
    call = outcome.call
    before = replace(outcome, image=start)
    for node in call.graph:
        for name in node.outputs:
            value = call.graph.values[name]
            if value.dtype == CACHE or value.shape[0] not in (T, S):
                continue
            if outcome.low.operand(name).name not in outcome.places:
                continue  # the head's logits under a tail that does not store them
            if node.op == "head" and call.tail.kind != "logits":
                continue
            live = len(outcome.value(name))
            if not call.allow_nan:
                active = _active_rows(call, name, live, selected=value.shape[0] == S)
                bad = np.isnan(outcome.all_rows(name)[active])
                assert not bad.any(), f"{name}: {int(bad.sum())} of {bad.size} values are NaN"
            if call.padding:
                rest, untouched = (bits(o.all_rows(name)[live:]) for o in (outcome, before))
                assert np.array_equal(rest, untouched), f"{name}: rows past {live} were written"


def bits(array: Array) -> Array:
    """The bits of fp32 or fp16 numbers."""
    return array.view(np.uint16 if array.dtype == np.float16 else np.uint32)


def _active_rows(call: Call, name: str, live: int, *, selected: bool) -> npt.NDArray[np.int64]:
    """Rows of a result that must hold numbers: those whose record is live."""
    if selected:
        return np.arange(live)
    return np.flatnonzero(call.rows[:live, 3] & ROW_LIVE)


def assert_close(found: Array, expected: Array, bound: Array | float) -> None:
    """|found - expected| <= bound elementwise, with the worst ratio in the message."""
    error = np.abs(found.astype(np.float64) - expected)
    bound = np.broadcast_to(np.asarray(bound, np.float64), error.shape)
    good = error <= bound
    if good.all():
        return
    ratio = np.where(good, 0.0, error / np.maximum(bound, 1e-300))
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    raise AssertionError(
        f"{int((~good).sum())} of {error.size} values differ; worst at {worst}: {found[worst]} "
        f"against {expected[worst]}, bound {bound[worst]:.3g}"
    )
