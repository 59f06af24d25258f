"""GPU time by kernel, from timestamps around every dispatch of a second, timed recording."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hornito.diag.bench import GATHERS, prompt_ids
from hornito.errors import UsageError
from hornito.ops import add
from hornito.ops.base import HALF_INPUTS, HALF_RESULTS, Dispatch, ceil_div
from hornito.ops.kernels import load_spirv
from hornito.plan.recording import SEGMENT_DISPATCHES, record_timed
from hornito.progress import NullProgress, Progress
from hornito.runtime.rows import chunk_bytes
from hornito.runtime.session import Session
from hornito.streaming import telling
from hornito.vk.timing import keep_busy

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.vk.device import Device
    from hornito.vk.memory import Buffer
    from hornito.vk.record import Recorder

COPY_BYTES, COPY_WIDTH = 128 << 20, 1 << 14
"""Bytes of a buffer whose copies are timed, and numbers of a row of it."""

REPEATS = 5


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel in one role: its GPU time in a call, its launches, and the bytes it declares.

    `gbps` counts each declared byte of operands once, and of a gathered table only what was taken;
    KV caches are not counted.
    """

    kernel: str
    role: str
    milliseconds: float
    launches: int
    gbps: float


@dataclass(frozen=True, slots=True)
class Profile:
    """One call (`chunk 256`, `batch 1`): its kernels, slowest first.

    Every dispatch is followed by a barrier here, so the sum is more than a call takes.
    """

    call: str
    depth: int
    milliseconds: float
    kernels: tuple[KernelTime, ...]
    events: tuple[tuple[str, str, float, float], ...]

    def to_dict(self, copy_gbps: float) -> dict[str, Any]:
        """As plain JSON types, without the events; `of_copy` is each kernel's part of the speed of
        a copy on the device."""
        data = asdict(self)
        del data["events"]
        for row in data["kernels"]:
            row["of_copy"] = row["gbps"] / copy_gbps
        return data


def profile(llm: LLM, depth: int, progress: Progress | None = None) -> list[Profile]:
    """Profiles of the largest chunk that ends at `depth` tokens, and of one step behind them.

    Args:
        progress: told about the prompt, and about each timed run.

    Raises:
        UsageError: the step does not fit the context.
    """
    engine = llm.engine
    largest = max(rows for _, rows in engine.plan.buckets if rows < llm.context)
    if max(depth, largest) >= llm.context:
        raise UsageError(
            f"a step behind {max(depth, largest)} tokens does not fit the context of "
            f"{llm.context}; give --depth {llm.context - 1} or less, or --context more"
        )
    ids = prompt_ids(max(depth, largest) + 1, engine.vocabulary)
    with Session(engine) as session:
        before = max(0, depth - largest) // largest * largest
        progress = progress or NullProgress()
        with telling(progress, before + largest) as tell:
            if before:
                session.prefill(ids[:before], evaluated=tell)
            session.prefill(ids[before : before + largest], evaluated=tell)
        found = []
        if largest > 1:
            found.append(_timed(llm, "chunk", largest, session, progress))
        session.step(ids[-1])
        found.append(_timed(llm, "batch", 1, session, progress))
    return found


def copy_bandwidth(device: Device) -> float:
    """GB/s of a large copy, reads and writes both counted.

    It is that of a copy command or of the kernel that adds two vectors, whichever is faster: copy
    commands take a path of their own on some GPUs (an H200's kernels read five times as fast).

    Raises:
        DeviceMemoryError: there is no room for three buffers of `COPY_BYTES`.
    """
    held: list[Buffer] = []

    def allocate(size: int) -> Buffer:
        held.append(device.allocate(size, "device", "bandwidth"))
        return held[-1]

    try:
        a, b, result = (allocate(COPY_BYTES) for _ in range(3))
        call = allocate(4)
        rows = COPY_BYTES // 4 // COPY_WIDTH
        device.upload([(call, 0, struct.pack("<I", rows))])
        values = (a.address, b.address, result.address, call.address, COPY_WIDTH)
        pipeline = device.pipeline(
            load_spirv("add/add.default"),
            name="add/add.default",
            spec={HALF_INPUTS: 0, HALF_RESULTS: 0},
            push_size=add.PUSH.size,
        )

        def copy(recorder: Recorder) -> None:
            recorder.copy(a, 0, result, 0, COPY_BYTES)

        def sums(recorder: Recorder) -> None:
            recorder.dispatch(pipeline, add.PUSH.pack(values), (ceil_div(COPY_WIDTH, 64), rows, 1))

        speeds = (_gbps(device, copy, 2 * COPY_BYTES), _gbps(device, sums, 3 * COPY_BYTES))
    finally:
        for buffer in held:
            buffer.free()
    return max(speeds)


