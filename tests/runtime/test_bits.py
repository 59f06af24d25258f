"""The "bits" contract: the same schedule gives the same bits, whatever ran before or beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_samples import HF
from hornito.compiler import compile_source
from hornito.runtime.decode import decode
from hornito.runtime.engine import Engine
from hornito.runtime.session import Session
from hornito.vk.device import Device
from tiny import (
    Answer,
    Compiled,
    Floats,
    answer,
    log_softmax,
    open_engine,
    poison_blocks,
    random_ids,
)

pytestmark = pytest.mark.gpu

PROMPT = random_ids(90, seed=1)
COUNT = 40


@pytest.fixture(scope="module")
def reference(engine: Engine) -> Answer:
    return answer(engine, PROMPT, COUNT)


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_twenty_runs(device: Device, compiled: Compiled, weights: str) -> None:
    """Tokens, log-probabilities and logits, with fp16 weights and KV too."""
    package = compiled("llama-tiny", weights)
    with open_engine(device, package, kv_half=weights == "fp16") as engine:
        first = answer(engine, PROMPT, COUNT)
        assert len(first.tokens) == COUNT and np.isfinite(first.logprobs[1:]).all()
        assert {answer(engine, PROMPT, COUNT).bits() for _ in range(19)} == {first.bits()}


def test_another_engine_and_model_in_between(
    device: Device, compiled: Compiled, reference: Answer
) -> None:
    with (
        open_engine(device, compiled("llama3-tiny")) as other,
        open_engine(device, compiled("llama-tiny")) as again,
    ):
        answer(other, PROMPT, 3)
        assert answer(again, PROMPT, COUNT).bits() == reference.bits()


@pytest.mark.parametrize("steps", [1, 2, 3, 16, 100])
def test_steps_a_submission(engine: Engine, reference: Answer, steps: int) -> None:
    assert answer(engine, PROMPT, COUNT, steps=steps).bits() == reference.bits()


def test_steps_equal_single_calls(engine: Engine, reference: Answer) -> None:
    """Fed by the host token by token, the same kernels run."""
    with Session(engine) as session:
        session.logprobs(PROMPT)
        tokens = []
        for _ in range(COUNT - 1):
            assert session.pending is not None
            tokens.append(session.pending)
            session.step(tokens[-1])
        assert [*tokens, session.pending] == reference.tokens
        assert session.logits().tobytes() == reference.last.tobytes()


def test_barrier_everywhere(device: Device, compiled: Compiled, reference: Answer) -> None:
    with open_engine(device, compiled("llama-tiny"), barrier_everywhere=True) as engine:
        programs = [
            program
            for bucket in engine.plan.buckets.values()
            for program in (bucket.body, *bucket.tails.values())
        ]
        assert all(all(program.barriers) for program in programs)
        assert answer(engine, PROMPT, COUNT).bits() == reference.bits()


def test_planned_barriers_are_fewer(engine: Engine) -> None:
    """Else the test above compares a thing with itself."""
    body = engine.plan.buckets["batch", 1].body
    assert 0 < sum(body.barriers) < len(body.barriers)


APART = ("merge_qkv", "merge_gate_up", "residual_in_linear")


@pytest.mark.parametrize(
    ("name", "disabled", "half_values"),
    [
        ("llama-tiny", (), False),
        ("llama-tiny", APART, True),
        ("llama3-tiny", (), True),
        ("llama3-tiny", APART, False),
    ],
)
def test_guard_bands(
    device: Device, compiled: Compiled, name: str, disabled: tuple[str, ...], half_values: bool
) -> None:
    """Nothing is written outside the activations, and nothing that no one wrote is read."""
    package = compiled(name, "fp16" if half_values else "fp32", disabled)
    forms: dict[str, Any] = {"half_values": half_values, "kv_half": half_values}
    with open_engine(device, package, **forms) as plain:
        want = answer(plain, PROMPT, COUNT).bits()
    with open_engine(device, package, guard=256, slots=2, **forms) as engine:
        assert engine.check_guards() == []
        for chunk in (1, 16, 64, None):
            answer(engine, PROMPT, 3, chunk=chunk)
        with Session(engine) as a, Session(engine) as b:
            a.prefill_logits(PROMPT[:20])
            b.prefill(PROMPT[:7])
            for _ in decode([a, b], [5, 9], ignore_eos=True):
                pass
        assert engine.check_guards() == []
        engine.poison_activations()
        assert answer(engine, PROMPT, COUNT).bits() == want
        assert engine.check_guards() == []


def test_guards_are_seen(device: Device, compiled: Compiled) -> None:
    """A write behind an activation is found and named."""
    with open_engine(device, compiled("llama-tiny"), guard=256) as engine:
        name, offset = next(iter(engine.plan.arena.offsets.items()))
        end = offset + engine.plan.arena.sizes[name]
        buffer, base = engine._activations["arena"]
        device.upload([(buffer, base + end + 128, bytes(4))])
        assert engine.check_guards() == [name]


@pytest.mark.parametrize("kv_half", [False, True])
def test_unwritten_keys_are_never_used(device: Device, compiled: Compiled, kv_half: bool) -> None:
    with open_engine(device, compiled("llama-tiny"), kv_half=kv_half) as engine:
        first = answer(engine, PROMPT, COUNT)
        poison_blocks(engine)
        engine.poison_activations()
        assert answer(engine, PROMPT, COUNT).bits() == first.bits()
        assert np.isfinite(first.last).all()


def beside(
    engine: Engine, prompts: list[list[int]], counts: list[int], steps: int = 8
) -> list[tuple[tuple[int, ...], bytes]]:
    """Tokens and last logits of sessions that share their decode calls."""
    sessions = [Session(engine) for _ in prompts]
    try:
        for session, prompt in zip(sessions, prompts, strict=True):
            session.prefill(prompt)
        tokens = [[session.pending] for session in sessions]
        for new in decode(sessions, counts, ignore_eos=True, steps=steps):
            for mine, found in zip(tokens, new, strict=True):
                mine += found
        return [
            (tuple(t for t in mine if t is not None), session.logits().tobytes())
            for mine, session in zip(tokens, sessions, strict=True)
        ]
    finally:
        for session in sessions:
            session.close()


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_partners_in_a_batch_do_not_matter(shared: Engine, batch: int) -> None:
    """For the same batch size: other partners, other rows, other slots, other lengths."""
    partners = [random_ids(n, seed=n) for n in (5, 70, 200)]
    others = [random_ids(n, seed=n) for n in (64, 1, 129)]
    k = batch - 1
    first = beside(shared, [PROMPT, *partners[:k]], [COUNT] * batch)[0]
    assert len(first[0]) == COUNT + 1
    assert beside(shared, [PROMPT, *others[:k]], [COUNT] * batch)[0] == first
    assert beside(shared, [*others[:k], PROMPT], [COUNT] * batch)[k] == first
    # A partner that ends early, and other numbers of steps a submission.
    assert beside(shared, [*others[:k], PROMPT], [3] * k + [COUNT], steps=1)[k] == first


def test_bucket_of_four_holds_three(shared: Engine) -> None:
    """A bucket's empty row changes nothing for the others."""
    three = [random_ids(n, seed=n) for n in (5, 70, 200)]
    want = beside(shared, [*three, PROMPT], [12] * 4)[:3]
    assert beside(shared, three, [12] * 3) == want


