"""The device is lost: what raises, what goes on, and that nothing uses what was on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import hornito
from faults import Hang, lose, refuse_memory
from hornito.errors import DeviceLostError, DeviceMemoryError, NoDeviceError, SessionError
from hornito.runtime import engine as engine_module
from hornito.runtime.decode import decode
from hornito.runtime.engine import Engine
from hornito.runtime.prefix import start_from_prefix
from hornito.runtime.sampler import Sampler, SamplingParams
from hornito.runtime.session import Session
from hornito.vk import api
from hornito.vk.device import Device, open_device
from tiny import Compiled, golden, open_engine, pending, random_ids

pytestmark = pytest.mark.gpu

Opened = Callable[..., Engine]


@pytest.fixture
def opened(
    kernels: None, compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Opened]:
    """`opened(recover=..., **options)`: llama-tiny on a device of its own."""
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path))
    managers = []

    def make(**options: object) -> Engine:
        manager = open_engine(open_device(), compiled("llama-tiny"), **options)
        managers.append(manager)
        engine = manager.__enter__()
        engines.append(engine)
        return engine

    engines: list[Engine] = []
    yield make
    for manager, engine in zip(managers, engines, strict=True):
        manager.__exit__(None, None, None)
        engine.device.close()


def greedy(session: Session, count: int, *, steps: int = 4) -> list[int]:
    tokens = [pending(session)]
    for (new,) in decode([session], [count - 1], ignore_eos=True, steps=steps):
        tokens += new
    return tokens


def test_d16_without_recovery_every_use_says_what_to_do(opened: Opened) -> None:
    engine = opened(slots=2)
    session, other = Session(engine), Session(engine)
    session.prefill([3, 4, 5])
    snapshot = session.snapshot()
    lose(engine.device)
    began = time.monotonic()
    calls: list[Callable[[], object]] = [
        lambda: session.step(7),
        lambda: session.logits(),
        lambda: greedy(session, 5),
        lambda: other.prefill([1]),
        lambda: session.rewind(1),
        lambda: session.restore(snapshot),
        lambda: session.logprobs([3]),
    ]
    for call in calls:
        with pytest.raises(DeviceLostError, match=r"recover=True \(--recover\)") as caught:
            call()
        assert caught.value.code == api.VK_ERROR_DEVICE_LOST
    with pytest.raises(SessionError, match="device that was lost"):
        snapshot.blocks  # noqa: B018
    assert session.ids == [3, 4, 5]
    for thing in (snapshot, session, other):
        thing.release()  # nothing hangs, nothing is freed twice
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("after", [1, 2, 5])
def test_d15_a_loss_in_mid_decode_is_survived(opened: Opened, after: int) -> None:
    """The tokens are the reference's all the same: nothing goes on with stale memory."""
    wanted = golden("llama-tiny")
    engine = opened(recover=True, context=128)
    first = engine.device
    with Session(engine) as session:
        session.prefill(wanted.prompt)
        lose(first, after=after)
        assert greedy(session, len(wanted.tokens)) == wanted.tokens
        assert engine.device is not first and first.lost and engine.generation == 1
        assert session.ids == wanted.prompt + wanted.tokens[:-1]
        # A second loss, after some progress, is survived as well.
        lose(engine.device)
        session.rewind(len(wanted.prompt))
        session.step(wanted.tokens[0])
        assert pending(session) == wanted.tokens[1]
        assert engine.generation == 2


def test_a_kernel_that_does_not_end(opened: Opened) -> None:
    """Its device is given up; the session goes on, on another, and the old memory stays."""
    wanted = golden("llama-tiny")
    engine = opened(recover=True, context=128, slots=2)
    first = engine.device
    with Session(engine) as session:
        session.prefill(wanted.prompt)
        snapshot = session.snapshot()
        fault = Hang(first)
        session.engine.submit([], engine.recording("batch", 1, "body"))
        with pytest.raises(DeviceLostError, match="did not finish"):
            first.wait(engine.last_ticket, timeout_s=0.05)
        assert snapshot.lost
        assert greedy(session, 8) == wanted.tokens[:8]
        assert engine.device is not first and engine.generation == 1
        snapshot.release()
    held = first.allocated_bytes
    assert fault.harm == [] and held > 0
    fault.end()
    first.close()
    assert first.allocated_bytes == 0


def test_a_loss_while_a_prompt_is_evaluated(opened: Opened) -> None:
    wanted = golden("llama-tiny")
    engine = opened(recover=True, context=128, chunk_rows=(16,))
    with Session(engine) as session:
        session.prefill(wanted.prompt[:5])
        lose(engine.device, after=1)  # between its chunks
        session.prefill(wanted.prompt[5:])
        assert session.ids == wanted.prompt
        assert greedy(session, 8) == wanted.tokens[:8]
        assert engine.counters.evaluated_tokens > len(wanted.prompt)


def test_d4_chunks_halve_after_a_loss(opened: Opened) -> None:
    engine = opened(recover=True, context=256, submission_ms=1e9)
    assert engine.options.chunk_rows == (16, 64, 256)
    with Session(engine) as session:
        session.prefill([5] * 200)
        for rows in (128, 64, 32):
            lose(engine.device)
            session.step(9)
            assert max(engine.options.chunk_rows) == rows
            assert max(r for kind, r in engine.plan.buckets if kind == "chunk") == rows
        assert session.position == 203


