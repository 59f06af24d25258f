"""Snapshots: restore, fork and rewind give the bits of a session that was never interrupted; what
is shared is never written by two; blocks come back whatever ends first."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hornito.errors import DeviceMemoryError, SessionError
from hornito.runtime.decode import decode, decode_records
from hornito.runtime.engine import Engine
from hornito.runtime.sampler import Sampler, SamplingParams
from hornito.runtime.session import Session
from hornito.vk.device import Device
from tiny import Compiled, leave, open_engine, pending, random_ids

pytestmark = pytest.mark.gpu

MODELS = ("llama-tiny", "mistral-tiny", "phi3-tiny", "gemma3-tiny")
WINDOW = 16
CHUNK = 16
IDS = random_ids(400, seed=41)
NEXT = random_ids(24, seed=42)
DEEP = 5 * WINDOW + 320  # five windows beyond what the rewind budget and a block can hide
SHALLOW: dict[str, Any] = {"context": 512, "chunk_rows": (CHUNK,), "rewind_budget": 16}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, device: Device, compiled: Compiled) -> Iterator[Engine]:
    """A model whose windows of 16 free blocks early, with four slots and pools for them."""
    with open_engine(device, compiled(request.param), slots=4, **SHALLOW) as opened:
        yield opened


def used(engine: Engine) -> list[int]:
    return [pool.used for pool in engine.pools]


def going_on(session: Session, ids: list[int] = NEXT, count: int = 20) -> tuple[Any, ...]:
    """Everything that can be compared of what follows: logits of forced tokens, greedy tokens, and
    the logits after them."""
    rows = session.prefill_logits(ids, chunk=CHUNK)
    tokens = [pending(session)]
    for (new,) in decode([session], [count], ignore_eos=True):
        tokens += new
    return rows.tobytes(), tuple(tokens), session.logits().tobytes(), tuple(session.ids)


def uninterrupted(engine: Engine, position: int, ids: list[int] = NEXT) -> tuple[Any, ...]:
    with Session(engine) as session:
        session.prefill(IDS[:position], chunk=CHUNK)
        return going_on(session, ids)


@pytest.mark.parametrize("position", [63, 64, 65, WINDOW - 1, WINDOW + 1, DEEP])
def test_e2_restored_equals_uninterrupted(model: Engine, position: int) -> None:
    """E2: at block edges, at the window's edges, and far beyond; no token is evaluated again, and
    nothing is copied but a tail block of each kind that is partly filled."""
    want = uninterrupted(model, position)
    start = used(model)
    with Session(model) as a, Session(model) as b:
        a.prefill(IDS[:position], chunk=CHUNK)
        with a.snapshot() as snapshot:
            assert (snapshot.position, snapshot.pending) == (position, a.pending)
            a.prefill(random_ids(70, seed=1))
            before = (model.counters.evaluated_tokens, model.counters.copied_bytes)
            b.restore(snapshot)
            assert (b.position, b.pending, b.ids) == (position, snapshot.pending, IDS[:position])
            assert (model.counters.evaluated_tokens, model.counters.copied_bytes) == before
            assert going_on(b) == want
            evaluated = model.counters.evaluated_tokens - before[0]
            assert evaluated == len(NEXT) + 1  # the last one again for the logits
            tails = sum(pool.kind.block_bytes for pool in model.pools)
            copied = model.counters.copied_bytes - before[1]
            assert copied == (tails if position % 64 else 0)
            # The same one again, over what was there, and where it was made.
            b.restore(snapshot)
            assert going_on(b) == want
            a.restore(snapshot)
            assert going_on(a) == want
            # Its pending token is that of the session.
            b.restore(snapshot)
            (first,) = next(steps := decode([b], [1], ignore_eos=True))
            leave(steps)
            a.rewind(0)
            a.prefill([*IDS[:position]], chunk=CHUNK)
            a.step(pending(a))
            assert [a.pending] == first
    assert used(model) == start


def test_fork_then_diverge(model: Engine) -> None:
    """Both write the tail that they shared, turn by turn and in one batch."""
    other = random_ids(24, seed=43)
    want = [uninterrupted(model, 75, ids) for ids in (NEXT, other)]
    start = used(model)
    with Session(model) as a:
        a.prefill(IDS[:75], chunk=CHUNK)
        with a.fork() as b:
            assert (b.ids, b.pending) == (a.ids, a.pending) and b.slot != a.slot
            rows = [b"", b""]
            for i, (session, ids) in enumerate(((a, NEXT), (b, other))):
                rows[i] = session.prefill_logits(ids, chunk=CHUNK).tobytes()
            assert rows == [want[0][0], want[1][0]]
            assert [a.pending, b.pending] == [want[0][1][0], want[1][1][0]]
    with Session(model) as a:
        a.prefill(IDS[:75], chunk=CHUNK)
        b = a.fork()
        token = pending(a)
        b.pending = 5
        copied = model.counters.copied_bytes
        list(decode([a, b], [20, 20], ignore_eos=True))
        tails = sum(pool.kind.block_bytes for pool in model.pools)
        assert model.counters.copied_bytes - copied == tails  # the second has the old one alone
        found = [session.ids[75:] for session in (a, b)]
        ends = [session.logits().tobytes() for session in (a, b)]
        b.close()
    for i, first in enumerate((token, 5)):
        # A batch of two has kernels of its own: the same partners in the same rows, apart.
        with Session(model) as c, Session(model) as d:
            for session, one in ((c, token), (d, 5)):
                session.prefill(IDS[:75], chunk=CHUNK)
                session.pending = one
            list(decode([c, d], [20, 20], ignore_eos=True))
            session = (c, d)[i]
            assert session.ids[75] == first
            assert (session.ids[75:], session.logits().tobytes()) == (found[i], ends[i])
    assert used(model) == start


@pytest.mark.parametrize("by", [1, 16])
def test_e11_rewind_equals_a_cold_run(model: Engine, by: int) -> None:
    """E11: by one, and by the whole budget, deep in the windows; then logits need a row first."""
    position = 200
    with Session(model) as cold:
        cold.prefill(IDS[:160], chunk=CHUNK)
        cold.prefill(IDS[160 : position - by], chunk=1)
        want = cold.logits().tobytes(), *going_on(cold)
    with Session(model) as session:
        session.prefill(IDS[:160], chunk=CHUNK)
        session.prefill(IDS[160:position], chunk=1)
        session.rewind(position - by)
        with pytest.raises(SessionError, match="needs an evaluated token"):
            session.logits()
        assert going_on(session) == want[1:]


def test_snapshots_between_the_steps_of_a_run(model: Engine) -> None:
    """The device is ahead of the session; what it writes must not reach who restores the snapshot,
    though a new block begins among the steps in flight."""
    start = used(model)
    for position in (52, 57, 58, 60, 70):  # 58: the snapshot is at 64, 52 and 57: just before
        with Session(model) as a, Session(model) as b, Session(model) as c:
            a.prefill(IDS[:position], chunk=CHUNK)
            run = decode([a], [40], ignore_eos=True, steps=6)
            next(run)
            snapshot = a.snapshot()
            ids, here = list(a.ids), a.position
            assert here == position + 6
            for own, pool in zip(snapshot.blocks, model.pools, strict=True):
                assert len(own) == -(-here // 64)
                assert sum(block is not None for block in own) * pool.kind.block_bytes > 0
            # Two go on from it, differently, while the run does.
            b.restore(snapshot)
            c.restore(snapshot)
            b.pending, c.pending = 7, 9
            list(decode([b], [30], ignore_eos=True, steps=16))
            (first,) = next(run)
            list(decode([c], [30], ignore_eos=True, steps=16))
            rest = [token for (new,) in run for token in new]
            snapshot.release()
            found = [s.logits().tobytes() for s in (a, b, c)]
            with Session(model) as d:
                d.prefill(IDS[:position], chunk=CHUNK)
                tokens = [token for (new,) in decode([d], [40], ignore_eos=True) for token in new]
                assert tokens[6:] == first + rest
                assert d.logits().tobytes() == found[0]
                for ends, token in ((found[1], 7), (found[2], 9)):
                    d.rewind(0)
                    d.prefill(IDS[:position], chunk=CHUNK)
                    d.prefill(ids[position:], chunk=1)
                    d.pending = token
                    list(decode([d], [30], ignore_eos=True))
                    assert d.logits().tobytes() == ends
    assert used(model) == start


def test_logits_in_the_middle_of_a_run(model: Engine) -> None:
    """They give up no block that a step in flight has written."""
    with Session(model) as session:
        session.prefill(IDS[:57], chunk=CHUNK)
        want = [token for (new,) in decode([session], [40], ignore_eos=True) for token in new]
        last = session.logits().tobytes()
    with Session(model) as session:
        session.prefill(IDS[:57], chunk=CHUNK)
        tokens = []
        for (new,) in decode([session], [40], ignore_eos=True, steps=7):
            tokens += new
            assert int(session.logits().argmax()) == session.pending
        assert tokens == want and session.logits().tobytes() == last


def test_a_run_ends_when_its_session_is_replaced(model: Engine) -> None:
    """Also when the position happens to be the same; others are not disturbed."""
    want = uninterrupted(model, 66)
    with Session(model) as a, Session(model) as b:
        b.prefill(random_ids(66, seed=9), chunk=CHUNK)
        with b.snapshot() as other:
            a.prefill(IDS[:60], chunk=CHUNK)
            run = decode([a], [40], ignore_eos=True, steps=6)
            next(run)
            assert a.position == other.position == 66
            a.restore(other)
            with pytest.raises(SessionError, match="while a decode run had it"):
                list(run)
            ends = going_on(a)
            b.restore(other)
            assert going_on(b) == ends
        # The run of another session goes on while this one is restored, forked and closed.
        a.rewind(0)
        a.prefill(IDS[:66], chunk=CHUNK)
        a.prefill(NEXT, chunk=CHUNK)
        tokens = [pending(a)]
        with a.snapshot() as snapshot:
            for (new,) in decode([a], [20], ignore_eos=True, steps=3):
                tokens += new
                b.restore(snapshot)
                with b.fork() as c:
                    c.step(7)
                    b.step(9)
        assert tuple(tokens) == want[1]
        assert a.logits().tobytes() == want[2]


def test_a_run_that_is_left_late_takes_nothing_from_the_next(model: Engine) -> None:
    """Not even the block that the next one's steps in flight have begun."""
    with Session(model) as session:
        session.prefill(IDS[:50], chunk=CHUNK)
        want = [token for (new,) in decode([session], [40], ignore_eos=True) for token in new]
    with Session(model) as session:
        session.prefill(IDS[:50], chunk=CHUNK)
        old = decode([session], [100], ignore_eos=True, steps=2)
        tokens = list(next(old)[0])
        run = decode([session], [38], ignore_eos=True, steps=8)
        tokens += next(run)[0]
        leave(old)
        for (new,) in run:
            tokens += new
        assert tokens == want


