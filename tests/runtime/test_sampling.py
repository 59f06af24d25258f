"""Sampled decoding: what it draws, and that rows, slots, batches and submissions change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hornito.errors import UsageError
from hornito.runtime.decode import decode, decode_records
from hornito.runtime.emitted import Record
from hornito.runtime.engine import Engine
from hornito.runtime.prefix import start_from_prefix
from hornito.runtime.sampler import Sampler, SamplingParams, token_counts
from hornito.runtime.session import Session
from hornito.vk.device import Device
from sampling_reference import adjusted, distribution, drawn, uniform
from tiny import Compiled, answer, log_softmax, open_engine, pending, random_ids

pytestmark = pytest.mark.gpu

PROMPT = random_ids(40, seed=31)
COUNT = 24
EVERYTHING = {
    "temperature": 1.4,
    "top_k": 60,
    "top_p": 0.97,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {5: 2.0, 400: -5.0},
}


def sampler(seed: int = 11, prompt: int = len(PROMPT), **values: Any) -> Sampler:
    return Sampler.start(SamplingParams(seed=seed, **(values or EVERYTHING)), prompt)


def sampled(
    session: Session, ids: Sequence[int], how: Sampler, count: int = COUNT, steps: int = 8
) -> list[Record]:
    """Evaluate ids in a session and draw `count` tokens."""
    session.prefill(ids, sampler=how)
    assert session.record is not None
    found = [session.record]
    runs = decode_records([session], [count - 1], ignore_eos=True, steps=steps, samplers=[how])
    for (records,) in runs:
        found += records
    return found


def tokens(records: Sequence[Record]) -> list[int]:
    return [record.token for record in records]


@pytest.fixture(scope="module")
def reference(engine: Engine) -> list[int]:
    with Session(engine) as session:
        return tokens(sampled(session, PROMPT, sampler()))


@pytest.mark.parametrize(
    "values",
    (
        EVERYTHING,
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 2.0, "min_p": 0.1},
        {"temperature": 0.0, "repetition_penalty": 1.8},
        {"temperature": 1.0, "presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"temperature": 0.0, "logit_bias": {7: 100.0}},
    ),
)
def test_every_token_is_the_references(engine: Engine, values: dict[str, Any]) -> None:
    """Along 24 steps: float64 filters and penalties on the model's logits, at the same numbers."""
    how = sampler(seed=(3 << 40) + 1, **values)
    with Session(engine) as session:
        found = tokens(sampled(session, PROMPT, how))
        session.rewind(0)
        logits = session.prefill_logits(PROMPT + found)
    close = 0
    for i, token in enumerate(found):
        position = len(PROMPT) + i - 1
        counts = token_counts(PROMPT + found[:i], None, len(PROMPT), engine.vocabulary)
        given = counts if how.params.penalised else None
        if how.params.greedy:
            assert token == adjusted(logits[position], how.params, given).argmax()
            continue
        want, margin = drawn(
            distribution(logits[position], how.params, given), uniform(how.seed, position)
        )
        if margin < 1e-5:
            close += 1
        else:
            assert token == want, (i, margin)
    assert close <= 2


@pytest.mark.parametrize("steps", (1, 3, 64))
def test_the_same_at_any_number_of_steps(engine: Engine, reference: list[int], steps: int) -> None:
    with Session(engine) as session:
        assert tokens(sampled(session, PROMPT, sampler(), steps=steps)) == reference


def test_several_sampled_steps_are_one_submission(engine: Engine) -> None:
    with Session(engine) as session:
        session.prefill(PROMPT, sampler=sampler())
        before = engine.last_ticket
        runs = decode([session], [16], ignore_eos=True, steps=16, samplers=[sampler()])
        assert [len(row) for (row,) in runs] == [16]
        assert engine.last_ticket - before == 1


def test_the_same_in_any_row_and_slot(shared: Engine, reference: list[int]) -> None:
    """In a batch of four, of which others are greedy or sampled differently, at every row."""
    others = [
        None,
        sampler(seed=5, temperature=0.7),
        sampler(seed=6, temperature=3.0, frequency_penalty=1.0, repetition_penalty=2.0),
    ]
    for row in range(4):
        sessions = [Session(shared) for _ in range(4)]
        samplers: list[Sampler | None] = list(others)
        samplers.insert(row, sampler())
        prompts = [random_ids(9 + i, seed=50 + i) for i in range(3)]
        prompts.insert(row, PROMPT)
        for session, ids, how in zip(sessions, prompts, samplers, strict=True):
            session.prefill(ids, sampler=how)
        found = [[pending(session)] for session in sessions]
        counts = [COUNT - 1] * 4
        for new in decode(sessions, counts, ignore_eos=True, steps=5, samplers=samplers):
            for mine, more in zip(found, new, strict=True):
                mine += more
        greedy = next(i for i, how in enumerate(samplers) if how is None)
        for session in sessions:
            session.close()
        assert found[row] == reference
        assert found[greedy] == answer(shared, prompts[greedy], COUNT).tokens


