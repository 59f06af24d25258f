"""Answers of a given form from a tiny model on a device; the model itself writes noise."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import hornito
from faults import lose
from hornito.api import LLM, Overflow
from hornito.errors import HornitoError, UsageError
from hornito.runtime.decode import DecodeRun
from hornito.runtime.results import Chunk
from hornito.runtime.sampler import Sampler, SamplingParams
from hornito.serve.prefix_cache import PrefixCache
from hornito.serve.rounds import NoWatch, Rounds
from hornito.serve.work import Event, Group, Job, Queue, Work
from hornito.structured.formats import ResponseFormat, json_schema
from structured.schemas import random_schema

pytestmark = pytest.mark.gpu

FORM = ResponseFormat("regex", "(red|green|blue), [a-m]{5,9}[.!]")


def test_schemas_at_temperature_one(llm: LLM) -> None:
    """Fifty random schemas: every answer ends by itself and is valid JSON of its schema."""
    jsonschema = pytest.importorskip("jsonschema")
    for seed in range(50):
        schema = random_schema(seed)
        out = llm.generate(
            "data:",
            response_format={"type": "json_schema", "json_schema": {"schema": schema}},
            temperature=1.0,
            seed=seed,
            max_tokens=400,
        )
        assert out.finish_reason == "stop", (seed, out.text)
        jsonschema.validate(json.loads(out.text), schema)


def test_any_json_object(llm: LLM) -> None:
    """`json_object` within its tokens is an object, or the beginning of one."""
    for seed in range(5):
        out = llm.generate(
            "x", response_format={"type": "json_object"}, temperature=1.0, seed=seed, max_tokens=60
        )
        assert out.text.startswith("{")
        if out.finish_reason == "stop":
            assert isinstance(json.loads(out.text), dict)


def test_greedy_answers_take_the_largest_allowed_logit(llm: LLM) -> None:
    """Step by step: the token is the argmax of the logits that the mask leaves."""
    state, twin = llm.grammars.start(FORM), llm.grammars.start(FORM)
    sampler = Sampler(SamplingParams(logprobs=0), 0, 3, state)  # log-probabilities: nothing forced
    with llm.session() as session, llm.session() as other:
        session.prefill([5, 6, 7], sampler=sampler)
        run = DecodeRun([session], [30], ignore_eos=[False], steps=8, samplers=[sampler])
        assert session.record is not None
        records = [session.record]
        other.prefill([5, 6, 7])
        for _ in range(40):
            if run.left == 0 and run.ahead == 0:
                break
            run.submit()
            assert run.left == 0, "a mask needs the token before it"
            found = run.receive()
            assert found is not None and len(found[0]) == 1
            records += found[0]
        run.stop()
        for record in records:
            bits = np.unpackbits(np.frombuffer(twin.mask(), np.uint8), bitorder="little")
            logits = other.logits().astype(np.float64)
            masked = np.where(bits[: len(logits)] == 1, logits, -np.inf)
            assert record.token == masked.argmax()
            own = logits - logits.max()
            assert abs(record.logprob - (own - np.log(np.exp(own).sum()))[record.token]) < 1e-3
            twin.accept(record.token)
            other.step(record.token)
        assert twin.complete and len(records) > 6


@pytest.mark.parametrize("temperature", (0.0, 1.3))
def test_forced_tokens_are_evaluated_in_one_call(llm: LLM, temperature: float) -> None:
    """The tokens are those of the answer fed one by one, and fewer submissions made them."""
    text = "((The answer to the question that was asked is: )[a-c]{3}){2} -- end of it"
    form = ResponseFormat("regex", text)
    out = llm.generate("Q", response_format=form, temperature=temperature, seed=4, max_tokens=300)
    assert out.finish_reason == "stop" and re.fullmatch(text, out.text)
    # The same choices without a grammar: what the model draws behind the forced tokens.
    ids, params = list(out.token_ids), SamplingParams(temperature=temperature, seed=4)
    state = llm.grammars.start(form)
    prompt = llm.tokenizer.encode("Q")
    chosen = 0
    with llm.session() as session:
        for place, token in enumerate(ids):
            sampler = Sampler(params, 4, len(prompt), llm.grammars.start(form))
            for earlier in ids[:place]:
                sampler.constraint.accept(earlier)  # type: ignore[union-attr]
            session.prefill(prompt if place == 0 else [ids[place - 1]], sampler=sampler)
            forced = place > 0 and state.take_forced(1)
            if forced:
                assert forced == [token]
            else:
                assert session.pending == token
                state.accept(token)
                chosen += 1
    assert chosen < len(ids) / 4
    submissions = llm.engine.last_ticket
    llm.generate("Q", response_format=form, temperature=temperature, seed=4, max_tokens=300)
    assert llm.engine.last_ticket - submissions < 4 * chosen + 8


def test_rows_without_a_form_are_as_ever(llm: LLM) -> None:
    """Three sessions share the calls; the two free ones say what they say alone."""
    params = [SamplingParams(), SamplingParams(temperature=1.0)]
    prompts = [[5, 6, 7], [9, 10]]
    alone = []
    for q, prompt in zip(params, prompts, strict=True):
        sampler = Sampler(q, 11, len(prompt))
        with llm.session() as session:
            session.prefill(prompt, sampler=sampler)
            run = DecodeRun([session], [40], ignore_eos=[True], steps=4, samplers=[sampler])
            alone.append([session.pending, *_tokens(run)[0]])
    samplers = [Sampler(q, 11, len(p)) for q, p in zip(params, prompts, strict=True)]
    samplers.insert(1, Sampler(SamplingParams(temperature=1.0), 3, 2, llm.grammars.start(FORM)))
    prompts.insert(1, [20, 21])
    sessions = [llm.session() for _ in prompts]
    try:
        for session, prompt, sampler in zip(sessions, prompts, samplers, strict=True):
            session.prefill(prompt, sampler=sampler)
        first = [session.pending for session in sessions]
        run = DecodeRun(
            sessions, [40] * 3, ignore_eos=[True, False, True], steps=4, samplers=samplers
        )
        rows = _tokens(run)
    finally:
        for session in sessions:
            session.close()
    assert [first[0], *rows[0]] == alone[0]
    assert [first[2], *rows[2]] == alone[1]
    text = llm.tokenizer.decode([first[1] or 0, *rows[1]], skip_special=True)
    assert re.fullmatch(FORM.text, text)


def _tokens(run: DecodeRun) -> list[list[int]]:
    """All tokens of a run; a session that failed is an error."""
    rows: list[list[int]] = [[] for _ in run.sessions]
    while run.left or run.ahead:
        while run.left and run.ahead < 2:
            run.submit()
        for row, records in zip(rows, run.receive() or [], strict=True):
            row += [record.token for record in records]
    run.stop()
    assert run.errors == [None] * len(rows)
    return rows


def test_lists_of_prompts(llm: LLM) -> None:
    """Each answer of a batch has its own place in the form."""
    outs = llm.generate(
        ["a", "b", "c", "d", "e", "f"], response_format=FORM, temperature=1.0, seed=5, max_tokens=60
    )
    assert all(re.fullmatch(FORM.text, out.text) for out in outs)
    assert len({out.text for out in outs}) > 3
    alone = [
        llm.generate(p, response_format=FORM, temperature=1.0, seed=5, max_tokens=60).text
        for p in "ab"
    ]
    assert [out.text for out in outs[:2]] == alone


def test_log_probabilities_of_every_token(llm: LLM) -> None:
    """With log-probabilities every token is evaluated, forced or not."""
    out = llm.generate("x", regex="(abc|abd) and so on", logprobs=2, max_tokens=50)
    assert re.fullmatch("(abc|abd) and so on", out.text) and out.logprobs is not None
    assert len(out.logprobs) == len(out.token_ids)
    assert all(np.isfinite(one.logprob) and len(one.top) == 2 for one in out.logprobs)


def test_max_tokens_may_end_it_anywhere(llm: LLM) -> None:
    """Also inside what is forced; the finish reason says so."""
    text = "a long fixed beginning (x|y) and a long fixed end"
    whole = llm.generate("x", regex=text, max_tokens=100)
    assert whole.finish_reason == "stop"
    for most in range(1, len(whole.token_ids) + 1):
        out = llm.generate("x", regex=text, max_tokens=most)
        assert len(out.token_ids) <= most
        assert whole.text.startswith(out.text)
        assert out.finish_reason == ("stop" if out.text == whole.text else "length")


def test_the_context_may_end_it(llm: LLM) -> None:
    """At the context's end it is cut; with `truncate` it goes on in its form."""
    prompt = list(range(5, 255)) * 2
    out = llm.generate(prompt, regex="(one|two)( three four five){9}", max_tokens=200)
    assert out.finish_reason == "length"
    out = llm.generate(
        prompt,
        regex="(one|two)( three four five){9}",
        max_tokens=300,
        overflow=Overflow("truncate", keep_last=300),
    )
    assert out.finish_reason == "stop" and out.text.count("three four five") == 9