@pytest.mark.parametrize("name", ["llama-tiny", "llama3-tiny"])
def test_prefill_logits_agree_with_the_other_tails(
    device: Device, compiled: Compiled, name: str
) -> None:
    """`prefill`, `logprobs` and `prefill_logits` run one body: they must leave the same cache."""
    with open_engine(device, compiled(name)) as engine:

        def last(how: str) -> tuple[int | None, Floats]:
            with Session(engine) as session:
                getattr(session, how)(PROMPT[:64])
                found = session.pending
                return found, session.logits()

        token, logits = last("prefill")
        assert token == int(logits.argmax())
        again, same = last("prefill_logits")
        assert again == token
        np.testing.assert_array_equal(same, logits)
        with Session(engine) as session:
            rows = session.prefill_logits(PROMPT[:64])
        with Session(engine) as session:
            logprobs = session.logprobs(PROMPT[:64])
        picked = log_softmax(rows)[np.arange(63), PROMPT[1:64]]
        np.testing.assert_allclose(logprobs[1:], picked, rtol=0, atol=2e-5)
        assert rows[-1].argmax() == token


def test_packages_of_the_same_source_are_equal(tmp_path: Path, compiled: Compiled) -> None:
    compile_source(HF / "llama-tiny", tmp_path / "a.vxm", weights="fp32")
    assert (tmp_path / "a.vxm").read_bytes() == compiled("llama-tiny").read_bytes()
