"""Opening, closing, submitting and waiting on a real device."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from faults import Hang, lose
from hornito.errors import (
    DeviceLostError,
    HornitoError,
    NoDeviceError,
    SessionError,
    UsageError,
)
from hornito.vk import api
from hornito.vk import instance as instance_module
from hornito.vk.device import Device, list_devices, open_device

pytestmark = pytest.mark.gpu


def _words(device: Device, affine: Any) -> np.ndarray:
    return np.frombuffer(device.download(affine.target, 0, 4 * affine.count), np.uint32)


def test_list_is_sorted_and_stable() -> None:
    devices = list_devices()
    order = ("discrete", "integrated", "virtual", "other", "software")
    ranks = [order.index(info.kind) for info in devices]
    assert ranks == sorted(ranks)
    assert [info.index for info in devices] == list(range(len(devices)))
    assert devices == list_devices()
    for info in devices:
        assert len(bytes.fromhex(info.uuid)) == 16
        assert info.usable == (info.reason == "")


def test_selectors_open_the_same_device() -> None:
    first = list_devices()[0]
    for selector in (0, "0", first.name, first.uuid, first.name.split()[0].upper()):
        with open_device(selector) as device:
            assert device.info.uuid == first.uuid


def test_no_match_lists_what_exists() -> None:
    name = list_devices()[0].name
    with pytest.raises(NoDeviceError, match="no device matches 'no such gpu'") as caught:
        open_device("no such gpu")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_environment_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORNITO_DEVICE", "not here")
    with pytest.raises(NoDeviceError, match="not here"):
        open_device()


def test_software_device_is_loud_only_when_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HORNITO_DEVICE", raising=False)
    devices = list_devices()
    if devices[0].kind != "software":
        pytest.skip("a GPU is present, so the software device is never the default")
    with caplog.at_level(logging.WARNING, logger="hornito"), open_device():
        pass
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert devices[0].name in caplog.text and "software" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hornito"), open_device("software") as device:
        assert device.info.kind == "software"
    assert caplog.records == []


def test_dispatch_computes(device: Device, affine: Any) -> None:
    recorder = device.command_buffer("one dispatch")
    recorder.dispatch(affine.pipeline, affine.push, affine.groups)
    recorder.end()
    assert (recorder.dispatch_count, recorder.barrier_count) == (1, 0)
    ticket = device.submit([recorder])
    device.wait(ticket)
    assert device.completed() == ticket == 1
    np.testing.assert_array_equal(_words(device, affine), affine.expected)


def test_consecutive_recordings_see_each_other(device: Device, affine: Any) -> None:
    """The same recording thrice in a submission: each run reads what the last one wrote."""
    recorder = device.command_buffer("in place")
    push = affine.push[:8] + affine.push[:8] + affine.push[16:]  # target = source
    recorder.dispatch(affine.pipeline, push, affine.groups)
    recorder.end()
    device.wait(device.submit([recorder, recorder]))
    device.wait(device.submit([recorder]))
    expected = affine.values
    for _ in range(3):
        expected = expected * np.uint32(3) + np.uint32(11)
    got = np.frombuffer(device.download(affine.source, 0, 4 * affine.count), np.uint32)
    np.testing.assert_array_equal(got, expected)


def test_work_that_does_not_end_in_its_time(device: Device, slow_affine: Any) -> None:
    """The device counts as lost; what the work may use is freed when it has ended."""
    recorder = device.command_buffer("long")
    for _ in range(3):
        recorder.dispatch(slow_affine.pipeline, slow_affine.push, slow_affine.groups)
        recorder.barrier()
    recorder.end()
    ticket = device.submit([recorder])
    with pytest.raises(DeviceLostError, match=r"did not finish ticket 1 in 0\.001 s") as caught:
        device.wait(ticket, timeout_s=0.001)
    assert caught.value.code == api.VK_TIMEOUT and device.lost
    for call in (lambda: device.wait(ticket), lambda: device.submit([recorder]), device.completed):
        with pytest.raises(DeviceLostError, match="open it again"):
            call()
    held = device.allocated_bytes
    slow_affine.source.free()
    recorder.free()
    assert device.allocated_bytes == held and not recorder.freed
    end = time.monotonic() + 120
    while not recorder.freed and time.monotonic() < end:
        time.sleep(0.05)
        recorder.free()
    assert recorder.freed
    slow_affine.source.free()
    assert device.allocated_bytes < held


def test_a_device_that_hangs_is_left_alone(
    device: Device, affine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing hangs, and nothing is pulled from under the kernel; a new device computes."""
    recorder = device.command_buffer("hangs")
    recorder.dispatch(affine.pipeline, affine.push, affine.groups)
    recorder.end()
    fault = Hang(device)
    ticket = device.submit([recorder])
    waiting = threading.Thread(target=lambda: errors.append(error_of(lambda: device.wait(ticket))))
    errors: list[BaseException | None] = []
    waiting.start()
    assert isinstance(error_of(lambda: device.wait(ticket, timeout_s=0.05)), DeviceLostError)
    waiting.join(60)
    assert isinstance(errors[0], DeviceLostError)  # who waits without a bound does not any longer
    affine.source.free()
    recorder.free()
    for _ in range(2):
        device.close()
    assert fault.harm == []
    assert sum("still works on what it was given up over" in m for m in caplog.messages) == 1
    with open_device(device.info.uuid) as again:
        buffer = again.allocate(16, "device", "again")
        again.upload([(buffer, 0, b"0123456789abcdef")])
        assert again.download(buffer, 4, 4) == b"4567"
    fault.end()
    device.close()
    assert recorder.freed and device.allocated_bytes == 0


