"""Sliding windows whose blocks are freed: the tokens of a full cache, the memory of the window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gguf_samples import HF
from hornito.errors import SessionError
from hornito.plan.plan import build_plan
from hornito.runtime.decode import decode
from hornito.runtime.engine import Engine
from hornito.runtime.memory import kv_pool_sizes
from hornito.runtime.session import Session
from hornito.vk.device import Device
from oracle import Oracle
from tiny import Compiled, differing_steps, open_engine, pending, random_ids

pytestmark = pytest.mark.gpu

WINDOW = 16
BUDGET = 16
CHUNK = 16
NAMES = ("mistral-tiny", "phi3-tiny", "gemma3-tiny", "gemma2-tiny")
IDS = random_ids(400, seed=51)
FULL = 1 << 20  # a rewind budget that frees nothing


@pytest.fixture(scope="module", params=NAMES)
def pair(
    request: pytest.FixtureRequest, device: Device, compiled: Compiled
) -> Iterator[tuple[str, Engine, Engine]]:
    """A model's name, an engine that frees blocks early, and one that keeps them all."""
    package = compiled(request.param)
    shared: dict[str, Any] = {"context": 512, "slots": 2, "chunk_rows": (CHUNK,)}
    with ExitStack() as stack:
        freeing, keeping = (
            stack.enter_context(open_engine(device, package, rewind_budget=budget, **shared))
            for budget in (BUDGET, FULL)
        )
        yield request.param, freeing, keeping


def sliding(engine: Engine) -> list[int]:
    """The kinds with a window."""
    return [i for i, kind in enumerate(engine.plan.kinds) if kind.window]


def everything(engine: Engine, chunk: int | None) -> tuple[bytes, list[int], bytes]:
    """Logits of 400 tokens, 60 greedy ones, and the logits after them."""
    with Session(engine) as session:
        rows = session.prefill_logits(IDS, chunk=chunk)
        tokens = [pending(session)]
        for (new,) in decode([session], [60], ignore_eos=True):
            tokens += new
        return rows.tobytes(), tokens, session.logits().tobytes()


def test_freed_equals_a_full_cache(pair: tuple[str, Engine, Engine]) -> None:
    """Bit by bit over 400 positions and 60 steps; and both are what the model is."""
    name, freeing, keeping = pair
    exact = Oracle(HF / name).logits(IDS)
    for chunk in (CHUNK, 1):
        got, want = everything(freeing, chunk), everything(keeping, chunk)
        assert got == want
        rows = np.frombuffer(got[0], np.float32).reshape(len(IDS), -1)
        assert np.abs(rows - exact).max() < 1e-3
        assert differing_steps(rows, exact.astype(np.float32)) == []
    for kind in sliding(keeping):
        assert keeping.plan.kinds[kind].window == WINDOW


def test_memory_does_not_grow_with_the_context(pair: tuple[str, Engine, Engine]) -> None:
    """Blocks of sliding kinds stay those of a window, through prefill and decoding."""
    _, freeing, keeping = pair
    most = {kind: 0 for kind in sliding(freeing)}
    with Session(freeing) as session:
        for start in range(0, 400, 20):
            session.prefill(IDS[start : start + 20])
            for kind in most:
                most[kind] = max(most[kind], freeing.pools[kind].used)
                assert session.blocks.held()[kind] == freeing.pools[kind].used
        for _ in decode([session], [100], ignore_eos=True, steps=4):
            for kind in most:
                most[kind] = max(most[kind], freeing.pools[kind].used)
        held = session.blocks.held()
        assert session.position == 500
    # 16 of the window, 16 of the budget and a chunk lie in two blocks, or in three for a while.
    assert set(most.values()) <= {2, 3}
    for kind, pool in enumerate(freeing.pools):
        assert held[kind] in ((1, 2) if pool.kind.window else (8,))
    with Session(keeping) as session:
        session.prefill(IDS)
        assert session.blocks.held() == [7] * len(keeping.pools)


def test_large_chunks_over_block_edges(device: Device, compiled: Compiled) -> None:
    """Chunks of 256 rows with a window of 16: their blocks come and go, the last window stays."""
    with open_engine(device, compiled("gemma3-tiny"), rewind_budget=BUDGET) as engine:
        exact = Oracle(HF / "gemma3-tiny").logits(IDS)
        with Session(engine) as session:
            rows = session.prefill_logits(IDS)
            (kind,) = sliding(engine)
            assert np.abs(rows - exact).max() < 1e-3
            assert session.blocks.held()[kind] <= 5  # of the chunk from 256 on
            session.step(pending(session))
            assert session.blocks.held()[kind] == 2  # from 400 - 2 * 16 on
        with Session(engine) as session:
            parts = [session.prefill_logits(IDS[a:b]) for a, b in ((0, 61), (61, 129), (129, 400))]
        assert np.abs(np.concatenate(parts) - exact).max() < 1e-3


