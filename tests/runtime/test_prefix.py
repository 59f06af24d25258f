"""Prefix reuse, embeddings as input, and the memory of prefill given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from gguf_samples import HF
from hornito.errors import ContextOverflowError, SessionError, UsageError
from hornito.runtime.decode import decode
from hornito.runtime.engine import Engine
from hornito.runtime.overflow import Overflow
from hornito.runtime.prefix import best_match, common_prefix, start_from_prefix
from hornito.runtime.session import Session
from hornito.runtime.snapshot import EMBEDDED
from hornito.vk.device import Device
from oracle import Oracle
from tiny import Compiled, Floats, assert_same_tokens, open_engine, pending, random_ids

pytestmark = pytest.mark.gpu

CHUNK = 16
PREFIX = random_ids(70, seed=61)
MORE = random_ids(40, seed=62)
SHARED = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, len(PREFIX))
OPTIONS: dict[str, Any] = {"context": 256, "slots": 3, "chunk_rows": (CHUNK,), "rewind_budget": 16}


@pytest.fixture(scope="module", params=["llama-tiny", "mistral-tiny", "gemma3-tiny"])
def model(request: pytest.FixtureRequest, device: Device, compiled: Compiled) -> Iterator[Engine]:
    with open_engine(device, compiled(request.param), **OPTIONS) as opened:
        yield opened


def sharing(k: int) -> list[int]:
    """A prompt that has k tokens in common with the prefix, and more behind them."""
    other = [(token + 1) % 500 + 3 for token in PREFIX[k:]]
    assert k == len(PREFIX) or other[0] != PREFIX[k]
    return PREFIX[:k] + other[: 30 if k < len(PREFIX) else 0] + MORE


def cold(engine: Engine, ids: list[int]) -> Floats:
    """Logits after every id, in one session of its own."""
    with Session(engine) as session:
        return session.prefill_logits(ids)


@pytest.mark.parametrize("k", SHARED)
def test_e6_prompts_that_share_k_tokens(model: Engine, k: int) -> None:
    """E6, E13: logits of every token that is evaluated equal a cold run's, counters say how many
    were not, and the snapshot stays what it was."""
    ids = sharing(k)
    want = cold(model, ids)
    with Session(model) as first:
        first.prefill(PREFIX, chunk=CHUNK)
        snapshot = first.snapshot()
    with snapshot, Session(model) as session:
        # A window that has passed lets a snapshot be taken as a whole, or near its end.
        reusable = k if k == len(PREFIX) or k >= snapshot.first_kept else 0
        before = model.counters.evaluated_tokens
        reused = start_from_prefix(session, ids)
        assert reused == session.position == reusable
        assert session.ids == ids[:reused]
        assert model.counters.evaluated_tokens == before
        rows = session.prefill_logits(ids[reused:])
        assert model.counters.evaluated_tokens - before == len(ids) - reused
        assert_same_tokens(rows, want[reused:])
        session.rewind(0)
        # The prompt that was evaluated above has left nothing in the snapshot.
        session.restore(snapshot)
        again = session.prefill_logits(MORE, chunk=CHUNK)
        with Session(model) as fresh:
            fresh.prefill(PREFIX, chunk=CHUNK)
            assert fresh.prefill_logits(MORE, chunk=CHUNK).tobytes() == again.tobytes()


def test_e6_at_least_one_token_is_evaluated(model: Engine) -> None:
    """E6: the very prompt of the snapshot, and the beginning of it."""
    want = cold(model, PREFIX)
    with Session(model) as first:
        first.prefill(PREFIX, chunk=CHUNK)
        snapshot = first.snapshot()
    with snapshot, Session(model) as session:
        assert start_from_prefix(session, PREFIX) == len(PREFIX) - 1
        rows = session.prefill_logits(PREFIX[-1:])
        assert_same_tokens(rows, want[-1:])
        short = PREFIX[: len(PREFIX) - 10]
        assert start_from_prefix(session, short) == len(short) - 1
        assert_same_tokens(session.prefill_logits(short[-1:]), want[len(short) - 1 : len(short)])
        assert start_from_prefix(session, PREFIX[:1]) == 0
        assert session.position == 0


def test_the_longest_is_taken(model: Engine) -> None:
    """Of several snapshots, and of what the session holds itself; none once they are released."""
    with Session(model) as first, Session(model) as session:
        snapshots = []
        for count in (20, 60, 40):
            first.rewind(0)
            first.prefill(PREFIX[:count])
            snapshots.append(first.snapshot())
        match = best_match(snapshots, PREFIX)
        assert match is not None and (match.snapshot, match.tokens) == (snapshots[1], 60)
        assert best_match(snapshots, MORE) is None
        assert start_from_prefix(session, PREFIX) == 60
        session.prefill(PREFIX[60:68])
        before = model.counters.evaluated_tokens
        assert start_from_prefix(session, [*PREFIX, 5]) == 68  # its own
        assert model.counters.evaluated_tokens == before
        for snapshot in snapshots:
            snapshot.release()
        first.rewind(0)
        assert start_from_prefix(first, PREFIX) == 0


def test_common_prefix() -> None:
    assert common_prefix([], [1]) == 0 and common_prefix([1, 2, 3], [1, 2]) == 2
    assert common_prefix([1, 9, 3], [1, 2, 3]) == 1
    # An embedding says nothing about the next one.
    assert common_prefix([1, EMBEDDED, 3], [1, EMBEDDED, 3]) == 1


# -- embeddings ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables() -> dict[str, Floats]:
    """The embedding tables of the models, as the gather gives them: unscaled."""
    found = {}
    for name in ("llama-tiny", "gemma3-tiny", "mistral-tiny"):
        stored = load_file(HF / name / "model.safetensors")
        found[name] = stored["model.embed_tokens.weight"].astype(np.float32)
    return found


@pytest.mark.parametrize("name", ["llama-tiny", "gemma3-tiny"])
def test_rows_of_the_table_equal_their_ids(
    device: Device, compiled: Compiled, tables: dict[str, Floats], name: str
) -> None:
    """Bit by bit, mixed with ids in any order, over chunk and block edges, with drawn tokens behind
    them. A row takes the place of the scaled embedding, so gemma's factor is the caller's."""
    ids = random_ids(120, seed=63)
    scale = np.float32(1.0)
    if name.startswith("gemma"):
        scale = np.float32(np.sqrt(tables[name].shape[1]))
    rows = tables[name][ids] * scale
    with open_engine(device, compiled(name), **OPTIONS) as engine:
        with Session(engine) as a, Session(engine) as b:
            for start, stop in ((0, 16), (16, 48), (48, 49), (49, 64), (64, 120)):
                a.prefill(ids[start:stop])
                if start in (16, 48, 64):
                    b.prefill(embeddings=rows[start:stop])
                else:
                    b.prefill(ids[start:stop])
            assert b.ids[:16] == ids[:16] and b.ids[16:49] == [EMBEDDED] * 33
            assert b.pending == a.pending and sorted(b.vectors) == [*range(16, 49), *range(64, 120)]
            # The last one again, which is an embedding.
            last = a.logits()
            assert b.logits().tobytes() == last.tobytes()
            assert b.logprobs(MORE).tobytes() == a.logprobs(MORE).tobytes()
            got = [[t for (new,) in decode([s], [9], ignore_eos=True) for t in new] for s in (a, b)]
            assert got[0] == got[1] and a.logits().tobytes() == b.logits().tobytes()
            exact = Oracle(HF / name).logits(ids)[-1]
            assert np.abs(last - exact).max() < 1e-3
        if name.startswith("gemma"):
            with Session(engine) as c:
                c.prefill(embeddings=tables[name][ids])
                assert np.abs(c.logits() - exact).max() > 1e-2  # the factor is not applied


def test_embeddings_survive_everything(model: Engine, tmp_path: Path) -> None:
    """Snapshot, file, fork, rewind and refill; forgotten where they were rewound."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((40, model.plan.width)).astype(np.float32)
    ids = random_ids(200, seed=64)

    def begin(session: Session) -> None:
        session.prefill(ids[:20])
        session.prefill(embeddings=rows)
        session.prefill(ids[20:140])

    with Session(model) as a:
        begin(a)
        want = a.prefill_logits(MORE, chunk=CHUNK).tobytes()
    with Session(model) as a, Session(model) as b:
        begin(a)
        with a.snapshot() as snapshot:
            snapshot.save(tmp_path / "file")
            b.restore(snapshot)
            assert b.prefill_logits(MORE, chunk=CHUNK).tobytes() == want
            assert start_from_prefix(b, ids) == 20 or snapshot.first_kept > 20
        b.load(tmp_path / "file")
        assert b.ids == a.ids and sorted(b.vectors) == list(range(20, 60))
        assert b.prefill_logits(MORE, chunk=CHUNK).tobytes() == want
        with a.fork() as c:
            assert c.prefill_logits(MORE, chunk=CHUNK).tobytes() == want
        b.rewind(50, refill=True)  # into the embeddings; windows evaluate them again
        assert sorted(b.vectors) == list(range(20, 50))
        b.prefill(embeddings=rows[30:])
        b.prefill(ids[20:140])
        assert b.prefill_logits(MORE, chunk=CHUNK).tobytes() == want
        b.rewind(10, refill=True)
        assert b.vectors == {}
        # The context's end: rebuilt from the rows that are kept.
        begin(b)
        held = [*b.ids]
        b.rebuild(held, Overflow("truncate", keep_first=40, keep_last=110))
        kept = [*range(40), *range(len(held) - 110, len(held))]
        assert [held[at] for at in kept] == b.ids
        assert sorted(b.vectors) == list(range(30, 40))
        rebuilt = b.logits()
        with Session(model) as c:
            for at in kept:
                if held[at] == EMBEDDED:
                    c.prefill(embeddings=rows[at - 30][None])
                else:
                    c.prefill([held[at]])
            assert_same_tokens(c.logits()[None], rebuilt[None])
        # Embeddings alone can be shortened, too.
        b.rewind(0)
        b.prefill(embeddings=np.concatenate([rows] * 5))
        b.rebuild(b.ids, Overflow("truncate", keep_last=40))
        with Session(model) as c:
            c.prefill(embeddings=rows)
            assert (b.pending, b.logits().tobytes()) == (c.pending, c.logits().tobytes())


