"""The official client against a live server: every route and every field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hornito.text.tokenizer import Tokenizer
from sampling_reference import uniform
from serving import EACH_MODEL, NAME, Live, texts
from text_places import character_places
from tiny import log_softmax

pytestmark = [pytest.mark.gpu, EACH_MODEL]

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
PROMPT = [5 + i % 90 for i in range(20)]


def logits_of(server: Live, ids: list[int]) -> Any:
    """The engine's own logits behind each token, as float64 log-probabilities."""

    def evaluate() -> Any:
        with server.llm.session() as session:
            return log_softmax(session.prefill_logits(ids))

    return server.scheduler.call(evaluate)


def tokens_of(server: Live, places: Sequence[Mapping[str, Any]]) -> list[int]:
    """The tokens whose log-probabilities a chat shows."""
    tokenizer = server.llm.tokenizer
    spelled = {bytes(tokenizer.token_bytes(t)): t for t in reversed(range(tokenizer.vocab_size))}
    return [spelled[bytes(place["bytes"])] for place in places]


def split_character(tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """A character that takes two tokens, and these."""
    for character in "éþř":
        ids = tokenizer.encode(character, add_bos=False)
        if len(ids) == 2:
            return character, ids
    raise AssertionError("each is one token, or more than two")


def test_models(client: Any, server: Live) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object, card.owned_by) == (NAME, "model", "hornito")
    assert card.max_model_len == server.llm.context
    assert client.models.retrieve(NAME) == card


def test_a_chat_equals_the_python_interface(client: Any, server: Live) -> None:
    want = server.scheduler.call(lambda: server.llm.chat(MESSAGES, max_tokens=12))
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=12, temperature=0
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", want.text)
    assert (choice.index, choice.finish_reason) == (0, want.finish_reason)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.model == NAME and answer.system_fingerprint.startswith("fp_")
    prompt = len(server.llm.chat_ids(MESSAGES))
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == len(want.token_ids)
    assert answer.usage.total_tokens == prompt + len(want.token_ids)
    # As content parts, and with OpenAI's newer name of the system.
    parts = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, MESSAGES[1]]
    again = client.chat.completions.create(
        model=NAME, messages=parts, max_completion_tokens=12, temperature=0
    )
    assert again.choices[0].message.content == want.text
    assert again.usage.prompt_tokens_details.cached_tokens == prompt - 1


def test_completions_of_text_and_ids(client: Any, server: Live) -> None:
    text = "hello there"
    ids = server.llm.tokenizer.encode(text)
    want = server.scheduler.call(lambda: server.llm.generate(ids, max_tokens=8))
    for prompt in (text, ids, [text], [ids]):
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=8, temperature=0)
        assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (want.text, want.finish_reason)
        assert choice.logprobs is None
    both = client.completions.create(
        model=NAME, prompt=[text, PROMPT], max_tokens=8, temperature=0, n=2
    )
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == want.text
    assert both.usage.prompt_tokens == len(ids) + len(PROMPT)
    assert both.usage.completion_tokens == 2 * 8 + 2 * 8


