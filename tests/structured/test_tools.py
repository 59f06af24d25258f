"""Functions in prompts, and grammars of replies that call them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from hornito.errors import HornitoError, UsageError
from hornito.structured.formats import ResponseFormat, json_schema
from hornito.text.template import ChatTemplate
from hornito.text.tool_calls import parse_tool_calls
from hornito.text.tool_styles import (
    STYLES,
    check_choice,
    check_tools,
    conversation_for,
    describe_tools,
    knows_tools,
    tool_style,
    write_call,
)
from hornito.tool_use import ToolUse

#: As in Qwen 2.5's template, shortened.
QWEN = (
    "{%- if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}"
    "\n{{ tool | tojson }}{% endfor %}\n</tools>\nwithin <tool_call></tool_call>:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
)
LLAMA = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>{% if tools is not none %}"
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}<|eot_id|>"
)
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}"
    "{% endif %}"
    "{% for m in rest %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ first if loop.first else '' }}{{ m['content'] }}<end_of_turn>\n{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if loop.last and tools %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}"
    "[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}"
    '{{ c.function | tojson }} {{ c.id }}{% endfor %}]</s>{% elif m.role == "tool" %}'
    "[TOOL_RESULTS] {{ m.content }} {{ m.tool_call_id }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
MISTRAL_ARGS = MISTRAL.replace("[{% for", "{% for").replace("{{ c.id }}", "[ARGS]")
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6, "description": "its name"},
                "unit": {"enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            },
            "required": ["city"],
        },
    },
}
OPTIONAL = {
    "type": "function",
    "function": {
        "name": "now",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"$ref": "#/$defs/z"}, "utc": {"type": "boolean"}},
            "$defs": {"z": {"enum": ["CET", None]}},
        },
    },
}
ODD = {
    "type": "function",
    "function": {
        "name": "odd-one",
        "parameters": {"type": "object", "properties": {"a b": {"type": "null"}}},
    },
}
BARE = {"type": "function", "function": {"name": "stop"}}
TOOLS = [WEATHER, OPTIONAL, BARE]

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]


def test_styles_of_templates() -> None:
    templates = {QWEN: "hermes", LLAMA: "llama", GEMMA: "gemma", PLAIN: "hermes"}
    templates |= {MISTRAL: "mistral", MISTRAL_ARGS: "mistral-args"}
    assert {t: tool_style(t) for t in templates} == templates
    assert [knows_tools(t) for t in (QWEN, LLAMA, GEMMA, PLAIN)] == [True, True, False, False]


def test_templates_that_know_tools_render_them() -> None:
    """Arguments are objects by then, and a null content is empty."""
    messages = conversation_for(QWEN, HISTORY, TOOLS)
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert messages[1]["content"] == "" and messages[2]["name"] == "get_weather"
    text = ChatTemplate(QWEN).render(messages, tools=TOOLS)
    assert '<tool_call>get_weather {"city": "Oslo"}</tool_call>' in text
    assert json.dumps(WEATHER) in text


def test_other_templates_have_them_in_the_conversation() -> None:
    text = ChatTemplate(PLAIN).render(conversation_for(PLAIN, HISTORY, TOOLS))
    assert text.startswith("<|im_start|>system\nYou may call functions")
    assert json.dumps(WEATHER) in text and "<tool_response>\nrain\n</tool_response>" in text
    found = parse_tool_calls(text.split("assistant\n")[1].split("<|im_end|>")[0], "hermes", TOOLS)
    assert found[1][0].name == "get_weather"
    text = ChatTemplate(PLAIN).render(
        conversation_for(PLAIN, [{"role": "system", "content": "Be brief."}, *HISTORY], TOOLS)
    )
    assert text.count("system\n") == 1 and "\n\nBe brief.<|im_end|>" in text


def test_gemma_reads_python() -> None:
    messages = conversation_for(GEMMA, HISTORY, TOOLS)
    text = ChatTemplate(GEMMA).render(messages)
    assert (
        "def get_weather(city: str, unit: object = None, days: int = None, parts: list = None)"
        in text
    )
    assert "city: its name" in text and "unit: one of 'C', 'F'" in text
    assert "```tool_code\nget_weather(city='Oslo')\n```" in text
    assert "```tool_output\nrain\n```" in text and "<start_of_turn>system" not in text
    system = [{"role": "system", "content": "Be brief."}, *HISTORY]
    assert "\n\nBe brief.\n\nWeather?" in ChatTemplate(GEMMA).render(
        conversation_for(GEMMA, system, TOOLS)
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert conversation_for(GEMMA, parts, TOOLS)[0]["content"][1] == {"type": "text", "text": "Hi"}


def test_mistral_insists_on_short_ids() -> None:
    """Those that it made stay; others become nine letters and digits, the same for the result."""
    messages = conversation_for(MISTRAL, HISTORY, TOOLS)
    text = ChatTemplate(MISTRAL).render(messages, tools=TOOLS)
    found = messages[2]["tool_call_id"]
    assert len(found) == 9 and f" {found}]</s>" in text and f"rain {found}[/TOOL_RESULTS]" in text
    own = [{**CALL, "id": "abcDEF123"}]
    (message,) = conversation_for(MISTRAL, [{**HISTORY[1], "tool_calls": own}], TOOLS)
    assert message["tool_calls"][0]["id"] == "abcDEF123"
    assert HISTORY[2]["tool_call_id"] == "c1"


def test_without_tools_nothing_changes() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for template in (QWEN, GEMMA, PLAIN):
        assert conversation_for(template, messages, []) == messages


@pytest.mark.parametrize("style", STYLES)
def test_a_written_call_is_read_again(style: str) -> None:
    text = write_call(style, "get_weather", {"city": 'Å "}', "days": 2, "parts": [True]})
    said, calls = parse_tool_calls(text, style, TOOLS)
    assert said == "" and json.loads(calls[0].arguments) == {
        "city": 'Å "}',
        "days": 2,
        "parts": [True],
    }
    assert "get_weather" in describe_tools(style, TOOLS)


@pytest.mark.parametrize(
    ("tools", "said"),
    (
        ("x", "must be a list"),
        ([{"type": "code"}], r"tools\[0\] must be"),
        ([BARE, {"type": "function", "function": {"name": "a b"}}], r"tools\[1\]\.function\.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": 3}}], "a JSON schema"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "a JSON schema"),
        *(
            ([{"type": "function", "function": {"name": "f", "parameters": schema}}], said)
            for schema, said in (
                ({"properties": []}, r"parameters\.properties"),
                ({"properties": None}, r"parameters\.properties"),
                ({"required": True}, r"parameters\.required"),
                ({"required": [1]}, r"parameters\.required"),
            )
        ),
        ([{"type": "function", "function": {"name": "f", "description": b""}}], "no JSON"),
        ([BARE, BARE], "'stop' twice"),
        ([{**BARE, "cache": 1}], "has a field 'cache'"),
        ([{"type": "function", "function": {"name": "f", "strict": 1.5}}], "strict must be"),
    ),
)
def test_wrong_tools(tools: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_tools(tools)


def test_choices() -> None:
    named = {"type": "function", "function": {"name": "now"}}
    assert [check_choice(c, TOOLS) for c in (None, "auto", "none", "required", named)] == [
        "auto",
        "auto",
        "none",
        "required",
        "function now",
    ]
    for wrong in ("any", 3, {"type": "function", "function": {"name": "x"}}, {"type": "x"}):
        with pytest.raises(UsageError, match="tool_choice"):
            check_choice(wrong, TOOLS)
    for none in (None, []):
        assert ToolUse.of(none).choice == ToolUse.of(none, "auto").choice == "none"
        with pytest.raises(UsageError, match="needs tools"):
            ToolUse.of(none, "required")
    assert ToolUse.of(TOOLS, "none").tools == ()
    with pytest.raises(UsageError, match="parallel_tool_calls"):
        ToolUse.of(TOOLS, None, "no")


@pytest.mark.parametrize(
    ("call", "said"),
    (
        ([{"function": {"arguments": "{}"}}], "has no function with a name"),
        ([{"function": {"name": "now", "arguments": "{"}}], "no JSON"),
        ("now", "must be a list of calls|has no function"),
        ([{"function": {"name": "now", "arguments": "5"}}], "must be an object, not 5"),
        ([{"function": {"name": "now", "arguments": [1]}}], "must be an object"),
        ([{"id": [], "function": {"name": "now", "arguments": "{}"}}], "id of .* must be text"),
    ),
)
@pytest.mark.parametrize("template", (QWEN, GEMMA, MISTRAL))
def test_damaged_calls_of_earlier_turns(template: str, call: Any, said: str) -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": call}]
    with pytest.raises(UsageError, match=said):
        conversation_for(template, messages, [])


def test_what_templates_without_tools_are_given_may_be_odd() -> None:
    """Arguments of null are none; an `enum` that is no list is no reason to fail."""
    call = {"id": "a", "function": {"name": "now", "arguments": "null"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert "now()" in conversation_for(GEMMA, messages, [])[0]["content"]
    odd = {"name": "f", "parameters": {"properties": {"x": {"enum": 5}}}}
    assert "f(x" in describe_tools("gemma", [{"type": "function", "function": odd}])
    with pytest.raises(UsageError, match="tool_call_id must be text"):
        conversation_for(GEMMA, [{"role": "tool", "content": "1", "tool_call_id": []}], [])


def walks(style: str, tools: list[Any], count: int, **more: Any) -> list[str]:
    """Random replies within the grammar of calls."""
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")
    from hornito.structured.grammar import Grammars
    from hornito.structured.tool_grammar import calls_form
    from structured.test_grammar import VOCABULARY, byte_tokenizer, random_answer

    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer, VOCABULARY, [2, 0])
    texts = []
    for seed in range(count):
        state = grammars.start(calls_form(style, tools, **more))
        ids = [i for i in random_answer(state, random.Random(seed)) if i not in (0, 2)]
        texts.append(tokenizer.decode(ids))
    return texts


@pytest.mark.parametrize("style", STYLES)
def test_forced_calls_are_calls_whatever_the_model_says(style: str) -> None:
    """Any walk through the grammar is calls of known functions, with arguments of their schemas."""
    jsonschema = pytest.importorskip("jsonschema")
    tools = [*TOOLS, ODD]
    schemas = {t["function"]["name"]: t["function"].get("parameters", {}) for t in tools}
    if style == "gemma":
        tools.remove(ODD)  # no name of a function in Python
    names, several = set(), False
    for text in walks(style, tools, 40):
        said, calls = parse_tool_calls(text, style, tools)
        assert said == "" and calls, text
        several = several or len(calls) > 1
        for call in calls:
            names.add(call.name)
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
            assert set(json.loads(call.arguments)) <= set(schemas[call.name].get("properties", {}))
    assert names == {t["function"]["name"] for t in tools} and several
    for text in walks(style, tools, 10, parallel=False):
        assert len(parse_tool_calls(text, style, tools)[1]) == 1


def test_names_that_python_lacks() -> None:
    """Gemma's arguments whose names are no identifiers go into a dictionary."""
    tool = {"type": "function", "function": {**ODD["function"], "name": "odd"}}  # type: ignore[dict-item]
    for text in walks("gemma", [tool], 6):
        assert all(call.name == "odd" for call in parse_tool_calls(text, "gemma", [tool])[1])


