"""Kernels that a load had no time for are proved while nothing runs, and disturb nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from faults import Hang, fail_kernel, lose, refuse_memory
from hornito.errors import DeviceLostError, DeviceMemoryError
from hornito.ops.variants import Choices
from hornito.plan.plan import build_plan
from hornito.plan.records import GOOD, DeviceRecords, Verdict, verdict_key
from hornito.plan.selftest import UNPROVEN, SelfTest
from hornito.plan.stand import Stand
from hornito.plan.units import Unit, units
from hornito.runtime import idle as idle_module
from hornito.runtime import proof as proof_module
from hornito.runtime import settle
from hornito.runtime.decode import decode
from hornito.runtime.engine import Engine
from hornito.runtime.idle import IdleProof
from hornito.runtime.session import Session
from hornito.runtime.settle import KernelPolicy
from hornito.vk.device import Device
from tiny import Broken, Compiled, check_answer, golden, kernels_of, open_engine, pending

pytestmark = [pytest.mark.gpu, pytest.mark.software]

VARIANT = "linear/broadcast.f32"
NO_TIME = KernelPolicy(budget_s=0.0)
ONE_CHUNK: dict[str, Any] = {"context": 128, "chunk_rows": (16,), "policy": NO_TIME}
SOON = 120.0


@pytest.fixture(autouse=True)
def not_exempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A software device proves its variants as any other, and at once."""
    monkeypatch.setattr(settle, "exempt", lambda caps: False)
    monkeypatch.setattr(idle_module, "IDLE_SECONDS", 0.01)


def wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


class Watched:
    """What the proof of an engine does.

    Attributes:
        submissions: of the self-test.
        tested: kernels that got a verdict, one entry for each shape.
        plans: the kernels of each plan that was taken; all but plain twins had a good verdict then.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.submissions = 0
        self.tested: list[str] = []
        self.plans: list[set[str]] = []
        self._good: set[str] = set()
        run, test, take_plan = Stand._run, SelfTest._test, engine.take_plan

        def counted(stand: Stand, recorder: Any) -> None:
            run(stand, recorder)
            self.submissions += 1

        def tested(found: SelfTest, unit: Unit, key: str) -> Verdict:
            verdict = test(found, unit, key)
            self.tested.append(unit.kernel)
            if verdict.verdict == GOOD:
                self._good.add(unit.kernel)
            return verdict

        def taken(options: Any, plan: Any) -> None:
            take_plan(options, plan)
            self.plans.append(kernels_of(engine))
            assert {unit.kernel for unit in units(plan)} <= self._good

        monkeypatch.setattr(Stand, "_run", counted)
        monkeypatch.setattr(SelfTest, "_test", tested)
        monkeypatch.setattr(engine, "take_plan", taken)


def test_what_passes_is_used_without_a_reload(
    fresh: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel by kernel, as a discrete GPU would have them; sessions and snapshots stay open."""
    fresh.caps = replace(fresh.caps, device_kind="discrete")
    wanted = golden("llama-tiny")
    package = compiled("llama-tiny", "fp16")
    with open_engine(fresh, package, kv_half=True, slots=2, **ONE_CHUNK) as engine:
        waiting = engine.trust.waiting
        assert len(waiting) > 2 and not set(waiting) & kernels_of(engine)
        assert f"{len(waiting)} unproven" in engine.trust.line
        watched = Watched(engine, monkeypatch)
        session = Session(engine)
        session.prefill(wanted.prompt)
        snapshot = session.snapshot()
        with IdleProof(engine) as proof:
            proof.resume()
            wait(lambda: proof.done)
        trust = engine.trust
        assert trust.complete and trust.waiting == () and trust.unproven == ()
        assert engine.options.choices.dropped == {}
        # Each was used when it was known: the plans grow.
        used = [len(plan & set(waiting)) for plan in watched.plans]
        assert used == sorted(used) and len(set(used)) > 2
        found = [pending(session)]
        for (new,) in decode([session], [7], ignore_eos=True):
            found += new
        assert found == wanted.tokens[:8]
        session.close()
        with Session(engine) as again:
            again.restore(snapshot)
            assert again.position == len(wanted.prompt)
        snapshot.release()
        check_answer(engine)
    kept = DeviceRecords.load(fresh.info)
    for unit in units(engine.plan):
        assert kept.verdicts[verdict_key(unit.kernel, unit.shape)].verdict == GOOD


