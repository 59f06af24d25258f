"""Forms and functions over HTTP, with the official client against a live server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from text_model import write_text_model
from tree import own_cache

openai = pytest.importorskip("openai", reason="the openai client is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra 'serve')")
pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")

pytestmark = pytest.mark.gpu

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 5}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
NAMED = {"type": "function", "function": {"name": "now"}}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
COLOUR = {
    "type": "json_schema",
    "json_schema": {
        "name": "colour",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"c": {"enum": ["red", "blue"]}},
            "required": ["c"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, kernels: None) -> Iterator[Any]:
    from serving import live

    with own_cache(tmp_path_factory):
        path = write_text_model(tmp_path_factory.mktemp("models") / "tiny.gguf")
        with (
            live(path, context=1024) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
        ):
            yield made


def chat(client: Any, **more: Any) -> Any:
    given = {"model": "tiny", "messages": HELLO, "max_tokens": 300, "seed": 3, **more}
    return client.chat.completions.create(**given)


def test_json_of_a_schema(client: Any) -> None:
    choice = chat(client, response_format=COLOUR).choices[0]
    assert json.loads(choice.message.content)["c"] in ("red", "blue")
    assert choice.finish_reason == "stop"
    pieces = list(chat(client, response_format=COLOUR, stream=True))
    text = "".join(p.choices[0].delta.content or "" for p in pieces)
    assert text == choice.message.content
    assert (
        chat(client, response_format={"type": "json_object"}).choices[0].message.content[0] == "{"
    )


def test_expressions_and_grammars(client: Any) -> None:
    form = {"type": "regex", "regex": "(yes|no), [a-f]{4}"}
    answers = chat(client, extra_body={"response_format": form}, n=3).choices
    assert all(re.fullmatch("(yes|no), [a-f]{4}", c.message.content) for c in answers)
    assert len({c.message.content for c in answers}) > 1
    lark = {"type": "grammar", "grammar": 'start: "a" | "b"'}
    done = client.completions.create(model="tiny", prompt="x", extra_body={"response_format": lark})
    assert done.choices[0].text in ("a", "b")


@pytest.mark.parametrize("choice", ("required", NAMED))
def test_calls_that_must_come(client: Any, choice: Any) -> None:
    """Whole and streamed, they are the same calls, with arguments of their schema."""
    whole = chat(client, tools=TOOLS, tool_choice=choice).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    calls = whole.message.tool_calls
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert call.id.startswith("call_") and call.type == "function"
        assert set(arguments) == ({"city"} if call.function.name == "get_weather" else set())
        assert choice == "required" or call.function.name == "now"
    found: list[dict[str, str]] = []
    reasons = []
    for piece in chat(client, tools=TOOLS, tool_choice=choice, stream=True):
        reasons.append(piece.choices[0].finish_reason)
        assert not piece.choices[0].delta.content
        for part in piece.choices[0].delta.tool_calls or []:
            if part.id is not None:
                assert part.index == len(found)
                found.append({"name": part.function.name, "arguments": ""})
            found[part.index]["arguments"] += part.function.arguments
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])
    assert found == [c.function.model_dump(include={"name", "arguments"}) for c in calls]


def test_one_call_at_a_time(client: Any) -> None:
    for seed in range(4):
        one = chat(
            client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        assert len(one.choices[0].message.tool_calls) == 1


def test_calls_if_the_model_wants_them(client: Any) -> None:
    """The model writes noise, no calls; its text is as ever. With `none` it knows of no tools."""
    free = chat(client, tools=TOOLS, max_tokens=12, temperature=0)
    assert free.choices[0].message.tool_calls is None and free.choices[0].message.content
    bare = chat(client, max_tokens=12, temperature=0)
    none = chat(client, tools=TOOLS, tool_choice="none", max_tokens=12, temperature=0)
    assert none.choices[0].message.content == bare.choices[0].message.content
    assert none.usage.prompt_tokens == bare.usage.prompt_tokens < free.usage.prompt_tokens
    function = {**TOOLS[0]["function"], "strict": True}
    strict = chat(client, tools=[{"type": "function", "function": function}], max_tokens=12)
    assert strict.choices[0].message.content and not strict.choices[0].message.tool_calls
    both = chat(client, tools=TOOLS, response_format=COLOUR).choices[0]
    assert both.message.tool_calls or json.loads(both.message.content)


def test_results_of_calls_go_back(client: Any) -> None:
    call = chat(client, tools=TOOLS, tool_choice=NAMED).choices[0].message
    messages = [
        *HELLO,
        call.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": c.id, "content": "noon"} for c in call.tool_calls),
    ]
    out = chat(client, messages=messages, tools=TOOLS, max_tokens=4)
    assert out.usage.prompt_tokens > 100


@pytest.mark.parametrize(
    ("more", "param", "said"),
    (
        ({"response_format": {"type": "xml"}}, "response_format", "must be one of"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "JSON schema is not valid",
        ),
        ({"response_format": COLOUR, "ignore_eos": True}, "ignore_eos", "contradicts"),
        ({"tools": [{"type": "code"}]}, "tools", "tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "must be auto"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "provide"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, None, "tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            None,
            "no function with a name",
        ),
    ),
)
def test_what_is_wrong_is_a_400(client: Any, more: Any, param: str | None, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        chat(client, extra_body=more)
    assert param is None or caught.value.param == param
