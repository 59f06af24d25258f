"""Submissions of bounded GPU time: how runs of recordings are cut, by what was measured."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hornito.runtime.engine import Engine
from hornito.runtime.pacing import AIM, FIRST_SEGMENT, Pacer, usual_bound
from hornito.runtime.session import Session
from hornito.vk.device import Device
from hornito.vk.record import Recorder
from tiny import Compiled, answer, golden, open_engine


class Segment:
    """What a pacer sees of a recording."""

    def __init__(self, ms: float = 0.0, dispatches: int = 8) -> None:
        self.gpu_ns = ms * 1e6
        self.dispatch_count = dispatches


class NoTimestamps:
    class caps:
        timestamp_bits = 0


def pacer(bound_ms: float | None) -> Pacer:
    return Pacer(cast("Device", NoTimestamps()), bound_ms)


def cut(bound_ms: float | None, segments: list[Segment]) -> list[list[int]]:
    """The submissions, as indices of the segments."""
    groups = pacer(bound_ms).cut(cast("list[Recorder]", segments))
    return [[segments.index(cast("Any", r)) for r in group] for group in groups]


def test_bounds_by_class_of_device() -> None:
    assert usual_bound("discrete") is None
    for kind in ("software", "integrated", "virtual", "other"):
        assert usual_bound(kind) == 200.0


def test_runs_are_cut_at_the_bound() -> None:
    ten = [Segment(60) for _ in range(10)]
    assert cut(None, ten) == [list(range(10))]
    assert AIM == 0.75
    assert cut(240, ten) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert cut(239, ten[:3]) == [[0, 1], [2]]
    assert cut(50, ten[:2]) == [[0], [1]]  # what can't be cut goes alone


def test_what_was_never_measured_goes_alone() -> None:
    prelude, known, unknown = Segment(0, dispatches=0), Segment(20), Segment(0)
    assert cut(200, [prelude, known, unknown, Segment(20)]) == [[0, 1], [2], [3]]
    assert cut(200, [prelude, unknown]) == [[0, 1]]  # an update costs nothing


def test_measured_times_are_spread_over_the_segments() -> None:
    one = pacer(200)
    first, second = Segment(10, 4), Segment(30, 4)
    one._note(cast("Any", [first, second]), 80_000_000)
    assert (first.gpu_ns, second.gpu_ns) == (20e6, 60e6)
    one._note(cast("Any", [first, first]), 20_000_000)  # half of it: half believed
    assert first.gpu_ns == 15e6
    assert one.longest_ms == 80
    fresh, prelude = Segment(0, 4), Segment(0, 0)
    one._note(cast("Any", [prelude, fresh]), 7_000_000)
    assert fresh.gpu_ns == 7e6 and prelude.gpu_ns == 0


def test_segments_that_are_too_long() -> None:
    one = pacer(100)
    assert one.too_long(cast("Any", [Segment(60), Segment(74)])) == 0
    assert one.too_long(cast("Any", [Segment(60), Segment(150)])) == 2
    assert one.too_long(cast("Any", [Segment(250, dispatches=1)])) == 0  # nothing to cut
    assert pacer(None).too_long(cast("Any", [Segment(9000)])) == 0
    assert one.segment("chunk", 128) == FIRST_SEGMENT and one.segment("batch", 128) == 128
    assert pacer(None).segment("chunk", 128) == 128


@pytest.mark.gpu
def test_d15_a_small_bound_makes_many_submissions_and_the_same_tokens(
    device: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From timestamps: a bound below the time of a step cuts it, a large one does not."""
    wanted = golden("llama-tiny")
    submissions = 0
    submit = device.vk.vkQueueSubmit

    def count(*arguments: Any) -> int:
        nonlocal submissions
        submissions += 1
        code: int = submit(*arguments)
        return code

    monkeypatch.setattr(device.vk, "vkQueueSubmit", count)

    def run(engine: Engine) -> tuple[int, Any]:
        nonlocal submissions
        answer(engine, wanted.prompt, 12)  # measures
        submissions = 0
        return submissions, answer(engine, wanted.prompt, 12)

    with open_engine(device, compiled("llama-tiny"), submission_ms=1e6) as engine:
        _, loose = run(engine)
        few = submissions
        assert 0 < engine.pacer.longest_ms < 1e6
        step = sum(r.gpu_ns for r in engine.recording("batch", 1, "body")) / 1e6
        assert step > 0
    with open_engine(device, compiled("llama-tiny"), submission_ms=step / 3) as engine:
        _, tight = run(engine)
        assert submissions > 2 * few
        segments = engine.recording("batch", 1, "body")
        assert len(segments) > 1  # the recording was cut finer
        assert sum(r.dispatch_count for r in segments) == len(
            engine.plan.buckets["batch", 1].body.dispatches
        )
    assert tight.bits() == loose.bits()
    assert tight.tokens == wanted.tokens[:12]


@pytest.mark.gpu
def test_prompts_begin_in_short_segments(device: Device, compiled: Compiled) -> None:
    with (
        open_engine(device, compiled("llama-tiny"), submission_ms=1e6) as engine,
        Session(engine) as session,
    ):
        session.prefill([5] * 40)
        session.step(5)  # what is done is read before the next submission
        segments = engine.recording("chunk", 64, "body")
        assert all(r.dispatch_count <= FIRST_SEGMENT for r in segments)
        assert all(r.gpu_ns > 0 for r in segments)