@pytest.mark.parametrize("usage", [False, True])
def test_events_of_a_chat(server: Live, usage: bool) -> None:
    """Role in the first delta, reason in the last, usage only when asked for, then the end."""
    body: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 9, "temperature": 0}
    if usage:
        body["stream_options"] = {"include_usage": True}
    whole = server.chat(MESSAGES, max_tokens=9, temperature=0)
    events = server.events("/v1/chat/completions", **body)
    assert events.pop() == "[DONE]"
    assert all(("usage" in event) is usage for event in events)
    if usage:
        last = events.pop()
        assert last["choices"] == []
        want = {k: v for k, v in whole["usage"].items() if k.endswith("_tokens")}
        assert {k: v for k, v in last["usage"].items() if k in want} == want
        assert all(event["usage"] is None for event in events)
    first, *rest, end = events
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert end["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    ]
    assert all(set(event["choices"][0]["delta"]) == {"content"} for event in rest)
    assert all(event["choices"][0]["finish_reason"] is None for event in rest)
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert texts(events) == whole["choices"][0]["message"]["content"]


def test_events_of_completions(client: Any, server: Live) -> None:
    whole = server.complete(["one", "two"], max_tokens=7, temperature=0)
    chunks = list(
        client.completions.create(
            model=NAME,
            prompt=["one", "two"],
            max_tokens=7,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 14
    for index, choice in enumerate(whole["choices"]):
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert "".join(c.text for c in mine) == choice["text"]
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["length"]


def test_characters_of_several_tokens(server: Live) -> None:
    """A character comes as a whole, in the event of its last token."""
    character, tokens = split_character(server.llm.tokenizer)
    body = {
        "max_tokens": 40,
        "temperature": 1,
        "seed": 5,
        "logit_bias": {str(token): 100 for token in tokens},
    }
    whole = server.complete("x", **body)["choices"][0]["text"]
    events = server.events("/v1/completions", model=NAME, prompt="x", **body)
    pieces = [event["choices"][0]["text"] for event in events[:-1]]
    assert whole.count(character) >= 3 and "".join(pieces) == whole
    assert any(character in piece for piece in pieces)


def test_stop_strings_across_tokens(client: Any, server: Live) -> None:
    """H6: found wherever tokens and events begin and end; not part of the text."""
    whole = server.complete(PROMPT, max_tokens=24, temperature=0)["choices"][0]["text"]
    tokenizer = server.llm.tokenizer
    ids = server.scheduler.call(lambda: server.llm.generate(PROMPT, max_tokens=24)).token_ids
    seam = len(tokenizer.decode(ids[:9], skip_special=True).rstrip("\ufffd"))
    stop = whole[seam - 2 : seam + 2]
    want = whole[: whole.index(stop)]
    for stops in (stop, [stop], ["never there", stop]):
        found = client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=24, temperature=0, stop=stops
        ).choices[0]
        assert (found.text, found.finish_reason) == (want, "stop")
    events = server.events(
        "/v1/completions", model=NAME, prompt=PROMPT, max_tokens=24, temperature=0, stop=stop
    )
    assert texts(events) == want
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_end_tokens_stop(client: Any, server: Live) -> None:
    """H8: the reason is that of each answer; the end token is counted, and not shown."""
    end = server.llm.engine.eos_ids[0]
    body = {"max_tokens": 5, "temperature": 0, "logit_bias": {str(end): 100}}
    answer = server.chat("hello", logprobs=True, **body)
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["logprobs"]["content"] == []
    assert answer["usage"]["completion_tokens"] == 1
    past = server.chat("hello", ignore_eos=True, **body)
    assert past["choices"][0]["finish_reason"] == "length"
    assert past["usage"]["completion_tokens"] == 5


def test_the_end_of_the_context(server: Live) -> None:
    """H1: an answer that reaches it ends there, with the reason; without a limit, too."""
    context = server.llm.context
    ids = [5 + i % 90 for i in range(context - 6)]
    answer = server.complete(ids, max_tokens=99, temperature=0, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 7
    chat = server.chat("a " * 90, temperature=0, ignore_eos=True)
    assert chat["choices"][0]["finish_reason"] == "length"
    assert chat["usage"]["total_tokens"] == context + 1
    full = server.complete([5 + i % 90 for i in range(context)], temperature=0)
    assert full["usage"]["completion_tokens"] == 1


ROUNDING = 1e-4
"""Of a logit, between the kernels for one row, for several, and for a chunk of a prompt."""


def drawn_tokens(server: Live, choice: Mapping[str, Any], body: Mapping[str, Any]) -> list[int]:
    """The tokens of an answer to "hello", each of which is what its seed draws.

    By docs/sampling.md, in float64 of the engine's logits: the token at the seed's number in the
    cumulative weight by id. Logits that are off by up to d move a border of that by d / (2 T) at
    most: only where the number lies so near a border of two tokens may either of them be drawn.
    """
    tokens = tokens_of(server, choice["logprobs"]["content"])
    assert len(tokens) == body["max_tokens"]
    text = server.llm.tokenizer.decode(tokens, skip_special=True)
    assert choice["message"]["content"] == text
    prompt = server.llm.chat_ids([{"role": "user", "content": "hello"}])
    rows = logits_of(server, [*prompt, *tokens])
    slack = ROUNDING / (2 * body["temperature"])
    for at, token in enumerate(tokens, len(prompt) - 1):
        scaled = (rows[at] - rows[at].max()) / body["temperature"]
        weights = np.floor(2.0**31 * np.exp(scaled))
        weights[np.argsort(-scaled, kind="stable")[body.get("top_k", len(scaled)) :]] = 0
        after = weights[: token + 1].sum()
        number = uniform(body["seed"], at) * weights.sum()
        assert after - weights[token] - slack * weights.sum() <= number
        assert number <= after + slack * weights.sum()
    return tokens


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}], ids=["all", "top_k"])
def test_seeds_and_choices(server: Live, filters: dict[str, Any]) -> None:
    """The same seed gives the same answer; the n-th choice is that of the seed plus n.

    Alone, several in a call, streamed: the kernels are others and round otherwise, so a token may
    be another where a draw falls on the border of two, and the answer from there on. Each answer is
    proved to be the seed's own, token by token. A filter that leaves few borders leaves no excuse.
    """
    more: dict[str, Any] = {"max_tokens": 10, "temperature": 1.5, "ignore_eos": True, **filters}
    ask = {"logprobs": True, **more}
    alone, warm, again = (
        [server.chat("hello", seed=7 + i, **ask)["choices"][0] for i in range(3)] for _ in range(3)
    )
    # Of the same prompt from the cache, one row a call: the same schedule, and so the same bits.
    assert warm == again
    together = server.chat("hello", seed=7, n=3, **ask)["choices"]
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": NAME, "messages": messages, "seed": 7, "n": 3, **ask}
    events = server.events("/v1/chat/completions", **body)
    streamed = [gathered(events, index) for index in range(3)]
    for i in range(3):
        sampling = {**more, "seed": 7 + i}
        # Two of them can part only at a token that is within rounding of a border in both.
        answers = [
            drawn_tokens(server, choices[i], sampling)
            for choices in (alone, warm, together, streamed)
        ]
        if filters:
            assert answers == [answers[0]] * 4
    assert len({choice["message"]["content"] for choice in together}) == 3
    silent = server.chat("hello", seed=7, **more)["choices"][0]
    assert silent["message"] == warm[0]["message"]
    assert server.chat("hello", seed=-1, **more) != server.chat("hello", seed=1, **more)
    free = {server.chat("hello", **more)["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(free) == 3


def gathered(events: Sequence[Any], index: int) -> dict[str, Any]:
    """A choice of a stream of chat, as it would have come at once."""
    mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
    places = [place for one in mine if one["logprobs"] for place in one["logprobs"]["content"]]
    return {"message": {"content": texts(events, index)}, "logprobs": {"content": places}}


#: Of each field: values that change what a request without it gives.
EFFECTS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 4},
    {"logit_bias": {"300": 100}},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 5.0},
    {"max_tokens": 3},
    {"stop": ["e", "a", "'", "<", "\ufffd", " "]},
]