def test_a_wrong_kernel_is_dropped_and_never_used(
    fresh: Device, compiled: Compiled, broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(VARIANT, "finish(row0 + r, n, sum[r][j]);", "finish(row0 + r, n, sum[r][j] * 1.01);")
    with open_engine(fresh, compiled("llama-tiny"), **ONE_CHUNK) as engine:
        assert engine.trust.dropped[VARIANT] == UNPROVEN
        watched = Watched(engine, monkeypatch)
        with IdleProof(engine) as proof:
            proof.resume()
            wait(lambda: proof.done)
        assert engine.trust.dropped[VARIANT].startswith("wrong: ") and engine.trust.complete
        assert all(VARIANT not in plan for plan in watched.plans)
        assert VARIANT not in kernels_of(engine)
        check_answer(engine)
    # The verdict was kept: the next load asks nothing again.
    monkeypatch.setattr(Stand, "results", lambda *arguments: pytest.fail("tested again"))
    timely = {**ONE_CHUNK, "policy": KernelPolicy()}
    with open_engine(fresh, compiled("llama-tiny"), **timely) as engine:
        assert VARIANT not in kernels_of(engine)


def test_a_kernel_without_a_pipeline_is_dropped(fresh: Device, compiled: Compiled) -> None:
    waiting = Choices(dropped={VARIANT: UNPROVEN})
    with open_engine(fresh, compiled("llama-tiny"), choices=waiting, **ONE_CHUNK) as engine:
        assert VARIANT in engine.trust.waiting
        fail_kernel(fresh, VARIANT)
        with IdleProof(engine) as proof:
            proof.resume()
            wait(lambda: proof.done)
        assert engine.trust.dropped[VARIANT].startswith("failed: ") and engine.trust.complete
        check_answer(engine)


def test_requests_wait_for_one_submission(
    fresh: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers amid the proof are those of the plan at hand, and it goes on where it stopped."""
    with open_engine(fresh, compiled("llama-tiny"), slots=2, **ONE_CHUNK) as engine:
        watched = Watched(engine, monkeypatch)
        with IdleProof(engine) as proof:
            rounds = 0
            while not proof.done:
                before = watched.submissions
                proof.resume()
                wait(lambda before=before: proof.done or watched.submissions > before + 25)
                with proof._changed:  # nothing begins between these two lines
                    at = watched.submissions
                    proof.pause()
                held = watched.submissions
                assert held <= at + 1
                check_answer(engine)
                time.sleep(0.02)
                assert watched.submissions == held
                rounds += 1
            assert rounds > 3
        assert VARIANT in kernels_of(engine) and engine.trust.complete
        check_answer(engine)


def test_nothing_is_tested_before_it_is_idle(
    fresh: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_module, "IDLE_SECONDS", 3600.0)
    with open_engine(fresh, compiled("llama-tiny"), **ONE_CHUNK) as engine:
        watched = Watched(engine, monkeypatch)
        with IdleProof(engine) as proof:
            for _ in range(20):
                with proof.meanwhile():
                    time.sleep(0.002)
            assert not proof.done
        assert watched.submissions == 0 and not engine.trust.complete


def test_an_early_end_gives_everything_back(
    fresh: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known by then is kept, and another proof goes on from there."""
    fresh.caps = replace(fresh.caps, device_kind="discrete")
    package = compiled("llama-tiny", "fp16")
    with open_engine(fresh, package, kv_half=True, slots=2, **ONE_CHUNK) as engine:
        watched = Watched(engine, monkeypatch)
        proof = IdleProof(engine)
        proof.resume()
        wait(lambda: len(watched.plans) > 1)
        proof.close()
        proof.close()
        assert "self-test" not in fresh.memory_report()
        assert not any(t.name == "hornito-proof" for t in threading.enumerate())
        assert engine.trust.waiting and not engine.trust.complete
        check_answer(engine)
        before = set(watched.tested)
        watched.tested.clear()
        with IdleProof(engine) as other:
            other.resume()
            wait(lambda: other.done)
        assert engine.trust.complete and engine.options.choices.dropped == {}
        # At most the kernel that was being tested is in both.
        assert watched.tested and len(before & set(watched.tested)) <= 1
        assert before | set(watched.tested) == {unit.kernel for unit in units(engine.plan)}


def test_each_verdict_is_kept_at_once(
    fresh: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed amid the proof has not tested for nothing."""
    test, lacking = SelfTest._test, []

    def tested(found: SelfTest, unit: Unit, key: str) -> Verdict:
        kept = DeviceRecords.load(fresh.info).verdicts
        lacking.append([v.kernel for key, v in found.records.verdicts.items() if key not in kept])
        return test(found, unit, key)

    monkeypatch.setattr(SelfTest, "_test", tested)
    with open_engine(fresh, compiled("llama-tiny"), **ONE_CHUNK) as engine:
        with IdleProof(engine) as proof:
            proof.resume()
            wait(lambda: proof.done)
        assert len(lacking) > 2 and not any(lacking)


def test_ctrl_c_waits_for_the_proof_to_end(
    fresh: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes behind may close the device, so the thread must not be using it any more."""
    run, began = Stand._run, threading.Event()

    def interrupted(stand: Stand, recorder: Any) -> None:
        if not began.is_set():
            began.set()
            wait(lambda: proof._closing)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        run(stand, recorder)

    monkeypatch.setattr(Stand, "_run", interrupted)
    with open_engine(fresh, compiled("llama-tiny"), **ONE_CHUNK) as engine:
        proof = IdleProof(engine)
        proof.resume()
        assert began.wait(SOON)
        with pytest.raises(KeyboardInterrupt):
            proof.close()
        alive = [t for t in threading.enumerate() if t.name == "hornito-proof"]
        for thread in alive:
            thread.join()
        assert not alive
        check_answer(engine)


def test_without_memory_the_rest_stays_unproven(
    fresh: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(fresh, compiled("llama-tiny"), **ONE_CHUNK) as engine:
        refuse_memory(monkeypatch, "self-test")
        with IdleProof(engine) as proof:
            proof.resume()
            wait(lambda: proof.done)
        assert VARIANT in engine.trust.waiting and not engine.trust.complete
        check_answer(engine)


def test_without_memory_for_the_plan_the_engine_goes_on_with_its_own(
    fresh: Device,
    compiled: Compiled,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open_engine(fresh, compiled("llama-tiny"), **ONE_CHUNK) as engine:
        held, real = engine.plan.arena.total, Device.allocate
        larger: list[int] = []

        def planned(*arguments: Any) -> Any:
            made = build_plan(*arguments)
            return replace(made, arena=replace(made.arena, total=made.arena.total + 4096))

        def allocate(self: Device, size: int, kind: Any, label: str) -> Any:
            if label == "activations" and size > held:
                larger.append(size)
                raise DeviceMemoryError("no room for more", needed=size, available=held)
            return real(self, size, kind, label)

        monkeypatch.setattr(proof_module, "build_plan", planned)
        monkeypatch.setattr(Device, "allocate", allocate)
        check_answer(engine)
        with IdleProof(engine) as proof:
            proof.resume()
            wait(lambda: proof.done)
        assert larger and engine.plan.arena.total == held and VARIANT in engine.trust.waiting
        assert any("no room for more" in message for message in caplog.messages)
        check_answer(engine)
    # What was found out is on record, and used where there is room.
    assert GOOD in {v.verdict for v in DeviceRecords.load(fresh.info).verdicts.values()}


@pytest.mark.parametrize("ends", [True, False])
def test_a_kernel_that_takes_the_device_with_it(
    fresh: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Who uses the engine is told; with the device open again the kernel is not used. The driver
    says that the device is lost, or the kernel does not end."""
    monkeypatch.setattr("hornito.runtime.settle.STRIKES", 1)
    monkeypatch.setattr("hornito.plan.stand.WAIT_SECONDS", 60 if ends else 1)
    hangs: list[Hang] = []
    real = Stand._record

    def record(self: Stand, *arguments: Any) -> Any:
        recorder = real(self, *arguments)
        if any(d.kernel == VARIANT for d in arguments[1]):
            if ends:
                lose(self.device, after=1)
            else:
                hangs.append(Hang(self.device, after=1))
        return recorder

    lost: list[DeviceLostError] = []
    with open_engine(fresh, compiled("llama-tiny"), recover=True, **ONE_CHUNK) as engine:
        monkeypatch.setattr(Stand, "_record", record)
        with IdleProof(engine, lost.append) as proof:
            proof.resume()
            wait(lambda: proof.done)
            proof.resume()  # nothing more can be found out on this device
            assert proof.done
            monkeypatch.setattr(Stand, "_record", real)
            (error,) = lost
            assert VARIANT in str(error)
            proof.pause()
            engine.revive()
            assert engine.trust.dropped[VARIANT].startswith("failed: ")
            assert not engine.trust.complete
            proof.resume()
            wait(lambda: proof.done)
        try:
            assert engine.trust.complete and VARIANT not in kernels_of(engine)
            check_answer(engine)
        finally:
            engine.close()
            engine.device.close()
        for fault in hangs:
            assert fault.harm == []
            fault.end()
            fresh.close()
            assert fresh.allocated_bytes == 0


def test_the_proof_goes_on_with_a_device_that_was_opened_again(
    fresh: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's user lost the device and got another while the proof was halted."""
    with open_engine(fresh, compiled("llama-tiny"), recover=True, **ONE_CHUNK) as engine:
        watched = Watched(engine, monkeypatch)
        with IdleProof(engine) as proof:
            proof.resume()
            wait(lambda: watched.submissions > 3)
            proof.pause()
            assert not proof.done
            lose(engine.device)
            with pytest.raises(DeviceLostError):
                fresh.completed()
            engine.revive()
            try:
                at, known = watched.submissions, set(watched.tested)
                assert VARIANT in engine.trust.waiting
                watched.tested.clear()
                proof.resume()
                wait(lambda: proof.done)
                assert watched.submissions > at
                assert known.isdisjoint(watched.tested)
                assert VARIANT in kernels_of(engine) and engine.trust.complete
                check_answer(engine)
            finally:
                engine.close()
                engine.device.close()


def test_where_nothing_is_unproven_there_is_no_thread(
    fresh: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle, "exempt", lambda caps: True)
    with (
        open_engine(fresh, compiled("llama-tiny"), **ONE_CHUNK) as engine,
        IdleProof(engine) as proof,
    ):
        assert proof.done
        with proof.meanwhile():
            assert not any(t.name == "hornito-proof" for t in threading.enumerate())
