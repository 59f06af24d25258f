"""Calls in replies: whole, in pieces, and what only looks like one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from hornito.text.python_calls import python_calls
from hornito.text.tool_calls import (
    ArgumentText,
    CallBegun,
    Text,
    ToolCall,
    ToolCallParser,
    ToolEvent,
    parse_tool_calls,
)


def tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", city="string", days="integer"), tool("now"), tool("note", text="string")]
NESTED = {"text": 'a "quoted" } and { \\ </tool_call>', "more": [{"x": [1, {"y": "]"}]}, None]}

Case = tuple[str, str, str, list[tuple[str, Any]]]

CASES: dict[str, Case] = {
    "hermes one": (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        "",
        [("weather", {"city": "Paris", "days": 3})],
    ),
    "hermes text and two": (
        "hermes",
        'Let me look. \n\n<tool_call>{"name":"now","arguments":{}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"city": "Zürich"}, "name": "weather"}\n</tool_call>\nDone <b>',
        "Let me look.Done <b>",
        [("now", {}), ("weather", {"city": "Zürich"})],
    ),
    "hermes nested": (
        "hermes",
        f'<tool_call>{{"name": "note", "arguments": {json.dumps(NESTED)}}}</tool_call>',
        "",
        [("note", NESTED)],
    ),
    "hermes arguments as text": (
        "hermes",
        '<tool_call>{"name": "note", "arguments": "{\\"text\\": \\"x\\"}"}</tool_call>',
        "",
        [("note", {"text": "x"})],
    ),
    "hermes without an end": (
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {}}',
        "",
        [("now", {})],
    ),
    "hermes no call": (
        "hermes",
        "5 < 6, <tool> and <tool_call>nothing</tool_call> here",
        "5 < 6, <tool> and<tool_call>nothing</tool_call> here",
        [],
    ),
    "hermes ends on a mark": ("hermes", "Hi <tool_call>", "Hi<tool_call>", []),
    "gemma ends on a mark": ("gemma", "Hi\n```tool_code", "Hi```tool_code", []),
    "mistral ends on a mark": ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    "hermes broken": (
        "hermes",
        '<tool_call>{"name": 7, "arguments": {}}</tool_call> so',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call> so',
        [],
    ),
    "hermes only begun": ("hermes", 'x <tool_call>{"na', 'x<tool_call>{"na', []),
    "llama": (
        "llama",
        '{"name": "weather", "parameters": {"city": "Oslo", "days": 1}}',
        "",
        [("weather", {"city": "Oslo", "days": 1})],
    ),
    "llama several": (
        "llama",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
        '{"name": "note", "parameters": {"text": "a;b"}}',
        "",
        [("now", {}), ("note", {"text": "a;b"})],
    ),
    "llama of an unknown function": (
        "llama",
        '{"name": "Bob", "parameters": {"age": 3}} is JSON',
        '{"name": "Bob", "parameters": {"age": 3}} is JSON',
        [],
    ),
    "llama JSON that is no call": ("llama", '{"a": [1, 2]}', '{"a": [1, 2]}', []),
    "llama text": ("llama", "It is {sunny}.", "It is {sunny}.", []),
    "llama cut JSON": ("llama", '{"answer": "we', '{"answer": "we', []),
    "gemma": (
        "gemma",
        "Sure.\n```tool_code\nweather(city='Paris', days=2)\n```",
        "Sure.",
        [("weather", {"city": "Paris", "days": 2})],
    ),
    "gemma several": (
        "gemma",
        '```tool_code\nprint(weather("Rome", days=-1))\nnote(text=true)\n```\n',
        "",
        [("weather", {"city": "Rome", "days": -1}), ("note", {"text": True})],
    ),
    "gemma code that is no call": (
        "gemma",
        "```tool_code\nimport os\nos.remove('x')\n```\nand so on",
        "```tool_code\nimport os\nos.remove('x')\n```\nand so on",
        [],
    ),
    "gemma without an end": ("gemma", "```tool_code\nnow()", "", [("now", {})]),
    "mistral": (
        "mistral",
        'Let me look. [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Pa[]ris"}, '
        '"id": "a}1234567"}, {"arguments": {}, "name": "now"},\n{"name": "note", "arguments": '
        '"{\\"text\\": 1}"}] Done',
        "Let me look.Done",
        [("weather", {"city": "Pa[]ris"}), ("now", {}), ("note", {"text": 1})],
    ),
    "mistral without an end": (
        "mistral",
        '[TOOL_CALLS][{"name": "now", "arguments": {}}',
        "",
        [("now", {})],
    ),
    "mistral no call": (
        "mistral",
        'a [TOOL_CALLS] [1, {"x": 2}] b [TOOL_CALLS] [{"x": 2}] [5]',
        'a[TOOL_CALLS] [1, {"x": 2}] b[TOOL_CALLS] [{"x": 2}] [5]',
        [],
    ),
    "mistral what follows a call is none": (
        "mistral",
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, 7]',
        "7]",
        [("now", {})],
    ),
    "mistral only begun": ("mistral", 'x [TOOL_CALLS] [{"na', 'x[TOOL_CALLS] [{"na', []),
    "mistral in its later form": (
        "mistral-args",
        '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 1}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}',
        "",
        [("weather", {"city": "Oslo", "days": 1}), ("now", {})],
    ),
    "mistral in the form between": (
        "mistral",
        'Well.[TOOL_CALLS]note{"text": "{"}\n[TOOL_CALLS]now {} Done',
        "Well.Done",
        [("note", {"text": "{"}), ("now", {})],
    ),
    "mistral words behind the mark": (
        "mistral-args",
        "x [TOOL_CALLS] is a mark {so} it is.",
        "x[TOOL_CALLS] is a mark {so} it is.",
        [],
    ),
    **{
        f"{style} {key} that JSON has not": (style, reply, reply, [])
        for style, reply in (
            ("hermes", r'<tool_call>{"name": "no\q", "arguments": {}}</tool_call>'),
            ("hermes", r'<tool_call>{"name": "now", "arguments": "{\q}"}</tool_call>'),
            ("llama", r'{"name": "\ud83d", "parameters": {}}'),
            ("mistral", r'[TOOL_CALLS] [{"name": "no\u12", "arguments": {}}]'),
        )
        for key in (reply[reply.index("\\") :][:3],)
    },
    "hermes half of a surrogate pair": (
        "hermes",
        r'<tool_call>{"arguments": {"text": "\ud83d"}, "name": "note"}</tool_call>',
        "",
        [("note", {"text": "\ud83d"})],
    ),
    "gemma half of a surrogate pair": (
        "gemma",
        '```tool_code\nnote(text="\\ud83d")\n```',
        "",
        [("note", {"text": "\ud83d"})],
    ),
    "gemma other code": (
        "gemma",
        "```python\nnow()\n```",
        "```python\nnow()\n```",
        [],
    ),
}


def gathered(events: list[ToolEvent]) -> tuple[str, list[ToolCall]]:
    """Text and calls; the order of a call's events is checked on the way."""
    text, calls = "", list[ToolCall]()
    for event in events:
        if isinstance(event, Text):
            assert event.text
            text += event.text
        elif isinstance(event, CallBegun):
            assert event.index == len(calls)
            calls.append(ToolCall(event.name, ""))
        else:
            assert isinstance(event, ArgumentText) and event.index == len(calls) - 1
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + event.text)
    return text, calls


