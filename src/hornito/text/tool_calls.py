"""Calls of functions in a model's reply, found while the reply is being written.

Five ways of writing them are known (`hornito.text.tool_styles` says which one a model has):

* `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen, SmolLM3);
* `llama`: the reply is `{"name": ..., "parameters": {...}}`, several with `;` between (Llama 3);
* `gemma`: a block of Python that begins with ```` ```tool_code ````, of one call a line (Gemma);
* `mistral`: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, where the brackets' words are
  control tokens (Mistral 7B v0.3, Nemo, Small 2409);
* `mistral-args`: `[TOOL_CALLS]name[ARGS]{...}`, one such for each call (later ones). What either
  writes is read in both.

What looks like a call but is none stays text: nothing of a reply is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hornito.text.python_calls import encodable, json_text, python_calls
from hornito.text.stream import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FENCE, FENCE_END = "```tool_code", "```"
PYTHON_TAG = "<|python_tag|>"
CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALL_MARKS = (CALLS, CALL_ID, ARGS)
"""Control tokens that stay in the text of a reply: its calls are found by them."""

MISTRAL = ("mistral", "mistral-args")

_OPENING = {"hermes": OPEN, "gemma": FENCE, **dict.fromkeys(MISTRAL, CALLS)}
"""What a call begins with, in the styles that have such a mark."""

_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*({_STRING})\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=[{"])',
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Text:
    """Part of the reply that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call begins; calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentText:
    """More of a call's arguments, which joined are a JSON object."""

    index: int
    text: str


