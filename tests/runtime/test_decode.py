"""Decode runs: ends, limits, several steps a submission, and who may come in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hornito.compiler import compile_source
from hornito.errors import HornitoError, SessionError, UsageError
from hornito.runtime.decode import decode
from hornito.runtime.engine import Engine
from hornito.runtime.session import Session
from hornito.vk.device import Device
from tiny import (
    CONTEXT,
    Answer,
    Compiled,
    answer,
    leave,
    open_engine,
    pending,
    random_ids,
    spoil,
    write_llama,
)

pytestmark = pytest.mark.gpu

PROMPT = random_ids(50, seed=21)
OTHER = random_ids(9, seed=22)
COUNT = 30


@pytest.fixture(scope="module")
def reference(engine: Engine) -> Answer:
    return answer(engine, PROMPT, COUNT)


def first_seen(tokens: list[int], start: int) -> int:
    """The first index from `start` on whose token has not come before."""
    return next(i for i in range(start, len(tokens)) if tokens[i] not in tokens[:i])


def collect(
    sessions: list[Session], counts: list[int], **options: bool | int
) -> tuple[list[list[int]], list[list[int]]]:
    """All tokens of each session, and how many came with each submission."""
    tokens = [[pending(session)] for session in sessions]
    sizes: list[list[int]] = [[] for _ in sessions]
    for new in decode(sessions, counts, **options):  # type: ignore[arg-type]
        for i, found in enumerate(new):
            tokens[i] += found
            sizes[i].append(len(found))
    return tokens, sizes


@pytest.mark.parametrize("steps", [1, 4, 5, 64])
def test_an_end_token_ends(
    device: Device, compiled: Compiled, reference: Answer, steps: int
) -> None:
    """In the middle of a submission, at its last step, and in the first one."""
    at = first_seen(reference.tokens, 8)
    eos = reference.tokens[at]
    with (
        open_engine(device, compiled("llama-tiny"), eos_ids=(511, eos)) as engine,
        Session(engine) as session,
    ):
        session.logprobs(PROMPT)
        (tokens,), _ = collect([session], [COUNT - 1], steps=steps)
        assert tokens == reference.tokens[: at + 1]
        # The end token is pending, not evaluated.
        assert session.ids == PROMPT + tokens[:-1] and session.pending == eos
        (more,), _ = collect([session], [COUNT - 1 - at], steps=steps, ignore_eos=True)
        assert more == reference.tokens[at:]
        assert session.logits().tobytes() == reference.last.tobytes()


def test_end_tokens_can_be_ignored(device: Device, compiled: Compiled, reference: Answer) -> None:
    with open_engine(device, compiled("llama-tiny"), eos_ids=reference.tokens) as engine:
        assert answer(engine, PROMPT, COUNT).bits() == reference.bits()
        with Session(engine) as session:
            session.prefill(PROMPT)
            (tokens,), _ = collect([session], [COUNT - 1])
            assert tokens == reference.tokens[:2]


@pytest.mark.parametrize("steps", [3, 8])
def test_one_ends_while_the_other_goes_on(device: Device, compiled: Compiled, steps: int) -> None:
    with open_engine(device, compiled("llama-tiny"), slots=2) as engine:
        with Session(engine) as a, Session(engine) as b:
            a.prefill(PROMPT)
            b.prefill(OTHER)
            want, _ = collect([a, b], [COUNT, COUNT], steps=steps)
            last = b.logits().tobytes()
        at = first_seen(want[0], 5)
        assert want[0][at] not in want[1]
    with (
        open_engine(device, compiled("llama-tiny"), slots=2, eos_ids=(want[0][at],)) as engine,
        Session(engine) as a,
        Session(engine) as b,
    ):
        a.prefill(PROMPT)
        b.prefill(OTHER)
        got, sizes = collect([a, b], [COUNT, COUNT], steps=steps)
        assert got == [want[0][: at + 1], want[1]]
        assert b.logits().tobytes() == last
        assert (a.position, b.position) == (len(PROMPT) + at, len(OTHER) + COUNT)
        assert sum(sizes[0]) == at and max(sizes[1]) == steps


def test_counts(shared: Engine) -> None:
    """Each session gets what was asked for it; none is nothing."""
    with Session(shared) as a, Session(shared) as b, Session(shared) as c:
        for session, prompt in ((a, PROMPT), (b, OTHER), (c, PROMPT)):
            session.prefill(prompt)
        before = c.pending
        tokens, _ = collect([a, b, c], [3, 20, 0], ignore_eos=True)
        assert [len(t) for t in tokens] == [4, 21, 1]
        assert (a.position, b.position, c.position) == (53, 29, 50)
        assert c.pending == before
        assert list(decode([a, b], [0, 0])) == []


@pytest.mark.parametrize("steps", [1, 8, 100])
def test_the_context_is_the_limit(engine: Engine, steps: int) -> None:
    ids = random_ids(CONTEXT - 12, seed=23)
    with Session(engine) as session:
        session.prefill(ids)
        (tokens,), _ = collect([session], [50], ignore_eos=True, steps=steps)
        assert len(tokens) == 13 and session.position == CONTEXT
        assert session.ids == ids + tokens[:-1] and session.pending == tokens[-1]
        assert list(decode([session], [5], ignore_eos=True)) == []
        assert session.logits().argmax() == session.pending


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_stopping_early(engine: Engine, reference: Answer, taken: int) -> None:
    """What the device computed ahead is dropped; going on equals never having stopped."""
    with Session(engine) as session:
        session.logprobs(PROMPT)
        tokens = [pending(session)]
        run = decode([session], [100], ignore_eos=True, steps=4)
        for _ in range(taken):
            tokens += next(run)[0]
        leave(run)
        assert len(tokens) == 1 + 4 * taken
        assert session.ids == PROMPT + tokens[:-1] and session.pending == tokens[-1]
        (more,), _ = collect([session], [COUNT - len(tokens)], ignore_eos=True, steps=8)
        assert tokens + more[1:] == reference.tokens
        assert session.logits().tobytes() == reference.last.tobytes()


def test_a_run_that_never_began(engine: Engine) -> None:
    with Session(engine) as session:
        session.prefill(PROMPT)
        run = decode([session], [5])
        leave(run)
        assert session.position == len(PROMPT) and session.pending is not None


def test_runs_and_calls_may_alternate(shared: Engine) -> None:
    """Two runs, a prefill and single steps share the engine's row records turn by turn."""
    alone = [answer(shared, prompt, COUNT) for prompt in (PROMPT, OTHER)]
    with Session(shared) as a, Session(shared) as b, Session(shared) as c:
        a.logprobs(PROMPT)
        b.logprobs(OTHER)
        tokens = [[pending(a)], [pending(b)]]
        runs = [
            decode([a], [COUNT - 1], ignore_eos=True, steps=4),
            decode([b], [COUNT - 1], ignore_eos=True, steps=3),
        ]
        for turn in range(COUNT):
            for run, mine in zip(runs, tokens, strict=True):
                for new in next(run, []):
                    mine += new
                if turn < 15:
                    c.step(OTHER[turn % len(OTHER)])
            if turn % 3 == 0:
                c.logits()
        assert tokens == [alone[0].tokens, alone[1].tokens]
        assert a.logits().tobytes() == alone[0].last.tobytes()
        assert b.logits().tobytes() == alone[1].last.tobytes()
        with Session(shared) as d:
            for token in c.ids:
                d.step(token)
            assert d.pending == c.pending and d.logits().tobytes() == c.logits().tobytes()