@pytest.mark.parametrize("name", CASES)
def test_replies_in_any_pieces(name: str) -> None:
    """h9: whole, character by character, cut at every place and in random pieces."""
    style, reply, text, calls = CASES[name]
    cuts = [[reply], list(reply)]
    cuts += [[reply[:at], reply[at:]] for at in range(1, len(reply))]
    rng = random.Random(1)
    for _ in range(30):
        places = sorted(rng.sample(range(len(reply)), min(4, len(reply))))
        cuts.append([reply[a:b] for a, b in zip([0, *places], [*places, None], strict=True)])
    for pieces in cuts:
        parser = ToolCallParser(style, TOOLS)
        events = [event for piece in pieces for event in parser.push(piece)]
        found_text, found = gathered([*events, *parser.finish()])
        assert found_text.strip() == text.strip()
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls
        assert parser.calls == parser.complete == len(calls)
        for call in found:
            assert (call.name + call.arguments).encode()
    whole_text, whole = parse_tool_calls(reply, style, TOOLS)
    assert whole_text.strip() == text.strip() and len(whole) == len(calls)


def test_arguments_come_as_they_are_written() -> None:
    """The name is known before the arguments are whole; each character follows at once."""
    parser = ToolCallParser("hermes", TOOLS)
    assert parser.push('<tool_call>\n{"name": "note", "arg') == []
    events = parser.push('uments": {"te')
    assert events == [CallBegun(0, "note"), ArgumentText(0, '{"te')]
    assert parser.push('xt": "a') == [ArgumentText(0, 'xt": "a')]
    assert parser.complete == 0
    assert parser.push('"}}</tool') == [ArgumentText(0, '"}')]
    assert parser.complete == 1
    assert parser.push("_call>") == [] and parser.finish() == []


def test_text_is_held_back_no_longer_than_it_must_be() -> None:
    parser = ToolCallParser("hermes", TOOLS)
    assert parser.push("a < b") == [Text("a < b")]
    assert parser.push(" <tool_") == []
    assert parser.push("x") == [Text(" <tool_x")]
    llama = ToolCallParser("llama", TOOLS)
    assert llama.push("  ") == []
    assert llama.push("Yes") == [Text("  Yes")]
    assert llama.push(' {"name": "now"') == [Text(' {"name": "now"')]


def test_cut_arguments_have_come() -> None:
    """At max_tokens the arguments end where the reply does."""
    text, calls = parse_tool_calls('<tool_call>{"name": "note", "arguments": {"te', "hermes", TOOLS)
    assert text == "" and calls == [ToolCall("note", '{"te')]


@pytest.mark.parametrize(
    ("code", "expected"),
    (
        ("now()", [("now", {})]),
        ("x = now()", [("now", {})]),
        ("[now(), weather(city='a')]", [("now", {}), ("weather", {"city": "a"})]),
        ("tools.weather('a', 2)", [("weather", {"city": "a", "days": 2})]),
        ("note(**{'te xt': null})", [("note", {"te xt": None})]),
        (
            "note(text={'a': [true, false, 1.5, -2]})",
            [("note", {"text": {"a": [True, False, 1.5, -2]}})],
        ),
        ("note(text='''two\nlines''')", [("note", {"text": "two\nlines"})]),
        ("weather(1, 2, 3)", None),
        ("weather(city=open('x'))", None),
        ("weather(city=__import__('os'))", None),
        ("note(text={1, 2})", None),
        ("other()", None),
        ("now", None),
        ("", None),
        ("now(", None),
        ("while True: now()", None),
        ("now() + now()", None),
    ),
)
def test_python_is_read_and_never_run(code: str, expected: list[tuple[str, Any]] | None) -> None:
    parameters = {t["function"]["name"]: t["function"]["parameters"]["properties"] for t in TOOLS}
    found = python_calls(code, parameters)
    assert (found and [(name, json.loads(text)) for name, text in found]) == expected