def test_d4_a_try_to_open_the_device_again_is_no_loss(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many fail, in whichever step, chunks halve once."""
    engine = opened(recover=True, context=256)
    assert engine.options.chunk_rows == (16, 64, 256)

    def no_device(*arguments: object, **keywords: object) -> Device:
        raise NoDeviceError("there is none for a test")

    with Session(engine) as session:
        session.prefill([3, 4, 5])
        lose(engine.device)
        with monkeypatch.context() as fault:
            fault.setattr(engine_module, "open_device", no_device)
            for _ in range(3):
                with pytest.raises(NoDeviceError):
                    session.step(7)
        with monkeypatch.context() as fault:
            refuse_memory(fault, "state")
            for _ in range(3):
                with pytest.raises(DeviceMemoryError):
                    session.step(7)
        session.step(9)
        assert session.ids == [3, 4, 5, 9]
        assert engine.options.chunk_rows == (16, 64, 128)
        assert engine.plan.buckets.keys() >= {("chunk", 16), ("chunk", 64), ("chunk", 128)}


def test_every_session_of_the_device_is_evaluated_again(opened: Opened) -> None:
    engine = opened(recover=True, slots=3, context=128)
    alone = [random_ids(20 + 9 * i, i) for i in range(3)]
    sessions = [Session(engine) for _ in alone]
    wanted = []
    for session, ids in zip(sessions, alone, strict=True):
        session.prefill(ids)
        wanted.append(session.logits())
    lose(engine.device)
    for session, logits in zip(sessions, wanted, strict=True):
        np.testing.assert_allclose(session.logits(), logits, rtol=0, atol=1e-4)
    assert engine.generation == 1
    for session in sessions:
        session.close()
    assert engine.free_slots == 3
    lose(engine.device)
    evaluated = engine.counters.evaluated_tokens
    with pytest.raises(SessionError, match="closed"):
        sessions[0].step(3)  # nobody evaluates what nobody can use
    assert engine.counters.evaluated_tokens == evaluated


def test_embeddings_count_as_ids(opened: Opened) -> None:
    engine = opened(recover=True, context=128)
    rows = np.random.default_rng(5).standard_normal((20, engine.plan.width)).astype(np.float32)
    with Session(engine) as session:
        session.prefill([3, 4])
        session.prefill(embeddings=rows)
        session.step(8)
        wanted = session.logits()
        lose(engine.device)
        np.testing.assert_allclose(session.logits(), wanted, rtol=0, atol=1e-4)


def test_snapshots_of_a_lost_device(opened: Opened) -> None:
    engine = opened(recover=True, slots=2, context=128)
    ids = random_ids(40, 1)
    with Session(engine) as session, Session(engine) as other:
        session.prefill(ids)
        wanted, snapshot = session.logits(), session.snapshot()
        spare = session.snapshot()
        lose(engine.device)
        np.testing.assert_allclose(session.logits(), wanted, rtol=0, atol=1e-4)
        assert snapshot.lost and spare.lost
        other.restore(snapshot)  # evaluated again, and whole from then on
        assert not snapshot.lost and spare.lost
        evaluated = engine.counters.evaluated_tokens
        other.restore(snapshot)
        assert engine.counters.evaluated_tokens == evaluated
        other.step(ids[0])
        session.step(ids[0])
        assert pending(other) == pending(session)
        session.rewind(len(ids) - 1)
        session.step(ids[-1])
        np.testing.assert_allclose(session.logits(), wanted, rtol=0, atol=1e-4)
        assert start_from_prefix(other, [*ids, 5]) == len(ids)
        spare.release()
        snapshot.release()


def test_a_sampled_answer_goes_on(opened: Opened) -> None:
    """Draws depend on seed and position alone, and penalties on the ids."""
    engine = opened(recover=True, context=128)
    ids = random_ids(24, 2)
    params = SamplingParams(temperature=0.8, repetition_penalty=1.3, seed=11)

    def answer(*, after: int | None) -> list[int]:
        with Session(engine) as session:
            sampler = Sampler.start(params, len(ids))
            session.prefill(ids, sampler=sampler)
            if after is not None:
                lose(engine.device, after=after)
            tokens = [pending(session)]
            for (new,) in decode([session], [20], ignore_eos=True, steps=3, samplers=[sampler]):
                tokens += new
            return tokens

    wanted = answer(after=None)
    assert answer(after=3) == wanted
    assert engine.generation == 1


def test_a_device_that_is_lost_again_and_again_is_an_error(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(recover=True, context=128)

    def open_lost(*arguments: object, **keywords: object) -> object:
        device = open_device("software")
        lose(device, after=1)
        return device

    with Session(engine) as session:
        session.prefill([3, 4, 5])
        monkeypatch.setattr(engine_module, "open_device", open_lost)
        lose(engine.device)
        began = time.monotonic()
        with pytest.raises(DeviceLostError):
            session.step(7)
        assert time.monotonic() - began < 60
        monkeypatch.undo()
        session.step(9)  # the next use gets a device that works
        assert session.ids == [3, 4, 5, 9]


def test_through_the_interface(
    kernels: None, compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream goes on behind a loss; without `recover` it ends with what to do."""
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path))
    wanted = golden("llama-tiny")

    def stream(llm: hornito.LLM) -> list[int]:
        tokens: list[int] = []
        for chunk in llm.stream(wanted.prompt, max_tokens=16, ignore_eos=True):
            tokens += chunk.token_ids
            if len(tokens) == 5:
                lose(llm.engine.device)
        return tokens

    package = compiled("llama-tiny")
    with hornito.load(package, context=128, precision="high", recover=True) as llm:
        timer = llm.time_gpu()
        assert stream(llm) == wanted.tokens[:16]
        assert llm.engine.generation == 1 and llm.device_line
        assert timer is None or timer.seconds() >= 0
    with (
        hornito.load(package, context=128, precision="high") as llm,
        pytest.raises(DeviceLostError, match="--recover"),
    ):
        stream(llm)