def test_control_tokens_that_mark_calls_are_text() -> None:
    """Mistral's: a reply has them in its text, grammars ask for the token, messages can't spell
    it."""
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")
    from gguf_samples import tiny_vocabulary
    from hornito.structured.grammar import Grammars
    from hornito.structured.tool_grammar import calls_form, strict_form
    from hornito.text.tokenizer import Tokenizer
    from structured.test_grammar import VOCABULARY, random_answer
    from text_model import tokenizer_json

    keys = tiny_vocabulary()
    tokens, types = list(keys["tokenizer.ggml.tokens"]), list(keys["tokenizer.ggml.token_type"])
    marks = {"[TOOL_CALLS]": len(tokens) - 2, "[ARGS]": len(tokens) - 1}
    for text, place in marks.items():
        tokens[place], types[place] = text, 3
    changed = {**keys, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = Tokenizer(tokenizer_json(changed), bos_id=1, eos_ids=[2, 0])
    assert marks.items() <= tokenizer.special_tokens.items()
    spelled = "[TOOL_CALLS]stop[ARGS]{}"
    assert not {*marks.values()} & {*tokenizer.encode(spelled)}
    ids = tokenizer.encode(spelled, parse_special=True)
    assert [i for i in ids if i in marks.values()] == [*marks.values()]
    assert tokenizer.decode([1, *ids, 2], skip_special=True) == spelled
    grammars = Grammars(tokenizer, VOCABULARY, [2, 0])
    for style in ("mistral", "mistral-args"):
        for seed in range(8):
            state = grammars.start(calls_form(style, TOOLS))
            found = random_answer(state, random.Random(seed))
            assert found[0] == marks["[TOOL_CALLS]"]
            text = tokenizer.decode(found, skip_special=True)
            assert parse_tool_calls(text, style, TOOLS)[1]
    state = grammars.start(strict_form("mistral-args", [BARE]))
    for token in [*tokenizer.encode("So: "), *ids, 2]:
        state.accept(token)
    assert state.complete


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]

