"""Grammars of replies that call functions: where calls must come, or must be right."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hornito.structured.formats import ResponseFormat
from hornito.structured.grammar import inline_schema
from hornito.text.tool_calls import ARGS, CALLS, CLOSE, FENCE, FENCE_END, OPEN


def calls_form(
    style: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool = True,
    answer: ResponseFormat | None = None,
) -> ResponseFormat:
    """The form of a reply that is one or more calls of these functions.

    Args:
        style: as of `hornito.text.tool_calls`.
        tools: the functions that may be called, as OpenAI's API has them.
        parallel: more than one call may come.
        answer: a JSON schema that the reply may have instead.
    """
    rules = [f"call_{place}: {_call(style, tool['function'])}" for place, tool in enumerate(tools)]
    one = " | ".join(f"call_{place}" for place in range(len(tools)))
    first, between, last = {
        "hermes": (_text(f"{OPEN}\n"), _text(f"\n{CLOSE}\n{OPEN}\n"), _text(f"\n{CLOSE}")),
        "llama": ("", _text("; "), ""),
        "gemma": (_text(f"{FENCE}\n"), _text("\n"), _text(f"\n{FENCE_END}")),
        "mistral": (_text(f"{CALLS} ["), _text(", "), _text("]")),
        "mistral-args": (_text(CALLS), _text(CALLS), ""),
    }[style]
    more = f"({between} one)*" if parallel else ""
    start = "start: calls"
    if answer is not None:
        start += f" | {inline_schema(json.loads(answer.text))}"
    lines = [start, f"calls: {first} one {more} {last}", f"one: {one}", *rules]
    return ResponseFormat("grammar", "\n".join(lines) + "\n")


def strict_form(
    style: str, tools: Sequence[Mapping[str, Any]], *, parallel: bool = True
) -> ResponseFormat:
    """The form of a reply that may call functions, and calls the `strict` ones rightly.

    Text is free until a call begins; from there on the reply is a call of one of the functions. Of
    those that are not strict any JSON object is taken as the arguments.

    Args:
        style, tools, parallel: as for `calls_form`.
    """
    rules = [
        f"call_{place}: {_call(style, tool['function'] if _strict(tool) else _loose(tool))}"
        for place, tool in enumerate(tools)
    ]
    one = " | ".join(f"call_{place}" for place in range(len(tools)))
    again = "*" if parallel else "?"
    line, fence = _text("\n"), _text(FENCE_END)
    several = f"({_text(',')} SPACE one)*" if parallel else ""
    head = {
        "hermes": [
            f"start: part{again} TEXT",
            f"part: trigger SPACE one SPACE {_text(CLOSE)}",
            f"trigger[lazy]: TEXT {_text(OPEN)}",
        ],
        "llama": [
            "start: one " + (f"({_text('; ')} one)*" if parallel else "") + " | OTHER |",
            r"OTHER: /[^{](.|\n)*/",
        ],
        "gemma": [
            f"start: part{again} TEXT",
            f"part: trigger {line} one {f'({line} one)*' if parallel else ''} {line} {fence}",
            f"trigger[lazy]: TEXT {_text(FENCE)}",
        ],
        "mistral": [
            f"start: part{again} TEXT",
            f"part: trigger SPACE {_text('[')} one {several} {_text(']')}",
            f"trigger[lazy]: TEXT {_text(CALLS)}",
        ],
        "mistral-args": [
            f"start: part{again} TEXT",
            "part: trigger one",
            f"trigger[lazy]: TEXT {_text(CALLS)}",
        ],
    }[style]
    shared = [r"TEXT: /(.|\n)*/", r"SPACE: /[ \n]{0,2}/", f"one: {one}"]
    return ResponseFormat("grammar", "\n".join([*head, *shared, *rules]) + "\n")


def _strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _loose(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function with any arguments."""
    function = tool["function"]
    return {
        "name": function["name"],
        "parameters": {"type": "object", "additionalProperties": True},
    }


def _call(style: str, function: Mapping[str, Any]) -> str:
    schema = dict(function.get("parameters") or {})
    schema.setdefault("type", "object")
    schema.setdefault("properties", {})
    # Arguments that the function does not declare are of no use to it.
    schema.setdefault("additionalProperties", False)
    if style == "gemma":
        return f"{_text(function['name'] + '(')} {_python_arguments(schema)} {_text(')')}"
    if style == "mistral-args":
        return f"{_text(function['name'] + ARGS)} {inline_schema(schema)}"
    key = "parameters" if style == "llama" else "arguments"
    head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
    return f"{_text(head)} {inline_schema(schema)} {_text('}')}"


def _python_arguments(schema: Mapping[str, Any]) -> str:
    """Keyword arguments in order, those that are not required as far as they come.

    JSON stands for the values: Python reads its texts, numbers, lists and objects, and
    `hornito.text.tool_calls` its constants.
    """
    properties = schema["properties"]
    plain = all(name.isidentifier() for name in properties)
    if not plain or schema.get("additionalProperties"):
        return f"{_text('**')} {inline_schema(dict(schema))}"
    required = [name for name in properties if name in schema.get("required", ())]
    optional = [name for name in properties if name not in required]
    words = {name: f"{_text(name + '=')} {_inner(properties[name], schema)}" for name in properties}
    comma = _text(", ")
    if required:
        always = f" {comma} ".join(words[name] for name in required)
        return " ".join([always, *(f"({comma} {words[name]})?" for name in optional)])
    starts = [
        " ".join([words[name], *(f"({comma} {words[other]})?" for other in optional[at + 1 :])])
        for at, name in enumerate(optional)
    ]
    return f"({' | '.join(starts)})?" if starts else ""


def _inner(schema: Any, outer: Mapping[str, Any]) -> str:
    """A parameter's schema, with the definitions that it may point to."""
    shared = {key: outer[key] for key in ("$defs", "definitions") if key in outer}
    return inline_schema({**shared, **schema} if isinstance(schema, dict) else schema)


def _text(text: str) -> str:
    """A literal of a Lark grammar; none when it is empty."""
    return json.dumps(text, ensure_ascii=False) if text else ""
