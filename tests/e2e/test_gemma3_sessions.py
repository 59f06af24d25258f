"""Gemma 3 270M with its real window of 512: memory at a context of 8192, and positions far beyond
the window against a full cache. HORNITO_DEVICE picks the device."""

from __future__ import annotations

import os
import re

import pytest

import hornito
from hornito.runtime.decode import decode
from hornito.runtime.session import Session
from tiny import Compiled, random_ids

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.slow]

DEVICE = os.environ.get("HORNITO_DEVICE")


def test_memory_at_8192(gemma3: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan prints windowed and full-cache bytes, what is allocated is what was planned, and 200
    rounds of create, fork and release return to the start."""
    with hornito.load(gemma3("fp16"), device=DEVICE, context=8192, slots=2) as llm:
        engine = llm.engine
        line = next(x for x in llm.plan_summary().splitlines() if x.startswith("windows: of 512"))
        windowed, full = (int(n.replace(",", "")) for n in re.findall(r"[\d,]{7,}", line))
        report = engine.device.memory_report()
        assert sum(size for label, size in report.items() if label.startswith("kv")) == windowed
        assert windowed == engine.memory.kv and full > 2 * windowed
        assert engine.device.allocated_bytes == engine.memory.total == sum(report.values())
        with capsys.disabled():
            print(f"\n{line}")
        ids = random_ids(20, seed=1)
        for turn in range(200):
            with Session(engine) as a:
                a.prefill(ids[: 1 + turn % 20])
                with a.fork() as b:
                    if turn % 20 == 0:
                        b.step(5)
        assert [pool.used for pool in engine.pools] == [0, 0]
        assert engine.free_slots == 2 and not engine.tables.entries.any()
        assert engine.device.allocated_bytes == engine.memory.total


def test_2500_tokens_equal_a_full_cache(gemma3: Compiled) -> None:
    """Bit by bit: every chunk's next token, 32 tokens and the logits behind them; restored, too."""
    ids = random_ids(2500, seed=2, vocabulary=200_000)
    found = []
    for budget in (64, 1 << 20):
        with (
            hornito.load(
                gemma3("fp16"), device=DEVICE, context=3072, rewind_budget=budget, slots=2
            ) as llm,
            Session(llm.engine) as session,
            Session(llm.engine) as other,
        ):
            parts = []
            for start in range(0, 2500, 256):
                session.prefill(ids[start : start + 256])
                parts.append(session.pending)
                if start == 1536:
                    other.restore(snapshot := session.snapshot())
                    snapshot.release()
            for start in range(1792, 2500, 256):
                other.prefill(ids[start : start + 256])
            assert other.pending == session.pending
            assert other.logits().tobytes() == session.logits().tobytes()
            tokens = [t for (new,) in decode([session], [32], ignore_eos=True) for t in new]
            found.append((parts, tokens, session.logits().tobytes()))
            windows = [pool.kind.window for pool in llm.engine.pools]
            held = dict(zip(windows, session.blocks.held(), strict=True))
            assert held[512] <= 16 or budget > 64
            assert held[0] == 40
    assert found[0] == found[1]