def _gbps(device: Device, record: Callable[[Recorder], None], moved: int) -> float:
    """GB/s of the fastest of some repetitions that move so many bytes."""
    recorder = device.command_buffer("bandwidth")
    try:
        recorder.timestamp(0)
        for i in range(REPEATS):
            record(recorder)
            recorder.barrier()
            recorder.timestamp(i + 1)
        recorder.end()
        keep_busy(device, lambda: device.submit([recorder]))
        device.wait(device.submit([recorder]))
        times = device.read_timestamps(recorder)
    finally:
        recorder.free()
    return moved / max(1, min(end - begin for begin, end in pairwise(times)))


def write_trace(profiles: Sequence[Profile], path: str | os.PathLike[str]) -> None:
    """The dispatches of the profiled calls as a Chrome trace (chrome://tracing, Perfetto)."""
    events = [
        {
            "name": name,
            "cat": role,
            "ph": "X",
            "ts": start / 1e3,
            "dur": duration / 1e3,
            "pid": 1,
            "tid": row.call,
        }
        for row in profiles
        for name, role, start, duration in row.events
    ]
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def _timed(llm: LLM, kind: str, rows: int, session: Session, progress: Progress) -> Profile:
    """Run the newest call of a bucket, which was the session's last, again, timed."""
    engine = llm.engine
    again = [("batch.rows", 0, _step_record(session))] if kind == "batch" else []
    bucket = engine.plan.buckets[kind, rows]
    programs = [bucket.body, bucket.tails["argmax"]]
    recorders = record_timed(
        engine.device,
        engine.pipelines,
        programs,
        lambda operand: engine.address(kind, operand),
        engine.pacer.segment(kind, SEGMENT_DISPATCHES),
    )
    dispatches = [d for program in programs for d in program.dispatches]

    def submit() -> int:
        return engine.submit(again, recorders)

    progress.start(f"timing {kind} {rows}", REPEATS)
    try:
        keep_busy(engine.device, submit)
        runs = []
        for _ in range(REPEATS):
            engine.wait(submit())
            stamps = [engine.device.read_timestamps(recorder) for recorder in recorders]
            runs.append([b - a for times in stamps for a, b in pairwise(times)])
            progress.advance()
    finally:
        progress.finish()
        for recorder in recorders:
            recorder.free()
    spans = min(runs, key=sum)
    starts = [0, *accumulate(spans)]
    return Profile(
        call=f"{kind} {rows}",
        depth=session.position,
        milliseconds=sum(spans) / 1e6,
        kernels=_by_kernel(dispatches, spans),
        events=tuple(
            (d.kernel, d.node, float(at), float(span))
            for d, at, span in zip(dispatches, starts, spans, strict=False)
        ),
    )


def _step_record(session: Session) -> bytes:
    """The row record of the session's last step, which every run of that step moves on."""
    engine = session.engine
    return chunk_bytes(
        session.ids[-1:],
        1,
        position=session.position - 1,
        slot=session.slot,
        limit=engine.context + 1,
        emitted={0: engine.emitted.next_number("batch", 0)},
    )


def _by_kernel(dispatches: Sequence[Dispatch], spans: Sequence[int]) -> tuple[KernelTime, ...]:
    totals: dict[tuple[str, str], list[int]] = {}
    for dispatch, span in zip(dispatches, spans, strict=True):
        row = totals.setdefault((dispatch.kernel, dispatch.node.rpartition(".")[2]), [0, 0, 0])
        row[0] += span
        row[1] += 1
        row[2] += moved_bytes(dispatch)
    kernels = [
        KernelTime(kernel, role, ns / 1e6, count, size / max(ns, 1))
        for (kernel, role), (ns, count, size) in totals.items()
    ]
    return tuple(sorted(kernels, key=lambda row: -row.milliseconds))


def moved_bytes(dispatch: Dispatch) -> int:
    """Bytes that a dispatch reads and writes."""
    written = sum(operand.size for operand in dispatch.writes)
    if dispatch.kernel.startswith(GATHERS):
        return 2 * written
    return written + sum(operand.size for operand in dispatch.reads)