def test_stop_strings_penalties_and_bias_still_count(llm: LLM) -> None:
    out = llm.generate("x", regex="[ab]{200}", max_tokens=300, frequency_penalty=2.0)
    assert 60 < out.text.count("a") < 140
    b = llm.tokenizer.encode("b")[0]
    assert llm.generate("x", regex="[ab]{20}", logit_bias={b: 100.0}).text == "b" * 20
    out = llm.generate("x", regex="[ab]{3}STOP[ab]*", stop=["STOP"])
    assert out.finish_reason == "stop" and re.fullmatch("[ab]{3}", out.text)


def test_streams_and_chats(llm: LLM) -> None:
    """The pieces of a stream are the answer; a session of one's own goes on behind it."""
    pieces = list(llm.stream_chat([{"role": "user", "content": "colour?"}], response_format=FORM))
    text = "".join(piece.text for piece in pieces)
    assert re.fullmatch(FORM.text, text) and pieces[-1].finish_reason == "stop"
    with llm.session() as session:
        chunks = list(llm.stream_session(session, [4, 5], regex="(a|b)cdefg"))
        assert "".join(c.text for c in chunks)[1:] == "cdefg"
        again = list(llm.stream_session(session, [6], max_tokens=4))
        assert sum(len(c.token_ids) for c in again) == 4