def test_a_full_pool_loses_nothing(device: Device, compiled: Compiled) -> None:
    """The copies of one kind are made although there is no block left for the next kind."""
    name = compiled("gemma3-tiny")
    with open_engine(device, name, slots=2, **SHALLOW) as engine:
        want = uninterrupted(engine, 75)
    with open_engine(device, name, slots=2, **SHALLOW) as engine, Session(engine) as a:
        a.prefill(IDS[:75], chunk=CHUNK)
        snapshot = a.snapshot()
        for full in range(len(engine.pools)):
            pool = engine.pools[full]
            taken = [pool.take() for _ in range(pool.count - pool.used)]
            before = used(engine)
            with pytest.raises(DeviceMemoryError, match="KV pool is full"):
                a.prefill(NEXT, chunk=CHUNK)
            with pytest.raises(DeviceMemoryError, match="KV pool is full"):
                list(decode([a], [3], ignore_eos=True))
            assert used(engine) == before and (a.ids, a.position) == (IDS[:75], 75)
            for block in taken:
                pool.release(block, engine.last_ticket)
        assert going_on(a) == want
        a.restore(snapshot)
        assert going_on(a) == want
        snapshot.release()


def test_a_queued_copy_outlives_its_source(
    device: Device, compiled: Compiled, tmp_path: Path
) -> None:
    """A run fails when its first session's copy is queued already; then whoever else had the source
    goes, and what the host reads and writes next are the very blocks."""
    with open_engine(device, compiled("gemma3-tiny"), slots=3, **SHALLOW) as engine:
        want = uninterrupted(engine, 75)
        with Session(engine) as a:
            a.prefill(IDS[:75], chunk=CHUNK)
            a.snapshot().save(tmp_path / "before")  # and is gone
        for host in ("save", "load"):
            with Session(engine) as a, Session(engine) as b, Session(engine) as c:
                a.prefill(IDS[:75], chunk=CHUNK)
                snapshot = a.snapshot()
                b.restore(snapshot)
                pool = engine.pools[0]
                taken = [pool.take() for _ in range(pool.count - pool.used - 1)]
                with pytest.raises(DeviceMemoryError, match="KV pool is full"):
                    list(decode([a, b], [3, 3], ignore_eos=True))
                for block in taken:
                    pool.release(block, engine.last_ticket)
                assert len(engine._queued) == len(engine.pools)
                snapshot.release()
                b.close()
                if host == "save":
                    with a.snapshot() as saved:
                        saved.save(tmp_path / "after")
                    c.load(tmp_path / "after")
                else:
                    # Every free block is written, sources and dropped targets among them.
                    with a.fork() as twin:
                        for _ in range(6):
                            c.load(tmp_path / "before")
                        assert going_on(twin) == want
                assert not engine._queued
                assert going_on(c) == want
                assert going_on(a) == want
        assert used(engine) == [0] * len(engine.pools)