def test_f1_penalties_see_cached_prompts(engine: Engine, reference: list[int]) -> None:
    """A prompt that comes out of a snapshot, a fork or in pieces counts like one just read."""
    with Session(engine) as session:
        session.prefill(PROMPT[:30])
        with session.snapshot() as cached:
            session.rewind(0)
            session.prefill(random_ids(7, seed=3))
            session.restore(cached)
        assert tokens(sampled(session, PROMPT[30:], sampler())) == reference
        session.rewind(25)
        assert tokens(sampled(session, PROMPT[25:], sampler())) == reference
    without = sampler(**{**EVERYTHING, "repetition_penalty": 1.0})
    with Session(engine) as session:
        assert tokens(sampled(session, PROMPT, without)) != reference, "the penalty matters"


def test_f1_penalties_see_prompts_of_the_prefix_cache(
    device: Device, compiled: Compiled, reference: list[int]
) -> None:
    with open_engine(device, compiled("llama-tiny"), slots=2) as engine:
        with Session(engine) as session:
            session.prefill(PROMPT[:20])
            kept = session.snapshot()
        with kept, Session(engine) as session:
            reused = start_from_prefix(session, PROMPT)
            assert reused == 20
            assert tokens(sampled(session, PROMPT[reused:], sampler())) == reference


def test_restore_and_rewind_go_on_as_if_nothing_had_been(
    engine: Engine, reference: list[int]
) -> None:
    """The random number belongs to the position: no state has to be kept."""
    with Session(engine) as session:
        first = tokens(sampled(session, PROMPT, sampler(), count=10))
        with session.snapshot() as here:
            list(decode([session], [5], ignore_eos=True, samplers=[sampler(seed=99)]))
            session.restore(here)
        rest = []
        for (new,) in decode([session], [COUNT - 10], ignore_eos=True, samplers=[sampler()]):
            rest += new
        assert first + rest == reference
        kept = session.ids[: len(PROMPT) + 12]
        session.rewind(len(PROMPT) + 12)
        session.rewind(len(PROMPT) + 11)
        session.prefill(kept[-1:], sampler=sampler())
        assert pending(session) == reference[12]


def test_another_call_in_between_changes_nothing(shared: Engine, reference: list[int]) -> None:
    """Row records, parameters and counts are written again when a run gets the rows back."""
    with Session(shared) as session, Session(shared) as other:
        session.prefill(PROMPT, sampler=sampler())
        found = [pending(session)]
        for (new,) in decode(
            [session], [COUNT - 1], ignore_eos=True, steps=3, samplers=[sampler()]
        ):
            found += new
            other.step(5)
            other.prefill([6, 7], sampler=sampler(seed=1, temperature=1.0, presence_penalty=2.0))
    assert found == reference


def test_log_probabilities(engine: Engine) -> None:
    """Of the raw distribution, chosen and best, under greedy and under everything."""
    for values in ({"temperature": 0.0}, EVERYTHING):
        how = sampler(**{**values, "logprobs": 5})
        with Session(engine) as session:
            found = sampled(session, PROMPT, how)
            session.rewind(0)
            logits = session.prefill_logits(PROMPT + tokens(found))
        exact = log_softmax(logits)[len(PROMPT) - 1 :]
        for i, record in enumerate(found):
            assert abs(record.logprob - exact[i, record.token]) < 1e-4
            best = np.argsort(-exact[i], kind="stable")[:5]
            assert len(record.top) == 5
            np.testing.assert_allclose([v for _, v in record.top], exact[i, best], atol=1e-4)
            assert record.top[0][0] == best[0]
        if how.params.greedy:
            assert tokens(found) == answer(engine, PROMPT, COUNT).tokens


def test_an_end_token_ends_a_sampled_answer(
    device: Device, compiled: Compiled, reference: list[int]
) -> None:
    end = reference[8]
    first = reference.index(end)
    assert first > 0
    with open_engine(device, compiled("llama-tiny"), eos_ids=[end]) as engine:
        with Session(engine) as session:
            session.prefill(PROMPT, sampler=sampler())
            found = [pending(session)]
            for (new,) in decode([session], [COUNT], steps=4, samplers=[sampler()]):
                found += new
        assert found == reference[: first + 1]


def test_sampler_arguments(engine: Engine) -> None:
    bad = sampler(temperature=1.0, logit_bias={engine.vocabulary: 1.0})
    with Session(engine) as session:
        with pytest.raises(UsageError, match="names token 512"):
            session.prefill(PROMPT, sampler=bad)
        assert session.position == 0
        session.prefill(PROMPT)
        with pytest.raises(UsageError, match="names token 512"):
            next(decode([session], [3], samplers=[bad]))
        with pytest.raises(UsageError, match="2 samplers for 1 sessions"):
            next(decode([session], [3], samplers=[None, None]))
