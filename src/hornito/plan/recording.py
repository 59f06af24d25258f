"""Plans as recorded command buffers: pipelines, addresses, segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from hornito.errors import DeviceLostError, VulkanError
from hornito.ops.base import Dispatch, Operand
from hornito.ops.kernels import load_spirv
from hornito.plan.attempts import Attempts
from hornito.plan.plan import Plan, Program
from hornito.plan.records import pipeline_mark
from hornito.progress import Progress

if TYPE_CHECKING:
    from hornito.vk.device import Device
    from hornito.vk.pipeline import Pipeline
    from hornito.vk.record import Recorder

SEGMENT_DISPATCHES = 128
"""Dispatches of one recording; a submission is a run of recordings."""

AddressOf = Callable[[Operand], int]


class Pipelines:
    """The pipelines of a plan on one device, by kernel and specialisation.

    Args:
        attempts: notes which kernel is being made.
    """

    def __init__(self, device: Device, attempts: Attempts | None = None) -> None:
        self._device = device
        self._attempts = attempts
        self._made: dict[tuple[str, tuple[tuple[int, int], ...]], Pipeline] = {}

    def build(
        self, plan: Plan, progress: Progress, turn: Callable[[], None] | None = None
    ) -> dict[str, VulkanError]:
        """Make every pipeline that the plan uses.

        Args:
            turn: called before each: returns when the device is free for it.

        Returns:
            the kernels that the driver could not compile, and its errors.
        """
        wanted = [d for d in plan.distinct() if d.pipeline_key not in self._made]
        failed: dict[str, VulkanError] = {}
        progress.start("building pipelines", len(wanted))
        for dispatch in wanted:
            if turn is not None:
                turn()
            try:
                self.of(dispatch)
            except DeviceLostError:
                raise
            except VulkanError as error:
                failed[dispatch.kernel] = error
            progress.advance(1)
        progress.finish()
        return failed

    def of(self, dispatch: Dispatch) -> Pipeline:
        """The pipeline of a dispatch, made when first asked for."""
        key = dispatch.pipeline_key
        if key not in self._made:
            with self.trying(pipeline_mark(dispatch)):
                self._made[key] = self._device.pipeline(
                    load_spirv(dispatch.kernel),
                    name=dispatch.kernel,
                    spec=dict(dispatch.spec),
                    push_size=dispatch.push.size,
                    full_subgroups=dispatch.full_subgroups,
                )
        return self._made[key]

    def trying(self, mark: str) -> AbstractContextManager[None]:
        """A block that may end the process, and in which act (`hornito.plan.records`)."""
        return nullcontext() if self._attempts is None else self._attempts.trying(mark)


def record(
    device: Device,
    pipelines: Pipelines,
    program: Program,
    address: AddressOf,
    label: str,
    segment: int = SEGMENT_DISPATCHES,
) -> list[Recorder]:
    """Record a program as segments, to be submitted in order any number of times.

    Args:
        segment: most dispatches of one segment.
    """
    segments: list[Recorder] = []
    for start in range(0, len(program.dispatches), segment):
        stop = start + segment
        recorder = device.command_buffer(f"{label}[{start}:{stop}]")
        for index in range(start, min(stop, len(program.dispatches))):
            # A recording begins with a barrier of its own.
            if program.barriers[index] and index != start:
                recorder.barrier()
            dispatch = program.dispatches[index]
            recorder.dispatch(
                pipelines.of(dispatch), push_bytes(dispatch, address), dispatch.groups
            )
        recorder.end()
        segments.append(recorder)
    return segments


def record_timed(
    device: Device,
    pipelines: Pipelines,
    programs: Sequence[Program],
    address: AddressOf,
    segment: int = SEGMENT_DISPATCHES,
) -> list[Recorder]:
    """Recordings with a timestamp before and after every dispatch, for profiles.

    Args:
        segment: most dispatches of one recording.
    """
    dispatches = [dispatch for program in programs for dispatch in program.dispatches]
    segments: list[Recorder] = []
    for start in range(0, len(dispatches), segment):
        recorder = device.command_buffer("timed")
        recorder.timestamp(0)
        for count, dispatch in enumerate(dispatches[start : start + segment]):
            recorder.dispatch(
                pipelines.of(dispatch), push_bytes(dispatch, address), dispatch.groups
            )
            recorder.barrier()
            recorder.timestamp(count + 1)
        recorder.end()
        segments.append(recorder)
    return segments


def push_bytes(dispatch: Dispatch, address: AddressOf) -> bytes:
    """The dispatch's push-constant block with every operand's address filled in."""
    return dispatch.push.pack(
        [address(arg) if isinstance(arg, Operand) else arg for arg in dispatch.args]
    )