def test_blocks_come_back(model: Engine) -> None:
    """200 rounds of create, fork, snapshot and release; whoever is collected returns its own."""
    start = used(model)
    held = len(model.snapshots)
    for turn in range(200):
        with Session(model) as a:
            a.prefill(IDS[: 1 + turn * 7 % 70], chunk=CHUNK)
            with a.fork() as b:
                b.step(5)
                b.snapshot().release()
                snapshot = a.snapshot()
                if turn % 2:
                    a.release()
                a.release()
            if turn % 3:
                snapshot.release()
            snapshot.release()
    assert used(model) == start and not model.tables.entries.any()
    session = Session(model)
    session.prefill(IDS[:100], chunk=CHUNK)
    session.snapshot()
    fork = session.fork()
    fork.step(3)
    kept = fork.snapshot()
    assert sum(used(model)) > sum(start)
    del session, fork
    gc.collect()
    assert model.free_slots == 4 and used(model) != start
    del kept
    gc.collect()
    assert used(model) == start and len(model.snapshots) == held


def test_memory_is_accounted(model: Engine) -> None:
    """By session and snapshot; what is shared counts for each, and once in the pool."""
    sizes = [pool.kind.block_bytes for pool in model.pools]
    start = used(model)
    with Session(model) as a:
        assert a.nbytes == 0
        a.prefill(IDS[:100], chunk=CHUNK)
        held = a.nbytes
        grown = [now - before for now, before in zip(used(model), start, strict=True)]
        assert held == sum(n * size for n, size in zip(grown, sizes, strict=True)) > 0
        with a.snapshot() as snapshot, a.fork() as b:
            assert snapshot.nbytes == b.nbytes == held
            assert [n - s for n, s in zip(used(model), start, strict=True)] == grown
            b.step(1)
            assert b.nbytes == held
            assert sum(used(model)) == sum(start) + sum(grown) + len(sizes)
            snapshot.release()
            assert snapshot.nbytes == 0
            with pytest.raises(SessionError, match="this snapshot was released"):
                a.restore(snapshot)
            with pytest.raises(SessionError, match="this snapshot was released"):
                snapshot.save("nowhere")
        a.release()
        assert a.nbytes == 0
    assert used(model) == start