def test_an_answer_whose_grammar_fails_ends_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that can't go on has its error; its neighbour goes on, and the slots stay good."""
    broken, fine = llm.grammars.start(FORM), llm.grammars.start(FORM)
    samplers = [Sampler(SamplingParams(), 0, 2, broken), Sampler(SamplingParams(), 0, 2, fine)]
    with llm.session() as one, llm.session() as two:
        for session, sampler in zip((one, two), samplers, strict=True):
            session.prefill([5, 6], sampler=sampler)

        def fail() -> bytes:
            raise HornitoError("too complex")

        monkeypatch.setattr(broken, "mask", fail)
        run = DecodeRun([one, two], [60, 60], ignore_eos=[False, False], steps=4, samplers=samplers)
        rows: list[list[int]] = [[], [two.pending or 0]]
        while run.left or run.ahead:
            if run.left:
                run.submit()
            for row, records in zip(rows, run.receive() or [], strict=True):
                row += [record.token for record in records]
        run.stop()
        assert str(run.errors[0]) == "too complex" and run.errors[1] is None
        assert re.fullmatch(FORM.text, llm.tokenizer.decode(rows[1], skip_special=True))
    assert re.fullmatch(FORM.text, llm.generate("x", response_format=FORM).text)


def test_a_wrong_form_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.engine.counters.evaluated_tokens
    with pytest.raises(UsageError, match="not valid or not supported"):
        llm.stream("x", response_format=json_schema({"type": "strin"}))
    with pytest.raises(UsageError, match="regular expression"):
        llm.generate("x", regex="(")
    assert llm.engine.counters.evaluated_tokens == before