def test_an_end_token_is_remembered_when_someone_comes_in_between(
    device: Device, compiled: Compiled, reference: Answer
) -> None:
    """An end at the last step of a submission: the row must not come back to life."""
    at = first_seen(reference.tokens, 8)
    eos = reference.tokens[at]
    with (
        open_engine(device, compiled("llama-tiny"), slots=2, eos_ids=(eos,)) as engine,
        Session(engine) as a,
        Session(engine) as b,
    ):
        a.prefill(PROMPT)
        tokens = [pending(a)]
        for new in decode([a], [COUNT], steps=at):
            tokens += new[0]
            b.step(7)
        assert tokens == reference.tokens[: at + 1]


def test_a_session_must_not_move_during_its_run(engine: Engine) -> None:
    with Session(engine) as session:
        session.prefill(PROMPT)
        run = decode([session], [20], ignore_eos=True, steps=2)
        next(run)
        session.rewind(3)
        with pytest.raises(SessionError, match="moved from position 52 to 3 while a decode run"):
            list(run)
        session.prefill(PROMPT[3:])
        found = pending(session)
    assert found == answer(engine, PROMPT, 1).tokens[0]


def test_a_session_closed_during_its_run(shared: Engine) -> None:
    session = Session(shared)
    session.prefill(PROMPT)
    run = decode([session], [20], ignore_eos=True, steps=2)
    next(run)
    session.close()
    with pytest.raises(SessionError, match="this session is closed"):
        list(run)


def test_an_engine_closed_during_a_run(device: Device, compiled: Compiled) -> None:
    with open_engine(device, compiled("llama-tiny")) as engine:
        session = Session(engine)
        session.prefill(PROMPT)
        run = decode([session], [20], ignore_eos=True, steps=2)
        next(run)
    leave(run)
    session.close()
    with pytest.raises(SessionError, match="this model is closed"):
        Session(engine)
    assert device.allocated_bytes == sum(device.memory_report().values())