def test_what_a_closed_session_refuses(model: Engine, tmp_path: Path) -> None:
    with Session(model) as a:
        a.prefill(IDS[:10], chunk=CHUNK)
        snapshot = a.snapshot()
    snapshot.save(tmp_path / "file")
    uses: tuple[Callable[[], object], ...] = (
        a.snapshot,
        a.fork,
        lambda: a.restore(snapshot),
        lambda: a.load(tmp_path / "file"),
        lambda: a.prefill(embeddings=np.zeros((1, model.plan.width))),
    )
    for use in uses:
        with pytest.raises(SessionError, match="this session is closed"):
            use()
    snapshot.release()


def test_another_engine_and_a_closed_one(device: Device, compiled: Compiled, model: Engine) -> None:
    with open_engine(device, compiled("llama-tiny"), slots=2, **SHALLOW) as engine:
        with Session(engine) as a:
            a.prefill(IDS[:10], chunk=CHUNK)
            snapshot = a.snapshot()
        with Session(model) as b, pytest.raises(SessionError, match="only on the engine"):
            b.restore(snapshot)
    for use in (snapshot.check, lambda: snapshot.save("nowhere")):
        with pytest.raises(SessionError, match="the model of this snapshot is closed"):
            use()
    snapshot.release()


def test_no_slot_for_a_fork(device: Device, compiled: Compiled) -> None:
    with open_engine(device, compiled("llama-tiny"), **SHALLOW) as engine, Session(engine) as a:
        a.prefill(IDS[:70], chunk=CHUNK)
        want = a.logits().tobytes()
        before = used(engine)
        with pytest.raises(SessionError, match="all 1 slots are in use"):
            a.fork()
        assert used(engine) == before and a.logits().tobytes() == want


