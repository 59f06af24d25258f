"""Functions that a model may call: from a request's `tools` to prompt, form and parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hornito.errors import UsageError
from hornito.structured.formats import ResponseFormat
from hornito.text.template import ChatTemplate, checked_messages, encode_chat
from hornito.text.tokenizer import Tokenizer
from hornito.text.tool_calls import ToolCallParser
from hornito.text.tool_styles import (
    check_choice,
    check_tools,
    conversation_for,
    knows_tools,
    tool_style,
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one answer may do with functions.

    Attributes:
        tools: the functions, as OpenAI's API has them; none when there are none, or when the choice
            is `none`.
        choice: `auto`, `none`, `required` or `function NAME`.
        parallel: whether a reply may hold more than one call.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "none"
    parallel: bool = True

    @classmethod
    def of(cls, tools: object, choice: object = None, parallel: object = None) -> ToolUse:
        """Check the fields `tools`, `tool_choice` and `parallel_tool_calls` of a request.

        Raises:
            UsageError: one of them is wrong, or there is a choice without tools.
        """
        found = check_tools(tools) if tools or tools not in (None, [], ()) else []
        if parallel is not None and not isinstance(parallel, bool):
            raise UsageError(f"parallel_tool_calls must be true or false, not {parallel!r:.80}")
        if not found and choice not in (None, "none", "auto"):
            raise UsageError("tool_choice needs tools")
        chosen = check_choice(choice, found) if found else "none"
        # A model that may call none is told of none.
        kept = () if chosen == "none" else tuple(found)
        return cls(kept, chosen, parallel is not False)

    def conversation(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """Messages, and tools, as `encode_chat` takes them, so that the model knows the functions.

        Args:
            messages: with calls (`tool_calls`) and results (role `tool`) as OpenAI's API has them.

        Raises:
            UsageError: the messages are none, or the calls of earlier turns are damaged.
        """
        given = conversation_for(template.source, checked_messages(messages), self.tools)
        return given, self.tools if self.tools and knows_tools(template.source) else None

    def chat_ids(
        self, tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Token ids of a conversation; see `conversation`."""
        given, shown = self.conversation(template, messages)
        return encode_chat(tokenizer, template, given, tools=shown)

    def form(
        self,
        template: ChatTemplate,
        response_format: Mapping[str, Any] | ResponseFormat | None = None,
    ) -> ResponseFormat | None:
        """The form of the reply, where calls must come or where an answer of a form may.

        Args:
            response_format: the form of a reply that is no call.

        Raises:
            UsageError: it is none, or one that can't stand beside calls.
        """
        from hornito.structured.tool_grammar import calls_form, strict_form

        answer = ResponseFormat.of(response_format)
        if not self.tools:
            return answer
        style, tools = tool_style(template.source), self.tools
        if self.choice == "auto" and answer is None:
            strict = any(tool["function"].get("strict") for tool in tools)
            return strict_form(style, tools, parallel=self.parallel) if strict else None
        if self.choice == "auto" and answer is not None:
            if answer.kind != "json_schema":
                raise UsageError(
                    f"a {answer.kind} as response_format leaves no room for calls: give "
                    "tool_choice none, or a json_schema"
                )
            return calls_form(style, tools, parallel=self.parallel, answer=answer)
        name = self.choice.removeprefix("function ")
        if self.choice != "required":
            tools = tuple(tool for tool in tools if tool["function"]["name"] == name)
        return calls_form(style, tools, parallel=self.parallel)

    def parser(self, template: ChatTemplate) -> ToolCallParser | None:
        """What finds the calls in a reply; None when there can be none."""
        if not self.tools:
            return None
        return ToolCallParser(tool_style(template.source), self.tools)
