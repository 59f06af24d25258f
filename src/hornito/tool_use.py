"""Functions that a model may call: from a request's `tools` to prompt, form and parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hornito.errors import UsageError
from hornito.structured.formats import ResponseFormat
from hornito.text.tool_calls import ToolCallParser
from hornito.text.tool_styles import (
    check_choice,
    check_tools,
    conversation_for,
    knows_tools,
    tool_style,
)

if TYPE_CHECKING:
    from hornito.api import LLM


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
        found = [] if tools is None or tools == [] else check_tools(tools)
        if parallel is not None and not isinstance(parallel, bool):
            raise UsageError(f"parallel_tool_calls must be true or false, not {parallel!r:.80}")
        if not found and choice not in (None, "none", "auto"):
            raise UsageError("tool_choice needs tools")
        chosen = check_choice(choice, found) if found else "none"
        # A model that may call none is told of none.
        kept = () if chosen == "none" else tuple(found)
        return cls(kept, chosen, parallel is not False)

    def chat_ids(
        self,
        llm: LLM,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in which the model knows the functions.

        Args:
            messages: with calls (`tool_calls`) and results (role `tool`) as OpenAI's API has them.
            variables: further names for the template.

        Raises:
            UsageError: as for `LLM.chat_ids`, or the calls of earlier turns are damaged.
        """
        from hornito.text.template import checked_messages, encode_chat

        template = llm.chat_template
        given = checked_messages(messages)
        return encode_chat(
            llm.tokenizer,
            template,
            conversation_for(template.source, given, self.tools),
            tools=self.tools if self.tools and knows_tools(template.source) else None,
            variables=variables,
        )

    def form(self, llm: LLM, answer: ResponseFormat | None = None) -> ResponseFormat | None:
        """The form of the reply, where calls must come or where an answer of a form may.

        Args:
            answer: the form of a reply that is no call.

        Raises:
            UsageError: the answer has a form that can't stand beside calls.
        """
        from hornito.structured.tool_grammar import calls_form

        style = tool_style(llm.chat_template.source) if self.tools else ""
        if not self.tools or (self.choice == "auto" and answer is None):
            return answer
        tools = self.tools
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

    def parser(self, llm: LLM) -> ToolCallParser | None:
        """What finds the calls in a reply; None when there can be none."""
        if not self.tools:
            return None
        return ToolCallParser(tool_style(llm.chat_template.source), self.tools)