@pytest.mark.parametrize("change", EFFECTS, ids=lambda change: next(iter(change)))
@pytest.mark.parametrize("path", ["chat", "complete"])
def test_f5_every_field_has_its_effect(server: Live, change: dict[str, Any], path: str) -> None:
    # An answer that ends before it repeats a token gives the penalties nothing to do.
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    ask = getattr(server, path)
    plain, changed = ask("hello", **body), ask("hello", **{**body, **change})
    assert plain["choices"][0] != changed["choices"][0]


@pytest.mark.parametrize(
    "change", [{"top_p": 0.01}, {"top_k": 1}, {"min_p": 1.0}], ids=["top_p", "top_k", "min_p"]
)
def test_f5_filters_have_their_effect(server: Live, change: dict[str, Any]) -> None:
    """Each leaves the most likely token alone, whatever the seed."""
    body = {"max_tokens": 12, "ignore_eos": True}
    greedy = server.chat("hello", temperature=0, **body)["choices"]
    drawn = [server.chat("hello", temperature=1, seed=s, **body)["choices"] for s in (1, 2)]
    kept = [
        server.chat("hello", temperature=1, seed=s, **change, **body)["choices"] for s in (1, 2)
    ]
    assert kept == [greedy, greedy] and drawn[0] != drawn[1]


FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_an_answer_of_a_form(client: Any) -> None:
    """One, whole and streamed; tests/structured has the rest."""
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")
    body: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 100, "seed": 3}
    choice = client.chat.completions.create(**body, response_format=FORM, user="me").choices[0]
    assert json.loads(choice.message.content)["city"] in ("Rome", "Oslo")
    assert choice.finish_reason == "stop"
    pieces = list(client.chat.completions.create(**body, response_format=FORM, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == choice.message.content


def test_chat_logprobs_are_the_engines(client: Any, server: Live) -> None:
    """Of the model's own distribution: float64 log-softmax of the engine's logits."""
    answer = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=10,
        temperature=1,
        seed=3,
        logprobs=True,
        top_logprobs=5,
        logit_bias={"300": 3},
        extra_body={"ignore_eos": True},
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 10
    tokens = tokens_of(server, [place.model_dump() for place in content])
    prompt = server.llm.chat_ids(MESSAGES)
    rows = logits_of(server, [*prompt, *tokens])
    for place, token, row in zip(content, tokens, rows[len(prompt) - 1 :], strict=False):
        assert abs(place.logprob - row[token]) < 1e-4
        best = np.argsort(-row, kind="stable")[:5]
        assert len(place.top_logprobs) == 5
        np.testing.assert_allclose(
            [one.logprob for one in place.top_logprobs], row[best], rtol=0, atol=1e-4
        )
        likely = tokens_of(server, [one.model_dump() for one in place.top_logprobs])
        assert likely == best.tolist()


@pytest.mark.parametrize("top", [0, 1, 4])
def test_echo_has_the_prompts_logprobs(client: Any, server: Live, top: int) -> None:
    """What harnesses ask for: the log-probability of every token of the prompt."""
    ids = [5 + (7 * i) % 250 for i in range(75)]
    answer = client.completions.create(
        model=NAME, prompt=[ids], max_tokens=2, echo=True, logprobs=top, temperature=0
    )
    (choice,) = answer.choices
    found = choice.logprobs
    assert choice.text.startswith(server.llm.tokenizer.decode(ids))
    rows = logits_of(server, ids)
    want = rows[np.arange(74), ids[1:]]
    assert found.token_logprobs[0] is None and len(found.token_logprobs) == 77
    np.testing.assert_allclose(found.token_logprobs[1:75], want, rtol=0, atol=1e-4)
    assert found.text_offset[0] == 0 and len(found.text_offset) == 77
    assert sorted(found.text_offset) == found.text_offset
    pieces = [server.llm.tokenizer.token_bytes(token) for token in ids]
    assert found.text_offset[:75] == character_places(pieces)
    for token, at in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[at:].startswith(token)
    if not top:
        assert found.top_logprobs is None
        return
    assert found.top_logprobs[0] is None
    for row, likely, own in zip(
        rows, found.top_logprobs[1:75], found.token_logprobs[1:75], strict=False
    ):
        assert top <= len(likely) + 1 and len(likely) <= top + 1
        assert abs(max(likely.values()) - row.max()) < 1e-4
        # Whether a token is the most likely one shows in equal numbers.
        assert (own == max(likely.values())) == (abs(own - row.max()) < 1e-9 or own >= row.max())


def test_echo_alone(server: Live) -> None:
    """Nothing new, nothing but scores; text comes back as it was, streamed or not."""
    answer = server.complete("hello there", max_tokens=0, echo=True, logprobs=1)
    assert answer["choices"][0]["text"] == "hello there"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = answer["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "hello there"
    plain = server.complete("hello there", max_tokens=4, echo=True, temperature=0)
    body = {"model": NAME, "prompt": "hello there", "max_tokens": 4, "temperature": 0}
    streamed = server.events("/v1/completions", **body, echo=True)
    assert texts(streamed) == plain["choices"][0]["text"]
    assert plain["choices"][0]["text"].startswith("hello there")
    single = server.complete([9], max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert single["token_logprobs"] == [None] and single["top_logprobs"] == [None]


def test_offsets_at_the_end_of_a_prompt(server: Live) -> None:
    """Half a character there is a character of its own: the answer does not end it."""
    _, (begin, end) = split_character(server.llm.tokenizer)
    body = {"echo": True, "logprobs": 0, "max_tokens": 2, "temperature": 0}
    answer = server.complete([[begin]], logit_bias={str(end): 100}, **body)["choices"][0]
    assert answer["text"] == "\ufffd" * 3
    assert answer["logprobs"]["text_offset"] == [0, 1, 2]
    answer = server.complete([[begin, end]], logit_bias={str(begin): 100}, **body)["choices"][0]
    assert answer["text"] == split_character(server.llm.tokenizer)[0] + "\ufffd\ufffd"
    assert answer["logprobs"]["text_offset"] == [0, 0, 1, 2]
    alone = server.complete([[begin]], logit_bias={str(end): 100}, **{**body, "echo": False})
    assert alone["choices"][0]["logprobs"]["text_offset"] == [0, 1]


def test_tokens_over_http(server: Live) -> None:
    tokenizer = server.llm.tokenizer
    text = "hello <|im_end|> é"
    made = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert made["tokens"] == tokenizer.encode(text, parse_special=True)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == server.llm.context
    plain = server.post("/tokenize", model=NAME, prompt=text, parse_special=False).json()
    assert plain["tokens"] == tokenizer.encode(text) != made["tokens"]
    back = server.post("/detokenize", tokens=made["tokens"]).json()
    assert back == {"prompt": text}
    chat = server.post("/tokenize", messages=MESSAGES).json()
    assert chat["tokens"] == server.llm.chat_ids(MESSAGES)
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["vocab_size"] == logits_of(server, made["tokens"]).shape[-1]
    assert info["chat_template"] == server.llm.chat_template.source


def test_health_and_metrics(server: Live) -> None:
    server.chat("hello", max_tokens=4)
    server.wait_idle()
    health = server.http.get("/health")
    assert health.status_code == 200
    facts = health.json()
    assert (facts["status"], facts["running"], facts["waiting"]) == ("ok", 0, 0)
    assert facts["device"] == server.llm.device_line
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    assert found["hornito_up"] == 1 and found["hornito_queue_length"] == 0
    assert found["hornito_time_to_first_token_seconds_count"] > 0
    assert found["hornito_time_per_output_token_seconds_count"] > 0
    assert found["hornito_generated_tokens_total"] >= 4
    assert found["hornito_prompt_tokens_total"] > found["hornito_cached_tokens_total"] >= 0
    assert (
        found["hornito_prefix_cache_lookups_total"] >= found["hornito_prefix_cache_hits_total"] >= 0
    )
    memory = server.llm.engine.memory
    assert found['hornito_device_memory_bytes{purpose="kv"}'] == memory.kv
    assert found["hornito_device_memory_allocated_bytes"] >= memory.total


def test_the_page(server: Live) -> None:
    page = server.http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text and "https://" not in page.text  # nothing from outside