#: In each style: a call of a strict function, of another, and what can't be in the strict one.
SPELLED = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        '<tool_call>{"name": "stop", "arguments": {"any": [1]}}</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": 7',
    ),
    "llama": (
        '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}',
        '{"name": "stop", "parameters": {"any": [1]}}',
        '{"name": "get_weather", "parameters": {"city": 7',
    ),
    "gemma": (
        '```tool_code\nget_weather(city="Oslo", days=3)\n```',
        '```tool_code\nstop(**{"any": [1]})\n```',
        "```tool_code\nget_weather(city=7",
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]',
        '[TOOL_CALLS][{"name": "stop", "arguments": {"any": [1]}}]',
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": 7',
    ),
    "mistral-args": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 3}',
        '[TOOL_CALLS]stop[ARGS]{"any": [1]}',
        '[TOOL_CALLS]get_weather[ARGS]{"city": 7',
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_strict_functions_are_called_rightly(style: str) -> None:
    """Text is free, calls are not; what is right is taken as a whole, and read again."""
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")
    from hornito.structured.grammar import Grammars
    from hornito.structured.tool_grammar import strict_form
    from structured.test_grammar import VOCABULARY, byte_tokenizer

    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer, VOCABULARY, [2, 0])
    right, other, wrong = SPELLED[style]

    def taken(text: str, parallel: bool = True) -> bool:
        state = grammars.start(strict_form(style, [STRICT, BARE], parallel=parallel))
        try:
            for token in [*tokenizer.encode(text), 2]:
                state.accept(token)
        except HornitoError:
            return False
        return state.complete

    assert taken("") and taken("It is {sunny} <b>\nthere.")
    for call in (right, other):
        assert taken(call)
        said, calls = parse_tool_calls(call, style, [STRICT, BARE])
        assert said == "" and len(calls) == 1
    assert not taken(wrong) and not taken(f"{wrong}}}")
    two = f"{right}; {other}" if style == "llama" else f"{right}{other}"
    assert taken(right, parallel=False) and taken(two)
    if style == "llama":
        assert not taken(two, parallel=False)
    else:
        assert taken(f"Well. {right}{other} Done.") and not taken(f"Well. {wrong}")