ToolEvent = Text | CallBegun | ArgumentText


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is JSON text."""

    name: str
    arguments: str


_NAMED = re.compile(r"\s*([\w.-]{1,64})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_MOST_NAMED = 128
"""Characters that a name and what may follow it have at most."""


class JsonEnd:
    """Follows the characters of one JSON value to its end.

    Args:
        inside: the objects and lists that are open already.
    """

    def __init__(self, inside: int = 0) -> None:
        self._depth = inside
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """How many characters of `text` belong to the value; None when all do and more follow."""
        for at, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                    if not self._depth:
                        return at + 1
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


class ToolCallParser:
    """Splits a reply into text and calls, piece by piece.

    `push` and `finish` return what is certain by then. Space around calls is dropped; of arguments
    that are cut short, what has come has been returned.

    Attributes:
        calls: how many calls have begun.
        complete: how many have ended.
    """

    def __init__(self, style: str, tools: Sequence[Mapping[str, Any]]) -> None:
        """Begin a reply.

        Args:
            style: one of `hornito.text.tool_styles.STYLES`.
            tools: the functions, as OpenAI's API has them.
        """
        self._style = style
        self._parameters = {
            tool["function"]["name"]: list(_properties(tool["function"])) for tool in tools
        }
        self.calls = 0
        self.complete = 0
        self._held = ""
        self._calls_before = 0  # the last mark
        self._state = "start" if style == "llama" else "text"
        self._arguments: JsonEnd | None = None
        self._listed = False  # whether the last call stands in a list
        self._object: JsonEnd | None = None  # the rest of the object that it stands in

    def push(self, text: str) -> list[ToolEvent]:
        """Take more of the reply."""
        self._held += text
        return self._events(last=False)

    def finish(self) -> list[ToolEvent]:
        """The reply has ended: give out what was held back."""
        events = self._events(last=True)
        if self._state == "call" and (self._held.strip() or self.calls == self._calls_before):
            # It began as a call does and never became one.
            opening = "" if self._listed else _OPENING.get(self._style, "")
            events.append(Text(opening + self._held))
        self._held = ""
        return [event for event in events if not isinstance(event, Text) or event.text]

    def _events(self, last: bool) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        steps = {
            "start": self._start,
            "text": self._text,
            "call": self._call,
            "arguments": self._more_arguments,
            "behind": self._behind,
        }
        while (found := steps[self._state](last)) is not None:
            events += found
        return events

    # Each step takes what it can from what is held. It returns None when it needs more to go on.

    def _start(self, last: bool) -> list[ToolEvent] | None:
        """Whether a reply in Llama's style, or what follows a call, begins as a call does."""
        rest = self._held.lstrip()
        if PYTHON_TAG.startswith(rest) and not last:
            return None
        if rest.startswith(PYTHON_TAG):
            self._held = rest[len(PYTHON_TAG) :]
            return []
        if rest.startswith("{"):
            self._held, self._state = rest, "call"
            return []
        if not rest:
            return None
        self._state = "text"
        return []

    def _text(self, last: bool) -> list[ToolEvent] | None:
        """Text up to where a call begins."""
        mark = _OPENING.get(self._style)
        text = self._held
        if not text:
            return None
        if mark is not None and mark in text:
            before, _, self._held = text.partition(mark)
            self._state, self._calls_before = "call", self.calls
            return [Text(before.rstrip())] if before.strip() else []
        keep = held_back(text, [mark]) if mark is not None and not last else 0
        if mark is not None and not last:
            body = text[: len(text) - keep]
            keep += len(body) - len(body.rstrip())  # space before a call is no text
        if keep == len(text):
            return None
        self._held = text[len(text) - keep :]
        return [Text(text[: len(text) - keep])]

    def _call(self, last: bool) -> list[ToolEvent] | None:
        """The beginning of a call."""
        if self._style == "gemma":
            return self._python_block(last)
        if self._style in MISTRAL:
            return self._mistral_call()
        head = _HEAD.match(self._held)
        name = _string_of(head[1]) if head else None
        if head and name is not None and self._known(name):
            if self._held[head.end()] == "{":
                return self._begin(name, self._held[head.end() :])
            end = JsonEnd().feed(self._held[head.end() :])
            if end is None:
                return None
            text = _string_of(self._held[head.end() : head.end() + end])
            if text is not None:
                return self._whole(name, text, self._held[head.end() + end :])
        return self._whole_call(last)

    def _begin(self, name: str, rest: str) -> list[ToolEvent]:
        """A call whose arguments are the object that `rest` begins with."""
        self._held = rest
        self._arguments, self._state = JsonEnd(), "arguments"
        self.calls += 1
        return [CallBegun(self.calls - 1, name)]

    def _whole(self, name: str, arguments: str, rest: str) -> list[ToolEvent]:
        """A call that has come as a whole, and what follows it."""
        self._held = rest
        self.calls += 1
        self._end_call()
        return [CallBegun(self.calls - 1, name), ArgumentText(self.calls - 1, arguments)]

    def _known(self, name: str) -> bool:
        """Whether it can be a call: without a mark around it, only that of a known function."""
        return self._style != "llama" or name in self._parameters

    def _more_arguments(self, last: bool) -> list[ToolEvent] | None:
        assert self._arguments is not None
        if not self._held:
            return None
        end = self._arguments.feed(self._held)
        piece, self._held = self._held[:end], "" if end is None else self._held[end:]
        if end is not None:
            self._end_call()
        return [ArgumentText(self.calls - 1, piece)]

    def _end_call(self) -> None:
        self.complete += 1
        self._state = "behind"

    def _whole_call(self, last: bool) -> list[ToolEvent] | None:
        """A call whose parts come in another order; or no call after all."""
        start = len(self._held) - len(self._held.lstrip())
        end = None
        if self._held[start : start + 1] == "{":
            end = JsonEnd().feed(self._held[start:])
            if end is None and CLOSE not in self._held:
                return None
        elif self._style == "hermes" and not last and CLOSE not in self._held:
            return None
        found = _call_of(self._held[start : start + end]) if end is not None else None
        if found is not None and end is not None and self._known(found.name):
            return self._whole(found.name, found.arguments, self._held[start + end :])
        if self._style == "llama":
            self._state = "text"
            return []
        if CLOSE not in self._held:
            return None
        inside, _, self._held = self._held.partition(CLOSE)
        self._state = "text"
        return [Text(OPEN + inside + CLOSE)]

    def _mistral_call(self) -> list[ToolEvent] | None:
        """Behind the mark: a name and its arguments, or a list of calls. Or the list's next."""
        rest = self._held.lstrip()
        if not self._listed:
            if named := _NAMED.match(rest):
                return self._begin(named[1], rest[named.end() :])
            if rest and not rest.startswith("["):
                undecided = "{" not in rest and len(rest) <= _MOST_NAMED
                return None if undecided else self._no_call()
            rest = rest[1:].lstrip()
        if not rest.startswith("{"):
            return self._no_call() if rest else None
        head = _HEAD.match(rest)
        name = _string_of(head[1]) if head else None
        if head and name is not None and rest[head.end()] == "{":
            self._listed, self._object = True, JsonEnd(inside=1)
            return self._begin(name, rest[head.end() :])
        end = JsonEnd().feed(rest)
        if end is None:
            return None
        found = _call_of(rest[:end])
        if found is None:
            return self._no_call()
        self._listed, self._object = True, None
        return self._whole(found.name, found.arguments, rest[end:])

    def _no_call(self) -> list[ToolEvent]:
        """What a mark of Mistral's stands before is none, and text like the mark."""
        found: list[ToolEvent] = [] if self._listed else [Text(CALLS)]
        self._listed, self._state = False, "text"
        return found

    def _behind_mistral(self) -> list[ToolEvent] | None:
        """Behind a call of Mistral's: the rest of its object, and of its list."""
        if self._object is not None:
            end = self._object.feed(self._held)
            self._held = "" if end is None else self._held[end:]
            if end is None:
                return None
            self._object = None
        self._held = rest = self._held.lstrip()
        if not rest:
            return None
        if self._listed and rest[0] in ",]":
            self._held = rest[1:]
            if rest[0] == ",":
                self._state = "call"
            else:
                self._listed = False
        else:
            self._listed, self._state = False, "text"
        return []

    def _behind(self, last: bool) -> list[ToolEvent] | None:
        """Between calls: what closes the last one is dropped."""
        if self._style in MISTRAL:
            return self._behind_mistral()
        rest = self._held.lstrip()
        if rest.startswith("}"):
            rest = rest[1:].lstrip()
        mark = ";" if self._style == "llama" else CLOSE
        if rest.startswith(mark):
            rest = rest[len(mark) :].lstrip()
        elif not last and mark.startswith(rest):
            return None
        if not rest:
            self._held = self._held if not last else ""
            return None
        self._held = rest
        self._state = "start" if self._style == "llama" else "text"
        return []

    def _python_block(self, last: bool) -> list[ToolEvent] | None:
        """Gemma's block, once it is whole."""
        inside, mark, rest = self._held.partition(FENCE_END)
        if not mark and not last:
            return None
        found = python_calls(inside, self._parameters)
        calls = None if found is None else [ToolCall(*call) for call in found]
        if calls is None:
            if not mark:
                return None  # finish() makes text of it
            self._held, self._state = rest, "text"
            return [Text(FENCE + inside + FENCE_END)]
        self._held, self._state = rest.lstrip(), "text"
        events: list[ToolEvent] = []
        for call in calls:
            events += [CallBegun(self.calls, call.name), ArgumentText(self.calls, call.arguments)]
            self.calls += 1
            self.complete += 1
        return events


def parse_tool_calls(
    text: str, style: str, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a whole reply; see `ToolCallParser`."""
    parser = ToolCallParser(style, tools)
    words: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in [*parser.push(text), *parser.finish()]:
        if isinstance(event, Text):
            words.append(event.text)
        elif isinstance(event, CallBegun):
            names.append(event.name)
            arguments.append([])
        else:
            arguments[event.index].append(event.text)
    calls = [ToolCall(n, "".join(parts)) for n, parts in zip(names, arguments, strict=True)]
    return "".join(words), calls


def _string_of(text: str) -> str | None:
    """What a JSON string says; None when its escapes are none, or make no text."""
    try:
        found = str(json.loads(text, strict=False))
    except ValueError:
        return None
    return found if encodable(found) else None


def _call_of(text: str) -> ToolCall | None:
    """The call that a JSON object stands for; None when it is none."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str) or not encodable(name):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str) and encodable(arguments):
        return ToolCall(name, arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, json_text(arguments))


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}
