"""A real model behind the server: goldens over HTTP, and the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from real_model import prompt_ids, prompts
from serving import NAME, Live, live, texts

pytestmark = [pytest.mark.gpu, pytest.mark.model]


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, private_cache: Path, device: str | None) -> Iterator[Live]:
    with live(smollm2_gguf, device=device, context=1024, slots=2) as made:
        yield made


@pytest.mark.parametrize(
    "name",
    [
        *("capital", "system", "digits", "completion", "code"),
        pytest.param("long", marks=pytest.mark.slow),
    ],
)
def test_loglikelihoods_are_the_goldens(server: Live, name: str) -> None:
    """What a harness asks for: echo, logprobs 1, max_tokens 1; at the high tier within 1e-3."""
    prompt = prompts("smollm2-135m")[name]
    ids = prompt["prompt_ids"]
    assert prompt_ids(server.llm, prompt) == ids
    answer = server.complete([ids], echo=True, logprobs=1, max_tokens=1, temperature=0)
    found = answer["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == len(ids) + 1
    differences = [
        abs(got - want)
        for got, want in zip(found["token_logprobs"][1:-1], prompt["prompt_logprobs"], strict=True)
    ]
    assert max(differences) < 1e-3
    assert all(
        max(likely.values()) >= own
        for likely, own in zip(found["top_logprobs"][1:], found["token_logprobs"][1:], strict=True)
    )
    assert found["tokens"][-1] == server.llm.tokenizer.decode(prompt["greedy_ids"][:1])


def test_a_chat_with_the_official_client(server: Live, client: Any) -> None:
    """The golden's greedy text, whole and streamed, with its log-probabilities."""
    prompt = prompts("smollm2-135m")["capital"]
    body: dict[str, Any] = {
        **{"model": NAME, "messages": prompt["messages"], "temperature": 0, "max_tokens": 16},
    }
    whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert choice.message.content and prompt["greedy_text"].startswith(choice.message.content)
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage.prompt_tokens == len(prompt["prompt_ids"])
    shown = "".join(place.token for place in choice.logprobs.content)
    assert shown == choice.message.content
    events = server.events("/v1/chat/completions", **body)
    assert texts(events) == choice.message.content
    stop = choice.message.content[3:6]
    cut = client.chat.completions.create(**body, stop=[stop]).choices[0]
    assert cut.message.content == choice.message.content.split(stop)[0]
    assert cut.finish_reason == "stop"


def test_functions_with_the_official_client(client: Any) -> None:
    """A call that must come, whole and streamed, and its result on the way back."""
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")
    city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
    parameters = {**city, "required": ["city"], "additionalProperties": False}
    function = {"name": "get_weather", "parameters": parameters}
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    body: dict[str, Any] = {
        **{"model": NAME, "max_tokens": 100, "temperature": 0, "parallel_tool_calls": False},
        "tools": [{"type": "function", "function": function}],
    }
    ask = client.chat.completions.create
    choice = ask(messages=messages, tool_choice="required", **body).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("get_weather", "tool_calls")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    pieces = ask(messages=messages, tool_choice="required", stream=True, **body)
    deltas = [one for piece in pieces for one in piece.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == "get_weather"
    assert "".join(d.function.arguments for d in deltas) == call.function.arguments
    said = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "snow, 3 degrees below zero"}
    answer = ask(messages=[*messages, said, result], tool_choice="none", **body).choices[0]
    assert answer.message.content and not answer.message.tool_calls
