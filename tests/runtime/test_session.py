"""The verbs of a session, what they refuse, and what is left after they refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hornito.errors import ContextOverflowError, SessionError, UsageError
from hornito.runtime import evaluation
from hornito.runtime.decode import decode
from hornito.runtime.engine import Engine
from hornito.runtime.session import Session
from hornito.vk.device import Device
from tiny import (
    CONTEXT,
    VOCABULARY,
    Compiled,
    answer,
    assert_same_tokens,
    forced_logits,
    open_engine,
    pending,
    random_ids,
)

pytestmark = pytest.mark.gpu

PROMPT = random_ids(100, seed=31)
OTHER = random_ids(60, seed=32)


def test_position_ids_and_pending(engine: Engine) -> None:
    with Session(engine) as session:
        assert (session.position, session.ids, session.pending) == (0, [], None)
        session.prefill(PROMPT[:30])
        assert session.position == 30 and session.ids == PROMPT[:30]
        token = pending(session)
        session.step(token)
        assert session.position == 31 and session.ids == [*PROMPT[:30], token]
        session.prefill(PROMPT[30:])
        assert session.position == 101 and session.ids[31:] == PROMPT[30:]


def test_numpy_ids(engine: Engine) -> None:
    """Ids may come in arrays; the session holds plain numbers."""
    with Session(engine) as session:
        session.prefill(np.array(PROMPT, np.int64))  # type: ignore[arg-type]
        assert session.ids == PROMPT and {type(token) for token in session.ids} == {int}
        want = pending(session)
        session.rewind(0)
        session.prefill(tuple(PROMPT))
        assert pending(session) == want


def test_logits_after_every_verb(engine: Engine) -> None:
    want = forced_logits(engine, PROMPT)
    with Session(engine) as session:
        for verb in (session.prefill, session.logprobs, session.prefill_logits):
            session.rewind(0)
            verb(PROMPT[:70])
            before = session.pending
            first = session.logits()
            assert_same_tokens(first[None], want[69:70])
            assert first.shape == (VOCABULARY,) and first.dtype == np.float32
            # Asking changes nothing.
            assert (session.position, session.pending) == (70, before)
            assert session.logits().tobytes() == first.tobytes()
        session.step(PROMPT[70])
        assert_same_tokens(session.logits()[None], want[70:71])
        assert pending(session) == session.logits().argmax()


def test_logits_belong_to_the_caller(engine: Engine) -> None:
    """A later call must not change an array that was handed out."""
    with Session(engine) as session:
        rows = session.prefill_logits(PROMPT[:5])
        row = session.logits()
        logprobs = session.logprobs(PROMPT[5:9])
        kept = [array.copy() for array in (rows, row, logprobs)]
        session.prefill_logits(OTHER)
        session.logits()
        session.logprobs(PROMPT[:30])
        for array, copy in zip((rows, row, logprobs), kept, strict=True):
            np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("position", [0, 1, 16, 64, 99])
def test_rewind_equals_a_fresh_session(engine: Engine, position: int) -> None:
    """The rows behind the position are as if they had never been."""
    with Session(engine) as fresh:
        if position:
            fresh.prefill(PROMPT[:position], chunk=1)
        fresh.prefill(OTHER, chunk=16)
        want = fresh.logits()
    with Session(engine) as session:
        session.prefill(PROMPT, chunk=1)
        session.rewind(position)
        assert session.position == position and session.ids == PROMPT[:position]
        session.prefill(OTHER, chunk=16)
        assert session.logits().tobytes() == want.tobytes()


def test_rewind_after_decoding(engine: Engine) -> None:
    want = answer(engine, PROMPT, 20)
    with Session(engine) as session:
        session.logprobs(PROMPT)
        for _ in decode([session], [40], ignore_eos=True):
            pass
        session.rewind(100)
        assert session.pending is None
        session.step(want.tokens[0])
        for _ in decode([session], [18], ignore_eos=True):
            pass
        assert session.ids[100:] == want.tokens[:-1] and pending(session) == want.tokens[-1]
        assert session.logits().tobytes() == want.last.tobytes()


def test_rewind_to_here_keeps_the_pending_token(engine: Engine) -> None:
    with Session(engine) as session:
        session.prefill(PROMPT)
        token = pending(session)
        session.rewind(100)
        assert session.pending == token


def test_logits_need_a_row(engine: Engine) -> None:
    with Session(engine) as session:
        with pytest.raises(SessionError, match="needs an evaluated token"):
            session.logits()
        session.prefill(PROMPT)
        session.rewind(50)
        with pytest.raises(SessionError, match="needs an evaluated token"):
            session.logits()
        session.step(PROMPT[50])
        assert np.isfinite(session.logits()).all()


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([], UsageError, "no token ids to evaluate"),
        ([3, VOCABULARY], UsageError, "token id 512 is outside the vocabulary of 512"),
        ([-1], UsageError, "token id -1 is outside the vocabulary of 512"),
        ([2**40], UsageError, "token id 1099511627776 is outside"),
        ([1.5], UsageError, "token ids must be whole numbers"),
        (["a"], UsageError, "token ids must be whole numbers"),
        (
            [3] * 443,
            ContextOverflowError,
            r"443 tokens at position 70 need 513 positions; the context has 512\. "
            r"The model was made for 512 at most",
        ),
    ],
)
def test_refused_ids_leave_the_session_alone(
    engine: Engine, ids: list[Any], error: type[Exception], message: str
) -> None:
    with Session(engine) as session:
        session.prefill(PROMPT[:70])
        state = (session.ids[:], session.pending, session.logits().tobytes())
        for verb in (session.prefill, session.logprobs, session.prefill_logits):
            with pytest.raises(error, match=message):
                verb(ids)
            assert (session.ids, session.pending, session.logits().tobytes()) == state


def test_overflow_has_numbers(engine: Engine) -> None:
    with Session(engine) as session:
        session.prefill(random_ids(CONTEXT, seed=5))
        assert session.position == CONTEXT
        with pytest.raises(ContextOverflowError) as caught:
            session.step(5)
        assert (caught.value.tokens, caught.value.context) == (CONTEXT + 1, CONTEXT)


@pytest.mark.parametrize("chunk", [0, 2, 15, 512, -1])
def test_chunk_must_be_a_bucket(engine: Engine, chunk: int) -> None:
    with Session(engine) as session:
        with pytest.raises(UsageError, match=rf"one of \[1, 16, 64, 256\], not {chunk}"):
            session.prefill(PROMPT, chunk=chunk)
        assert session.position == 0


@pytest.mark.parametrize("position", [-1, 31])
def test_rewind_outside(engine: Engine, position: int) -> None:
    with Session(engine) as session:
        session.prefill(PROMPT[:30])
        message = f"can't rewind to {position}: 30 tokens are evaluated"
        with pytest.raises(UsageError, match=message):
            session.rewind(position)


def test_a_closed_session(engine: Engine) -> None:
    session = Session(engine)
    session.prefill(PROMPT)
    session.close()
    session.close()
    uses = (
        lambda: session.prefill([1]),
        lambda: session.step(1),
        lambda: session.logprobs([1, 2]),
        lambda: session.prefill_logits([1]),
        session.logits,
        lambda: session.rewind(0),
        lambda: list(decode([session], [1])),
    )
    for use in uses:
        with pytest.raises(SessionError, match="this session is closed"):
            use()


def test_slots(device: Device, compiled: Compiled) -> None:
    with open_engine(device, compiled("llama-tiny"), slots=2, context=64) as engine:
        a, b = Session(engine), Session(engine)
        assert {a.slot, b.slot} == {0, 1}
        with pytest.raises(
            SessionError, match=r"all 2 slots are in use; .* load with more \(slots=3\)"
        ):
            Session(engine)
        a.close()
        with Session(engine) as c:
            assert c.slot == a.slot
        b.close()


def test_a_reused_slot_remembers_nothing(engine: Engine) -> None:
    want = answer(engine, OTHER, 10)
    with Session(engine) as long:
        long.prefill(random_ids(400, seed=33))
    assert answer(engine, OTHER, 10).bits() == want.bits()


@pytest.mark.parametrize("disabled", [(), ("select_in_norm",)])
def test_stale_state_is_never_used(
    device: Device, compiled: Compiled, disabled: tuple[str, ...]
) -> None:
    """Row records, selections and given ids past the live ones may hold anything."""
    with open_engine(device, compiled("llama-tiny", "fp32", disabled)) as engine:
        want = answer(engine, OTHER, 10)
        state = engine._state
        for name in ("chunk.rows", "chunk.selection", "chunk.next_ids", "batch.next_ids"):
            garbage = np.full(state.size(name) // 4, 0xFFFFFFFE, np.uint32)
            device.upload([(*state[name], garbage)])
        assert answer(engine, OTHER, 10).bits() == want.bits()
        with Session(engine) as session:
            rows = session.prefill_logits(OTHER)
            assert pending(session) == rows[-1].argmax() == want.tokens[0]


def test_a_new_engine_has_no_records(device: Device, compiled: Compiled) -> None:
    """Memory of a closed engine may come back with its records in it."""
    for _ in range(2):
        with open_engine(device, compiled("llama-tiny")) as engine:
            for kind in ("batch", "chunk"):
                assert not engine._host_words(f"{kind}.records").any()
            answer(engine, OTHER, 40)
            assert engine._host_words("batch.records").any()


def test_an_interrupt_ends_a_prompt_between_chunks(
    shared: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shared.device.info.kind != "software" or evaluation._CHUNKS_AHEAD["software"] == 0
    monkeypatch.setattr(evaluation, "_CHUNKS_AHEAD", {shared.device.info.kind: 0})
    submitted, done = list[int](), list[int]()
    submit = shared.submit
    with Session(shared) as session, Session(shared) as other:

        def counted(updates: Any, recordings: Any) -> int:
            submitted.append(session.position)
            return submit(updates, recordings)

        def evaluated(rows: int) -> None:
            done.append(rows)
            if sum(done) == 32:
                raise KeyboardInterrupt

        monkeypatch.setattr(shared, "submit", counted)
        with pytest.raises(KeyboardInterrupt):
            session.prefill(PROMPT, chunk=16, evaluated=evaluated)
        # Nothing was submitted behind the chunk that was interrupted.
        assert submitted == [0, 16] and done == [16, 16]
        assert session.ids == PROMPT[:32] and session.pending is None
        monkeypatch.undo()
        session.prefill(PROMPT[32:], chunk=16)
        other.prefill(PROMPT, chunk=16)
        assert pending(session) == pending(other)
        assert np.array_equal(session.logits(), other.logits())


def test_prefill_tells_of_every_chunk(shared: Engine) -> None:
    done: list[int] = []
    with Session(shared) as session:
        session.prefill(PROMPT, chunk=16, evaluated=done.append)
    assert done == [16] * 6 + [4]


def test_an_interrupted_last_chunk_leaves_no_stale_record(
    shared: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(shared) as session:

        def wait(ticket: int) -> None:
            raise KeyboardInterrupt

        before = shared.emitted.next_number("chunk", 0)
        with monkeypatch.context() as patch:
            patch.setattr(shared, "wait", wait)
            with pytest.raises(KeyboardInterrupt):
                session.prefill(PROMPT[:16])
        assert shared.emitted.next_number("chunk", 0) == before + 1 and session.pending is None


def test_repr(shared: Engine) -> None:
    with Session(shared) as session:
        session.prefill(PROMPT[:16])
        assert repr(session) == f"<Session of 16 of {CONTEXT} tokens, slot {session.slot}>"
        snapshot = session.snapshot()
        assert repr(snapshot) == f"<Snapshot of 16 tokens, {snapshot.nbytes} bytes of KV blocks>"
        snapshot.release()
        assert repr(snapshot) == "<Snapshot of 16 tokens, released>"
    assert repr(session) == "<Session, closed>"
