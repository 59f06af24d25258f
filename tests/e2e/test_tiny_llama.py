"""Tiny llama checkpoints, from file to tokens, against what transformers computes for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

import hornito
from gguf_samples import HF
from hornito.api import LLM
from hornito.runtime.decode import decode
from hornito.runtime.session import Session
from tiny import (
    CONTEXT,
    NAMES,
    TOLERANCE,
    Compiled,
    Golden,
    answer,
    differing_steps,
    golden,
    leave,
    log_softmax,
    margins,
    pending,
)

pytestmark = pytest.mark.gpu

WEIGHTS = ("fp32", "fp16")


@dataclass(frozen=True)
class Case:
    """A loaded model and what it must compute."""

    llm: LLM
    golden: Golden
    name: str
    weights: str


@pytest.fixture(scope="module", params=[(n, w) for n in NAMES for w in WEIGHTS], ids="-".join)
def case(request: pytest.FixtureRequest, compiled: Compiled) -> Iterator[Case]:
    """The weights are representable in fp16, so both storage types hold the same model."""
    name, weights = request.param
    package = compiled(name, "hf", weights)
    with hornito.load(package, precision="high", context=CONTEXT) as llm:
        yield Case(llm, golden(name), name, weights)


def test_logits_of_every_prompt_row(case: Case) -> None:
    with Session(case.llm.engine) as session:
        logits = session.prefill_logits(case.golden.prompt)
    assert logits.shape == (24, 512)
    np.testing.assert_allclose(logits, case.golden.logits, rtol=0, atol=1e-3)
    assert (logits.argmax(-1) == case.golden.logits.argmax(-1)).all()


def test_prompt_logprobs(case: Case) -> None:
    with Session(case.llm.engine) as session:
        logprobs = session.logprobs(case.golden.prompt)
    want = log_softmax(case.golden.logits)[np.arange(23), case.golden.prompt[1:]]
    np.testing.assert_allclose(logprobs[1:], want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("steps", [1, 8])
def test_32_tokens(case: Case, steps: int) -> None:
    assert case.golden.margin.min() > 0.01  # no near-tie excuses anything here
    found = answer(case.llm.engine, case.golden.prompt, 32, steps=steps)
    assert found.tokens == case.golden.tokens
    out = case.llm.generate(case.golden.prompt, max_tokens=32, ignore_eos=True)
    assert list(out.token_ids) == case.golden.tokens
    assert out.finish_reason == "length" and out.text == ""


def test_the_top_logits_of_every_step(case: Case) -> None:
    """Teacher-forced, one token a call."""
    with Session(case.llm.engine) as session:
        session.prefill(case.golden.prompt)
        for step, token in enumerate(case.golden.tokens):
            row = session.logits()
            want = case.golden.top_logits[step]
            np.testing.assert_allclose(row[case.golden.top_ids[step]], want, rtol=0, atol=1e-3)
            assert pending(session) == token == row.argmax()
            assert abs(margins(row) - case.golden.margin[step]) < 2e-3
            session.step(token)


def test_stream_equals_generate(case: Case) -> None:
    ids = case.golden.prompt
    chunks = list(case.llm.stream(ids, max_tokens=10, ignore_eos=True))
    assert [t for chunk in chunks for t in chunk.token_ids] == case.golden.tokens[:10]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = chunks[-1]
    assert last.finish_reason == "length" and last.timings is not None
    assert (last.timings.prompt_tokens, last.timings.decode_tokens) == (24, 9)
    assert last.timings.prompt_seconds > 0 and last.timings.decode_seconds > 0


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_gguf_equals_the_directory(compiled: Compiled, name: str, weights: str) -> None:
    """q and k rows are permuted in the file: the streams and logits are equal to the bit. The
    weights are representable in fp16, so that a file in F16 holds the same ones."""

    def everything(source: str) -> tuple[object, ...]:
        package = compiled(name, source, weights)
        with hornito.load(package, precision="high", context=CONTEXT) as llm:
            found = answer(llm.engine, golden(name).prompt, 32)
            with Session(llm.engine) as session:
                rows = session.prefill_logits(golden(name).prompt)
            out = llm.generate(golden(name).prompt, max_tokens=32, ignore_eos=True)
            return (*found.bits(), rows.tobytes(), out.token_ids)

    want = everything("hf")
    assert everything("gguf") == want
    assert everything("gguf-f16") == want


@pytest.mark.parametrize("name", NAMES)
def test_normal_precision(compiled: Compiled, name: str) -> None:
    """fp16 keys and values, fp16 weights: the tokens, under the margin of `normal`."""
    want = golden(name)
    with hornito.load(compiled(name, "hf", "fp16"), context=CONTEXT) as llm:
        assert llm.precision == "normal" and llm.engine.options.kv_half
        with Session(llm.engine) as session:
            rows = session.prefill_logits(want.prompt)
            assert differing_steps(rows, want.logits, 0.05) == []
            assert np.abs(log_softmax(rows) - log_softmax(want.logits)).max() < 0.05
            for step, token in enumerate(want.tokens):
                assert pending(session) == token or want.margin[step] < 0.05, step
                session.step(token)


LOW_MARGIN = 0.1
"""Of `low`: steps whose two best logits are closer may end otherwise, and log-probabilities may be
so far from the reference's."""