def test_embeddings_that_are_refused(model: Engine) -> None:
    width = model.plan.width
    with Session(model) as session:
        session.prefill(PREFIX)
        state = (session.ids[:], session.pending, session.logits().tobytes())
        bad = np.zeros((3, width), np.float32)
        nan, inf = bad.copy(), bad.copy()
        nan[1, 2], inf[2, 0] = np.nan, np.inf
        for rows, message in (
            (bad[0], rf"must be \[T, {width}\] with T >= 1, not \({width},\)"),
            (bad[:, 1:], rf"not \(3, {width - 1}\)"),
            (bad[:0], rf"not \(0, {width}\)"),
            (bad[None], "embeddings must be"),
            (nan, "embeddings must be finite"),
            (inf, "embeddings must be finite"),
        ):
            with pytest.raises(UsageError, match=message):
                session.prefill(embeddings=rows)
        with pytest.raises(UsageError, match="ids or embeddings"):
            session.prefill([1], embeddings=bad)
        with pytest.raises(ContextOverflowError, match="256"):
            session.prefill(embeddings=np.zeros((200, width)))
        with pytest.raises(UsageError, match="token id -1 is outside"):
            session.prefill([EMBEDDED])
        assert (session.ids, session.pending, session.logits().tobytes()) == state
        assert session.vectors == {}


