"""Calls of functions within chat answers, as OpenAI's API spells them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from hornito.text.tool_calls import ArgumentText, CallBegun, Text, ToolCallParser, ToolEvent


class Spoken:
    """What one answer has said so far: text, and calls where functions are known.

    Attributes:
        text: all of its text.
        calls: its calls, each as a message has them.
    """

    def __init__(self, parser: ToolCallParser | None, *, parallel: bool = True) -> None:
        """Begin an answer.

        Args:
            parser: finds calls; None takes everything as text.
            parallel: False leaves out what follows the first call.
        """
        self._parser = parser
        self._parallel = parallel
        self.text = ""
        self.calls: list[dict[str, Any]] = []

    def take(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """The deltas that more of the answer is; `last` says that this is its end."""
        if self._parser is None:
            self.text += text
            return [{"content": text}] if text else []
        events: list[ToolEvent] = []
        if self._parallel or not self._parser.complete:
            events = self._parser.push(text)
        if last:
            events += self._parser.finish()
        return self._deltas(events)

    def _deltas(self, events: Sequence[ToolEvent]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for event in events:
            if not self._parallel and self.calls and not _of_first(event):
                continue
            if isinstance(event, Text):
                self.text += event.text
                deltas.append({"content": event.text})
            elif isinstance(event, CallBegun):
                call = _call(f"call_{secrets.token_hex(12)}", event.name)
                self.calls.append(call)
                begun = {"index": event.index, **_call(call["id"], event.name)}
                deltas.append({"tool_calls": [begun]})
            else:
                self.calls[event.index]["function"]["arguments"] += event.text
                piece = {"index": event.index, "function": {"arguments": event.text}}
                deltas.append({"tool_calls": [piece]})
        return deltas

    def reason(self, finish_reason: str | None) -> str | None:
        """The finish reason, which calls change."""
        return "tool_calls" if self.calls and finish_reason == "stop" else finish_reason

    def message(self) -> dict[str, Any]:
        """The answer as a message."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.text if self.text or not self.calls else None,
            "refusal": None,
        }
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _call(call_id: str, name: str) -> dict[str, Any]:
    """A call without arguments yet."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def _of_first(event: ToolEvent) -> bool:
    return isinstance(event, ArgumentText) and event.index == 0