def test_errors(shared: Engine, device: Device, compiled: Compiled) -> None:
    with Session(shared) as a, Session(shared) as b:
        with pytest.raises(SessionError, match="needs a pending token; call prefill"):
            list(decode([a], [5]))
        a.prefill(PROMPT)
        b.prefill(OTHER)
        with pytest.raises(SessionError, match="can't be in a batch twice"):
            list(decode([a, a], [5, 5]))
        with pytest.raises(UsageError, match="1 counts for 2 sessions"):
            list(decode([a, b], [5]))
        with pytest.raises(UsageError, match="steps must be 1 to 128, not 0"):
            list(decode([a], [5], steps=0))
        with pytest.raises(UsageError, match="steps must be 1 to 128, not 129"):
            list(decode([a], [5], steps=129))
        with (
            open_engine(device, compiled("llama-tiny")) as other,
            Session(other) as stranger,
            pytest.raises(SessionError, match="sessions of one engine, not of 2"),
        ):
            stranger.prefill(OTHER)
            list(decode([a, stranger], [5, 5]))
        with pytest.raises(SessionError, match="of one engine, not of 0"):
            list(decode([], []))
        # None of this has left a mark.
        (tokens,), _ = collect([a], [10], ignore_eos=True)
        assert tokens == answer(shared, PROMPT, 11).tokens


def test_more_sessions_than_the_largest_bucket(device: Device, compiled: Compiled) -> None:
    with open_engine(device, compiled("llama-tiny"), slots=17, context=64) as engine:
        sessions = [Session(engine) for _ in range(17)]
        for session in sessions:
            session.prefill(OTHER)
        with pytest.raises(UsageError, match="17 sessions exceed the largest batch"):
            list(decode(sessions, [3] * 17))
        for session in sessions:
            session.close()


@pytest.fixture(scope="module")
def damaged_file(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding of id 7 holds a NaN, and that of id 8 a number beyond fp16."""
    folder: Path = tmp_path_factory.mktemp("damaged")
    table = np.random.default_rng(1).standard_normal((300, 32)).astype(np.float32)
    write_llama(folder / "hf", vocabulary=300, tensors={"model.embed_tokens.weight": table})
    compile_source(folder / "hf", folder / "model.vxm", weights="fp32")
    spoil(folder / "model.vxm", "model.embed_tokens.weight", 7, 3, np.nan)
    spoil(folder / "model.vxm", "model.embed_tokens.weight", 8, 3, 1e6)
    return folder / "model.vxm"


@pytest.fixture(scope="module")
def damaged(device: Device, damaged_file: Path) -> Iterator[Engine]:
    with open_engine(device, damaged_file, slots=2) as engine:
        yield engine


def test_a_nan_is_an_error_not_a_token(damaged: Engine) -> None:
    good = random_ids(10, seed=9, vocabulary=300)
    assert 7 not in good
    want = answer(damaged, good, 12).tokens
    with Session(damaged) as session:
        with pytest.raises(HornitoError, match=r"logits of row 0 are not finite.*hornito verify"):
            session.prefill([*good, 7])
        with pytest.raises(SessionError):
            session.logits()
        session.rewind(0)
        session.prefill(good)
        assert pending(session) == want[0]
    assert answer(damaged, good, 12).tokens == want


def test_a_nan_in_a_run_leaves_no_trace(damaged: Engine) -> None:
    """Records of the failed run must not be taken for those of the next."""
    good = random_ids(10, seed=9, vocabulary=300)
    want = answer(damaged, good, 12).tokens
    with Session(damaged) as a, Session(damaged) as b:
        a.prefill(good)
        b.prefill(good)
        a.pending = b.pending = 7
        with pytest.raises(HornitoError, match="row 0 are not finite"):
            list(decode([a, b], [5, 5], ignore_eos=True, steps=2))
        for session in (a, b):
            session.rewind(0)
            session.prefill(good)
        tokens, _ = collect([a, b], [11, 11], ignore_eos=True, steps=2)
        assert tokens == [want, want]


def test_values_in_fp16_saturate_and_keep_a_nan(device: Device, damaged_file: Path) -> None:
    """At precision `low` what is beyond fp16 is its largest number, and a NaN is reported."""
    with (
        open_engine(
            device, damaged_file, half_values=True, kv_half=True, keep_values=True
        ) as engine,
        Session(engine) as session,
    ):
        session.prefill([5, 8])
        embedding = next(node for node in engine.graph if node.op == "embedding").outputs[0]
        assert engine.value("chunk", 16, embedding, 2)[1, 3] == 65504.0
        assert np.isfinite(session.logits()).all() and pending(session) < 300
        for ids in ([7], [9, 7]):  # by a step, and by a chunk
            session.rewind(0)
            with pytest.raises(HornitoError, match=r"logits of row 0 are not finite"):
                session.prefill(ids)
