"""A real model behind the server: goldens over HTTP, and the official client."""

from __future__ import annotations

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


def test_a_chat_with_the_official_client(server: Live) -> None:
    """The golden's greedy text, whole and streamed, with its log-probabilities."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
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