SAMPLERS = (
    SamplingParams(temperature=0.9, seed=7),
    SamplingParams(temperature=1.2, top_k=40, frequency_penalty=0.4, seed=2**63 + 5),
    SamplingParams(repetition_penalty=1.3, logit_bias={3: 0.05, 500: -1.0}),
)


@pytest.mark.parametrize("params", SAMPLERS, ids=["drawn", "penalties", "greedy"])
def test_draws_go_on(model: Engine, params: SamplingParams) -> None:
    """The sampler travels with the session, and the random state is its seed and the position."""
    sampler = Sampler.start(params, 50)

    def drawn(session: Session, count: int) -> list[int]:
        run = decode_records([session], [count], samplers=[session.sampler], ignore_eos=True)
        return [record.token for (records,) in run for record in records]

    with Session(model) as a, Session(model) as b:
        a.prefill(IDS[:50], chunk=CHUNK, sampler=sampler)
        assert a.sampler == sampler
        first = drawn(a, 20)
        with a.snapshot() as snapshot:
            rest = drawn(a, 30)
            b.prefill([1], chunk=CHUNK)
            samplers = [b.sampler]
            b.restore(snapshot)
            samplers.append(b.sampler)
            assert samplers == [None, sampler] and b.ids[51:] == first[:-1]
            assert drawn(b, 30) == rest
    assert len(set(first + rest)) > 5