def test_requests_with_and_without_a_form_share_the_engine(llm: LLM) -> None:
    """The scheduler's rounds: each answer is what it is alone."""
    queue = Queue(16)
    rounds = Rounds(llm, queue, PrefixCache(llm.engine, 0), NoWatch())
    forms = [FORM, None, ResponseFormat("regex", "(yes|no) and that was it"), None, FORM]
    prompts = [[5, 6, 7], [9, 10], [11], [12, 13, 14], [15]]
    params = SamplingParams(temperature=1.0, seed=9)
    heard: list[list[Event]] = [[] for _ in forms]
    for place, (form, ids) in enumerate(zip(forms, prompts, strict=True)):
        work = Work(ids, params, 60, form=form)
        listen = heard[place].append
        group = Group(lambda _, event, listen=listen: listen(event), place)
        group.jobs.append(Job(group, 0, work))
        queue.add(group.jobs)
    while not rounds.idle:
        rounds.round()
    rounds.close()
    for events, form, ids in zip(heard, forms, prompts, strict=True):
        text = "".join(e.text for e in events if isinstance(e, Chunk))
        alone = llm.generate(
            ids, temperature=1.0, seed=9, max_tokens=60, response_format=form, continuation=True
        )
        assert text == alone.text
        assert form is None or re.fullmatch(form.text, text)


def test_functions_from_python(llm: LLM) -> None:
    """Calls that must come, are found; the conversation goes on with their results."""
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": city}}]
    messages = [{"role": "user", "content": "Hi"}]
    bare = llm.chat_ids(messages)
    assert len(llm.chat_ids(messages, tools=tools)) > len(bare) + 100
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        out = llm.chat(messages, tools=tools, tool_choice=choice, overflow="truncate")
        said, calls = llm.tool_calls(out.text, tools)
        assert said == "" and calls and out.finish_reason == "stop"
        assert all(set(json.loads(call.arguments)) <= {"city"} for call in calls)
    free = llm.chat(messages, tools=tools, tool_choice="none", max_tokens=5)
    assert free.token_ids == llm.chat(messages, max_tokens=5).token_ids
    with pytest.raises(UsageError, match="tools must be a list"):
        llm.chat(messages, tools="weather")  # type: ignore[arg-type]


@pytest.mark.parametrize("after", (1, 4, 9, 16))
def test_an_answer_survives_the_loss_of_its_device(text_model: Path, after: int) -> None:
    """Lost at any submission (a body, a tail, forced tokens): the text is the same."""
    form = ResponseFormat("regex", "(one|two) and then [a-d]{6} and at last (yes|no)!")
    options = {"weights": "fp32", "precision": "high", "context": 256, "recover": True}
    device = os.environ.get("HORNITO_DEVICE")
    with hornito.load(text_model, device=device, **options) as llm:  # type: ignore[arg-type]
        keywords = {"response_format": form, "temperature": 1.0, "seed": 2, "max_tokens": 90}
        whole = llm.generate("x", **keywords)  # type: ignore[arg-type]
        lose(llm.engine.device, after=after)
        again = llm.generate("x", **keywords)  # type: ignore[arg-type]
        assert again.text == whole.text and re.fullmatch(form.text, again.text)
        assert again.token_ids == whole.token_ids


def test_forced_tokens_find_room_among_kept_prefixes(text_model: Path) -> None:
    """With pools full of earlier requests a long forced text makes them give way."""
    options = {"weights": "fp32", "precision": "high", "context": 256, "slots": 1}
    text = "(a|b)" + "the same words again and again, " * 6 + "(c|d)"
    with hornito.load(text_model, device=os.environ.get("HORNITO_DEVICE"), **options) as llm:  # type: ignore[arg-type]
        queue = Queue(16)
        rounds = Rounds(llm, queue, PrefixCache(llm.engine), NoWatch())
        heard: list[Event] = []
        params = SamplingParams(temperature=1.0, seed=9)
        for ids in [[i] * 100 for i in range(5, 25)]:
            group = Group(lambda _, event: None, 0)
            group.jobs.append(Job(group, 0, Work(ids, params, 4)))
            queue.add(group.jobs)
            while not rounds.idle:
                rounds.round()
        pool = llm.engine.pools[0]
        kept = len(rounds.cache)
        assert kept > 2 and pool.count - pool.used < 4  # what a step needs is there, no more
        group = Group(lambda _, event: heard.append(event), 0)
        work = Work([30], params, 240, form=ResponseFormat("regex", text))
        group.jobs.append(Job(group, 0, work))
        queue.add(group.jobs)
        while not rounds.idle:
            rounds.round()
        found = "".join(e.text for e in heard if isinstance(e, Chunk))
        assert re.fullmatch(text, found), heard[-1]
        rounds.close()