def test_an_answer_of_a_schema_beside_calls() -> None:
    answer = json_schema({"enum": [{"done": True}]})
    kinds = set()
    for text in walks("hermes", [BARE], 20, answer=answer):
        said, calls = parse_tool_calls(text, "hermes", [BARE])
        assert bool(calls) != bool(said)
        assert calls or json.loads(said) == {"done": True}
        kinds.add(bool(calls))
    assert kinds == {True, False}


def test_forms_of_choices() -> None:
    qwen = ChatTemplate(QWEN)
    answer = json_schema({"type": "object"})
    assert ToolUse.of(TOOLS).form(qwen) is None
    assert ToolUse.of(TOOLS, "none").form(qwen, answer) == answer
    assert ToolUse.of(TOOLS, "none").parser(qwen) is None
    both = ToolUse.of(TOOLS).form(qwen, answer)
    assert both is not None and "start: calls | %json" in both.text
    with pytest.raises(UsageError, match="leaves no room for calls"):
        ToolUse.of(TOOLS).form(qwen, ResponseFormat("regex", "a"))
    strict = ToolUse.of([STRICT, BARE]).form(qwen)
    assert strict is not None and "trigger[lazy]" in strict.text
    every = ToolUse.of(TOOLS, "required").form(qwen)
    one = ToolUse.of(TOOLS, {"type": "function", "function": {"name": "now"}}).form(qwen)
    assert every is not None and one is not None
    assert "get_weather" in every.text and "get_weather" not in one.text and "now" in one.text