# -- release_prefill ----------------------------------------------------------------------------


def test_prefill_memory_is_given_back(device: Device, compiled: Compiled) -> None:
    """As many bytes as it says, by the device's report; sessions, snapshots and an open run go on,
    and prompts are evaluated token by token."""
    others = device.allocated_bytes
    with open_engine(device, compiled("gemma3-tiny"), context=256, slots=3) as engine:
        want = cold(engine, PREFIX + MORE)
        a, b = Session(engine), Session(engine)
        a.prefill(PREFIX)
        snapshot = a.snapshot()
        b.prefill(PREFIX, chunk=1)
        tokens = [token for (new,) in decode([b], [20], ignore_eos=True) for token in new]
        b.rewind(len(PREFIX) - 1)
        b.step(PREFIX[-1])
        run = decode([b], [20], ignore_eos=True, steps=4)
        first = list(next(run)[0])
        before = device.memory_report(), device.allocated_bytes
        freed = engine.release_prefill()
        assert freed > 0
        assert before[0]["activations"] - device.memory_report()["activations"] == freed
        assert before[1] - device.allocated_bytes == freed
        assert engine.memory.total == device.allocated_bytes - others
        assert first + [token for (new,) in run for token in new] == tokens
        a.restore(snapshot)
        assert_same_tokens(a.prefill_logits(MORE), want[len(PREFIX) :])
        with Session(engine) as c:
            assert_same_tokens(c.prefill_logits(PREFIX), want[: len(PREFIX)])
            c.logprobs(MORE)
            assert c.logits().argmax() == pending(c)
        with pytest.raises(UsageError, match=r"chunk must be one of \[1\]"):
            a.prefill(MORE, chunk=16)
        assert engine.release_prefill() == 0
        for one in (snapshot, a, b):
            one.release()
        assert [pool.used for pool in engine.pools] == [0, 0]
    with pytest.raises(SessionError, match="closed"):
        engine.release_prefill()