@pytest.mark.parametrize("name", NAMES)
def test_low_precision(compiled: Compiled, name: str) -> None:
    """Values in fp16 as well: the tokens, by chunks and by steps, in a smaller arena."""
    want = golden(name)
    package = compiled(name, "hf", "fp16")
    with hornito.load(package, context=CONTEXT) as llm:
        arena = llm.engine.memory.activations
    with hornito.load(package, precision="low", context=CONTEXT) as llm:
        assert llm.precision == "low" and llm.engine.options.kv_half
        assert llm.engine.memory.activations < arena
        with Session(llm.engine) as session:
            rows = session.prefill_logits(want.prompt)
            assert differing_steps(rows, want.logits, LOW_MARGIN) == []
            assert np.abs(log_softmax(rows) - log_softmax(want.logits)).max() < LOW_MARGIN
            for step, token in enumerate(want.tokens):
                assert pending(session) == token or want.margin[step] < LOW_MARGIN, step
                session.step(token)
        assert (
            answer(llm.engine, want.prompt, 32).bits() == answer(llm.engine, want.prompt, 32).bits()
        )


def test_sources_are_compiled_into_the_cache(compiled: Compiled) -> None:
    """Loading a directory equals loading its package."""
    want = golden("llama-tiny")
    for _ in range(2):
        with hornito.load(HF / "llama-tiny", weights="fp32", precision="high") as llm:
            assert llm.context == 512
            out = llm.generate(want.prompt, max_tokens=32, ignore_eos=True)
            assert list(out.token_ids) == want.tokens


def test_an_end_token_ends_the_answer(case: Case) -> None:
    """The model's own end token is 2; one that comes early is put in its place."""
    at = next(i for i in range(5, 32) if case.golden.tokens[i] not in case.golden.tokens[:i])
    engine = case.llm.engine
    assert engine.eos_ids == (2,)
    ids = case.golden.prompt
    full = case.llm.generate(ids, max_tokens=32)
    assert list(full.token_ids) == case.golden.tokens and full.finish_reason == "length"
    # Forced onto the host's check alone, so that the loaded plan stays as it is.
    engine.eos_ids = (case.golden.tokens[at],)
    try:
        out = case.llm.generate(ids, max_tokens=32)
    finally:
        engine.eos_ids = (2,)
    assert list(out.token_ids) == case.golden.tokens[: at + 1]
    assert out.finish_reason == "stop"


def test_two_at_a_time(compiled: Compiled) -> None:
    """Both goldens' continuations at once, each as it is alone."""
    want = golden("llama-tiny")
    with hornito.load(compiled("llama-tiny"), precision="high", context=CONTEXT, slots=2) as llm:
        with Session(llm.engine) as a, Session(llm.engine) as b:
            a.prefill(want.prompt)
            b.prefill(want.prompt[:10])
            found: list[list[int]] = [[pending(a)], [pending(b)]]
            for new in decode([a, b], [31, 31], ignore_eos=True):
                for mine, tokens in zip(found, new, strict=True):
                    mine += tokens
        alone = answer(llm.engine, want.prompt[:10], 32).tokens
    assert found == [want.tokens, alone]


def test_interleaved_streams(compiled: Compiled) -> None:
    """Two answers read turn by turn from one model."""
    want = golden("llama-tiny")
    with hornito.load(compiled("llama-tiny"), precision="high", context=CONTEXT, slots=2) as llm:
        short = list(llm.generate(want.prompt[:9], max_tokens=32, ignore_eos=True).token_ids)
        streams = [
            llm.stream(prompt, max_tokens=32, ignore_eos=True)
            for prompt in (want.prompt, want.prompt[:9])
        ]
        found: list[list[int]] = [[], []]
        for _ in range(40):
            for mine, stream in zip(found, streams, strict=True):
                chunk = next(stream, None)
                mine += chunk.token_ids if chunk is not None else ()
    assert found == [want.tokens, short]


def test_a_stream_left_early_frees_its_slot(case: Case) -> None:
    for _ in range(3):
        stream = case.llm.stream(case.golden.prompt, max_tokens=32, ignore_eos=True)
        next(stream)
        next(stream)
        leave(stream)
        assert [pool.used for pool in case.llm.engine.pools] == [0]
    out = case.llm.generate(case.golden.prompt, max_tokens=32, ignore_eos=True)
    assert list(out.token_ids) == case.golden.tokens


def test_refusals(case: Case) -> None:
    llm = case.llm
    with pytest.raises(hornito.HornitoError, match="has no tokenizer"):
        llm.generate("text")
    with pytest.raises(hornito.HornitoError, match=r"no (chat template|tokenizer)"):
        llm.chat([{"role": "user", "content": "x"}])
    with pytest.raises(hornito.HornitoError, match="stop strings need a tokenizer"):
        llm.generate([5], stop=["x"])
    with pytest.raises(hornito.HornitoError, match="the prompt is empty"):
        llm.generate([])
    with pytest.raises(hornito.HornitoError, match=r"temperature must be from 0 to 100, not -0.5"):
        llm.generate([5], temperature=-0.5)
    with pytest.raises(hornito.HornitoError, match="max_tokens must be at least 1"):
        llm.generate([5], max_tokens=0)
    with pytest.raises(hornito.HornitoError, match="513 tokens; the context holds 512"):
        llm.generate([5] * 513)
    with pytest.raises(hornito.HornitoError, match="token id 512 is outside"):
        llm.generate([512])
    out = llm.generate([5] * 512, max_tokens=9, ignore_eos=True)
    assert len(out.token_ids) == 1 and out.finish_reason == "length"