def error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except HornitoError as error:
        return error
    return None


def test_wait_sleeps_in_the_driver(device: Device, slow_affine: Any) -> None:
    """I6: the waiting thread uses next to no processor time, and lets other threads run."""
    recorder = device.command_buffer("long")
    for _ in range(3):
        recorder.dispatch(slow_affine.pipeline, slow_affine.push, slow_affine.groups)
        recorder.barrier()
    recorder.end()
    ticket = device.submit([recorder])
    ticks = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not stop.wait(0.002):
            ticks += 1

    counter = threading.Thread(target=count)
    counter.start()
    wall, used = time.perf_counter(), time.thread_time()
    device.wait(ticket)
    used, wall = time.thread_time() - used, time.perf_counter() - wall
    stop.set()
    counter.join()
    assert used < 0.3 * wall + 0.005, (used, wall)
    assert wall < 0.02 or ticks > 1  # the interpreter lock was released


def test_unknown_ticket(device: Device) -> None:
    with pytest.raises(SessionError, match="ticket 5 was never submitted"):
        device.wait(5)


def test_closed_device_refuses(device: Device, affine: Any) -> None:
    device.close()
    device.close()  # a no-op
    for call in (
        lambda: device.allocate(4, "device", "late"),
        lambda: device.command_buffer("late"),
        lambda: device.submit([]),
        lambda: device.wait(0),
        lambda: device.download(affine.source, 0, 4),
    ):
        with pytest.raises(SessionError, match="was closed"):
            call()
    affine.source.free()  # what the device released already is not released again
    assert device.allocated_bytes == 0


def test_instance_is_shared_and_released() -> None:
    with open_device(0) as first:
        with open_device(0) as second:
            assert first._instance is second._instance
        assert list(instance_module._shared.values()) == [first._instance]
    assert instance_module._shared == {}


def test_unfinished_or_freed_recording_is_refused(device: Device, affine: Any) -> None:
    recorder = device.command_buffer("open")
    recorder.dispatch(affine.pipeline, affine.push, affine.groups)
    with pytest.raises(SessionError, match="not ended"):
        device.submit([recorder])
    recorder.end()
    with pytest.raises(SessionError, match="has ended"):
        recorder.dispatch(affine.pipeline, affine.push, affine.groups)
    with pytest.raises(SessionError, match="has ended"):
        recorder.barrier()
    recorder.free()
    recorder.free()
    with pytest.raises(SessionError, match="was freed"):
        device.submit([recorder])


def test_device_loss_is_final_and_the_process_goes_on(shader: Any, device: Device) -> None:
    """D16, D15: every call after a loss raises, close works, a new device computes."""
    lose(device)
    recorder = device.command_buffer("lost")
    recorder.end()
    with pytest.raises(DeviceLostError, match="was lost") as caught:
        device.submit([recorder])
    assert caught.value.code == -4
    with pytest.raises(DeviceLostError):
        device.completed()
    with pytest.raises(DeviceLostError):
        device.allocate(4, "device", "late")
    recorder.free()
    device.close()
    with open_device(device.info.uuid) as again:
        buffer = again.allocate(16, "device", "again")
        again.upload([(buffer, 0, b"0123456789abcdef")])
        assert again.download(buffer, 4, 4) == b"4567"


def test_a_timer_of_a_lost_device(device: Device, affine: Any) -> None:
    timer = device.time_submissions()
    if timer is None:
        pytest.skip(f"{device.info.name} has no timestamps")
    recorder = device.command_buffer("timed")
    recorder.dispatch(affine.pipeline, affine.push, affine.groups)
    recorder.end()
    device.wait(device.submit([recorder]))
    measured = timer.seconds()
    lose(device)
    with pytest.raises(DeviceLostError):
        device.submit([recorder])
    assert timer.seconds() == measured > 0
    device.close()
    assert timer.seconds() == measured


def test_device_loss_while_waiting(device: Device, affine: Any) -> None:
    recorder = device.command_buffer("then lost")
    recorder.dispatch(affine.pipeline, affine.push, affine.groups)
    recorder.end()
    ticket = device.submit([recorder])
    lose(device)
    with pytest.raises(DeviceLostError):
        device.wait(ticket)
    with pytest.raises(DeviceLostError, match="open it again"):
        device.wait(ticket)


def test_threads_submit_side_by_side(device: Device, affine: Any) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            recorder = device.command_buffer("threaded")
            recorder.dispatch(affine.pipeline, affine.push, affine.groups)
            recorder.end()
            for _ in range(20):
                device.wait(device.submit([recorder]))
            recorder.free()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert device.completed() == 80
    np.testing.assert_array_equal(_words(device, affine), affine.expected)


def test_abandoned_device_is_closed_by_the_collector() -> None:
    import gc

    device = open_device(0)
    view = device.allocate(64, "host", "kept by a view").view
    del device
    gc.collect()
    assert instance_module._shared != {}  # the view keeps it
    assert view is not None
    view[:4] = b"safe"
    del view
    gc.collect()
    assert instance_module._shared == {}


def test_zero_size_is_refused(device: Device) -> None:
    with pytest.raises(UsageError, match="'empty' of 0 bytes"):
        device.allocate(0, "device", "empty")
