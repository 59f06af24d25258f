"""Ctrl-C, threads and forks: what an engine knows stays true."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

import hornito
from gguf_samples import HF
from hornito.errors import SessionError
from hornito.runtime.decode import decode
from hornito.runtime.engine import Engine
from hornito.runtime.guard import uninterrupted
from hornito.runtime.session import Session
from tree import own_cache

pytestmark = pytest.mark.gpu

PROMPT = [7 + i % 90 for i in range(60)]
OTHER = list(range(105, 115))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hornito.LLM]:
    with own_cache(tmp_path_factory), hornito.load(HF / "llama-tiny", slots=3, context=64) as model:
        model.steps_per_submission = 16
        yield model


def tokens(session: Session, count: int) -> list[int]:
    runs = decode([session], [count], ignore_eos=True, steps=4)
    return [token for (new,) in runs for token in new]


def used(engine: Engine) -> list[int]:
    return [pool.used for pool in engine.pools]


def test_an_interrupted_wait_leaves_no_records_behind(
    llm: hornito.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT, OTHER]
    before = [g.token_ids for g in llm.generate(prompts, max_tokens=16, ignore_eos=True)]
    assert [len(ids) for ids in before] == [5, 16]
    wait, calls = llm.engine.wait, []

    def interrupted(ticket: int) -> None:
        calls.append(ticket)
        if len(calls) == 4:  # two prompts, then in the middle of the steps
            raise KeyboardInterrupt
        wait(ticket)

    monkeypatch.setattr(llm.engine, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7], [8, 9, 10]], max_tokens=50, ignore_eos=True)
    monkeypatch.setattr(llm.engine, "wait", wait)
    after = [g.token_ids for g in llm.generate(prompts, max_tokens=16, ignore_eos=True)]
    assert after == before
    assert used(llm.engine) == [0] and llm.engine.free_slots == 3


def test_a_submission_that_fails_is_made_up_for(
    llm: hornito.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables and copies that did not reach the device do with the next submission."""
    with Session(llm.engine) as one, Session(llm.engine) as two:
        one.prefill(PROMPT[:30])
        expected = tokens(one, 10)
        one.rewind(30)
        one.rewind(20)
        shared = one.snapshot()
        submit = llm.engine.device.submit

        def fails(runs: object) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(llm.engine.device, "submit", fails)
        for session in (one, two):
            with pytest.raises(KeyboardInterrupt):
                session.prefill(PROMPT[session.position : 30])
        monkeypatch.setattr(llm.engine.device, "submit", submit)
        two.prefill(PROMPT[:30])
        one.prefill(PROMPT[20:30])
        assert tokens(two, 10) == tokens(one, 10) == expected
        two.restore(shared)
        two.prefill(PROMPT[20:30])
        assert tokens(two, 10) == expected
        shared.release()
    assert used(llm.engine) == [0] and llm.engine.free_slots == 3


def test_ctrl_c_is_held_back_and_comes_after() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            seen.append("whole")
        seen.append("never")
    assert seen == ["whole"]


def test_threads_take_turns(llm: hornito.LLM) -> None:
    prompts = [PROMPT[:40], OTHER]
    expected = [llm.generate(p, max_tokens=12, ignore_eos=True).token_ids for p in prompts]
    found: list[list[tuple[int, ...]]] = [[], []]

    def work(index: int) -> None:
        for _ in range(10):
            answer = llm.generate(prompts[index], max_tokens=12, ignore_eos=True)
            found[index].append(answer.token_ids)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[expected[0]] * 10, [expected[1]] * 10]
    assert used(llm.engine) == [0]


def test_a_session_that_moves_during_its_stream_is_noticed(llm: hornito.LLM) -> None:
    with llm.session() as session:
        stream = llm.stream_session(session, OTHER, max_tokens=8, ignore_eos=True)
        next(stream)
        session.rewind(0)
        session.prefill(PROMPT[:10])
        with pytest.raises(SessionError, match="used by another call"):
            list(stream)


def test_a_forked_child_leaves_the_device_alone(llm: hornito.LLM) -> None:
    child = os.fork()
    if child == 0:
        try:
            llm.generate(OTHER, max_tokens=2)
        except SessionError as error:
            # Without the interpreter's own end, which belongs to the test runner.
            llm.close()
            os._exit(7 if "forked child" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert len(llm.generate(OTHER, max_tokens=2, ignore_eos=True).token_ids) == 2