def test_rewind_beyond_the_budget(pair: tuple[str, Engine, Engine]) -> None:
    """An error that says what it would take, and changes nothing; or the tokens are evaluated
    again, which is what a new session would do."""
    _, freeing, keeping = pair
    with Session(freeing) as session:
        session.prefill(IDS[:300])
        first = session.blocks.first_kept
        assert 300 - BUDGET - 64 < first <= 300 - BUDGET
        last, token = session.logits().tobytes(), session.pending
        for position in (1, 100, first - 1):
            with pytest.raises(SessionError, match=rf"from {first} on .*rewind budget {BUDGET}\)"):
                session.rewind(position)
        assert (session.position, session.pending) == (300, token)
        assert session.logits().tobytes() == last
        session.rewind(first)
        rows = session.prefill_logits(IDS[first:300], chunk=1)
        with Session(keeping) as other:
            other.prefill(IDS[:first])
            assert other.prefill_logits(IDS[first:300], chunk=1).tobytes() == rows.tobytes()
        before = freeing.counters.evaluated_tokens
        session.rewind(100, refill=True)
        assert freeing.counters.evaluated_tokens - before == 100
        assert (session.position, session.pending, session.ids) == (100, None, IDS[:100])
        rows = session.prefill_logits(IDS[100:150])
        with Session(freeing) as other:
            other.prefill(IDS[:100])
            assert other.prefill_logits(IDS[100:150]).tobytes() == rows.tobytes()
        # Nothing is left to evaluate at the beginning.
        before = freeing.counters.evaluated_tokens
        session.rewind(0)
        assert freeing.counters.evaluated_tokens == before and session.blocks.nbytes == 0


def test_rewind_within_the_budget_from_anywhere(pair: tuple[str, Engine, Engine]) -> None:
    """Whatever moved the session forward, the budget's positions are there."""
    _, freeing, _ = pair
    with Session(freeing) as session:
        session.prefill(IDS[:128])
        for count in (1, 16, 63, 65, 30, 97):
            session.prefill(IDS[:count])
            session.rewind(session.position - min(BUDGET, count))
        session.step(5)
        list(decode([session], [57], ignore_eos=True, steps=16))
        session.rewind(session.position - BUDGET)
        session.step(5)


def test_budget_of_zero(device: Device, compiled: Compiled) -> None:
    """Nothing beyond the window is kept, and logits() still has its row."""
    with (
        open_engine(device, compiled("mistral-tiny"), chunk_rows=(16,), rewind_budget=0) as engine,
        open_engine(device, compiled("mistral-tiny"), chunk_rows=(16,), rewind_budget=FULL) as full,
    ):
        for count in (80, 81, 95, 143, 144, 145, 207, 208, 209):
            found = []
            for one in (engine, full):
                with Session(one) as session:
                    session.prefill(IDS[:count], chunk=16)
                    found.append(session.logits().tobytes())
                    found[-1] += session.logprobs(IDS[300:310], chunk=16).tobytes()
                    found[-1] += session.logits().tobytes()
            assert found[0] == found[1], count


def test_two_snapshots_and_a_session_fit(pair: tuple[str, Engine, Engine]) -> None:
    """The pools of a slot hold a prefix, a later snapshot and a session that has left both behind,
    at every position."""
    _, freeing, _ = pair
    one = replace(freeing.options, slots=1)
    plan = build_plan(freeing.graph, freeing.device.caps, one)
    counts = kv_pool_sizes(plan, one)
    with Session(freeing) as session:
        session.prefill(IDS[:130])
        with session.snapshot():
            session.prefill(IDS[130:258])
            with session.snapshot():
                session.prefill(IDS[258:])
                most = [pool.used for pool in freeing.pools]
                for _ in decode([session], [112], ignore_eos=True, steps=16):
                    most = [max(a, p.used) for a, p in zip(most, freeing.pools, strict=True)]
                assert session.position == 512
    assert all(a <= b for a, b in zip(most, counts, strict=True)), (most, counts)
