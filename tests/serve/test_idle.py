"""A server proves kernels while it has no request, and answers rightly meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from faults import lose
from hornito.plan.records import GOOD
from hornito.plan.selftest import SelfTest
from hornito.plan.stand import Stand
from hornito.runtime import idle as idle_module
from hornito.runtime import settle
from serving import Live, live, wait
from tiny import kernels_of

pytestmark = [pytest.mark.gpu, pytest.mark.software]

VARIANT = "linear/broadcast.f32"
PROMPT = list(range(5, 45))
SOON = 120


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The device proves its variants, nothing is on record, and a load has no time for it."""
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path))
    monkeypatch.setattr(settle, "exempt", lambda caps: False)
    monkeypatch.setattr(SelfTest, "_time_left", lambda test: test._budget is None)
    monkeypatch.setattr(idle_module, "IDLE_SECONDS", 0.05)


@contextmanager
def idle_server(model: Path, **options: Any) -> Iterator[Live]:
    with live(model, device="software", slots=2, **options) as server:
        yield server


def health(server: Live) -> dict[str, Any]:
    return dict(server.http.get("/health").json())


def metric(server: Live, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def proved(server: Live) -> bool:
    return bool(server.llm.engine.trust.complete)


class Gate:
    """Holds the self-test before each submission until it is opened; `reached` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = 0
        take = idle_module.IdleProof.take

        def taken(proof: idle_module.IdleProof) -> None:
            take(proof)
            if not self.open.is_set():
                proof.give()
                self.reached += 1
                self.open.wait(SOON)
                take(proof)

        monkeypatch.setattr(idle_module.IdleProof, "take", taken)


def test_progress_shows_and_what_passes_is_used(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with idle_server(text_model) as server:
        engine = server.llm.engine
        wait(lambda: gate.reached > 0, SOON)
        facts = health(server)
        assert facts["unproven_kernels"] > 0 and facts["unproven_shapes"] > 0
        assert metric(server, "hornito_unproven_kernels") == facts["unproven_kernels"]
        assert metric(server, "hornito_unproven_shapes") == facts["unproven_shapes"]
        assert f"{facts['unproven_kernels']} unproven" in server.llm.plan_summary()
        assert VARIANT not in kernels_of(engine)
        before = server.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
        gate.open.set()
        wait(lambda: proved(server), SOON)
        assert health(server)["unproven_kernels"] == health(server)["unproven_shapes"] == 0
        assert metric(server, "hornito_unproven_kernels") == 0
        assert VARIANT in kernels_of(engine)
        assert {v.verdict for v in engine.trust.verdicts.values()} == {GOOD}
        # What was kept of the first prompt is gone on from, in the new plan.
        after = server.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        other = server.complete(PROMPT[::-1], max_tokens=2, temperature=0, ignore_eos=True)
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_requests_amid_the_proof(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is answered as without it, and no submission of the self-test comes in between."""
    prompts = [PROMPT[i:] for i in range(12)]
    with idle_server(text_model, cache_bytes=0) as server:
        wait(lambda: proved(server), SOON)
        wanted = [server.complete(ids, max_tokens=6, temperature=0) for ids in prompts]
    run, submissions = Stand._run, 0

    def slow(stand: Stand, recorder: Any) -> None:
        nonlocal submissions
        run(stand, recorder)
        submissions += 1
        time.sleep(0.002)

    monkeypatch.setattr(Stand, "_run", slow)
    monkeypatch.setattr(idle_module, "IDLE_SECONDS", 0.0)
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "fresh"))
    amid = 0
    with idle_server(text_model, cache_bytes=0) as server:
        rounds, during = server.scheduler._rounds.round, set[int]()

        def counted() -> None:
            at = submissions
            rounds()
            during.add(submissions - at)

        monkeypatch.setattr(server.scheduler._rounds, "round", counted)
        for ids, want in zip(prompts, wanted, strict=True):
            at = submissions
            wait(lambda at=at: submissions > at or proved(server), SOON)  # type: ignore[misc]
            got = server.complete(ids, max_tokens=6, temperature=0)
            amid += not proved(server)
            assert got["choices"] == want["choices"]
        assert amid > 3 and during == {0}
        wait(lambda: proved(server), SOON)
        assert VARIANT in kernels_of(server.llm.engine)


def test_a_kernel_that_loses_the_device(
    text_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server comes back without it, as after any loss, and says so once."""
    monkeypatch.setattr("hornito.runtime.settle.STRIKES", 1)
    real = Stand._record

    def record(stand: Stand, *arguments: Any) -> Any:
        recorder = real(stand, *arguments)
        if any(d.kernel == VARIANT for d in arguments[1]):
            monkeypatch.setattr(Stand, "_record", real)
            lose(stand.device, after=1)
        return recorder

    gate = Gate(monkeypatch)
    with idle_server(text_model) as server:
        want = server.complete(PROMPT, max_tokens=8, temperature=0)
        monkeypatch.setattr(Stand, "_record", record)
        gate.open.set()
        engine = server.llm.engine
        wait(lambda: engine.generation > 0 and health(server).get("status") == "ok", SOON)
        assert engine.trust.dropped[VARIANT].startswith("failed: ")
        got = server.complete(PROMPT, max_tokens=8, temperature=0)
        assert got["choices"] == want["choices"]
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        wait(lambda: proved(server), SOON)
        assert VARIANT not in kernels_of(engine)
    said = [text for text in caplog.messages if VARIANT in text and "was lost while" in text]
    assert len(said) == 1
    assert not any("load again" in text for text in caplog.messages)
    assert caplog.messages.count("the device is open again") == 1


def test_closing_amid_the_proof(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with idle_server(text_model) as server:
        wait(lambda: gate.reached > 0, SOON)
        gate.open.set()
    assert not any(thread.name == "hornito-proof" for thread in threading.enumerate())
    assert server.llm.engine.closed


def test_calls_have_the_device_to_themselves(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_module, "IDLE_SECONDS", 0.0)
    with idle_server(text_model) as server:
        scheduler = server.scheduler
        using: set[bool] = set()
        while not proved(server):
            scheduler.call(lambda: using.add(scheduler._proof._using))
            time.sleep(0.01)
        assert using == {False}
