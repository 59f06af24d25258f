"""Models of Hornito's cache in the `llm` command-line tool (https://llm.datasette.io).

    llm install hornito        # or: pip install hornito llm
    llm -m hornito/NAME "Say hello"

Every model of `hornito list` is there as `hornito/NAME`, and a package of chosen weights beside
others of its source as `hornito/NAME-WEIGHTS`; `llm -o device ... -o temperature ...` and the like
set the options below. A model without a chat template completes a prompt as plain text. Only `llm`
loads this module, and a model is loaded when it is first asked something.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import llm

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.runtime.session import Session
    from hornito.tool_use import ToolUse


@llm.hookimpl  # type: ignore[untyped-decorator, unused-ignore]
def register_models(register: Any) -> None:
    """Tell `llm` of the models in the cache."""
    from hornito.cache import list_models

    for entry in list_models():
        # The last name of a package is its file's, which nobody types.
        aliases = [f"hornito/{name}" for name in entry.other_names[:-1]]
        register(HornitoModel(entry.name), aliases=aliases)


class Options(llm.Options):  # type: ignore[misc, unused-ignore]
    """What `-o NAME VALUE` sets; the same as for `hornito run`."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    device: str | None = None
    context: int | None = None


_LOADING = ("device", "context")


class HornitoModel(llm.Model):  # type: ignore[misc, unused-ignore]
    """One model of the cache. A conversation's earlier turns stay in its KV cache."""

    can_stream = True
    supports_schema = True
    supports_tools = True
    Options = Options

    def __init__(self, name: str) -> None:
        self.model_id = f"hornito/{name}"
        self._name = name
        self._loaded: tuple[dict[str, Any], LLM, Session] | None = None

    def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any | None
    ) -> Iterator[str]:
        """Answer a prompt; called by `llm`."""
        from hornito.errors import HornitoError
        from hornito.tool_use import ToolUse

        try:
            use = ToolUse.of([_tool(tool) for tool in prompt.tools])
            yield from self._answer(prompt, response, conversation, use)
        except HornitoError as error:
            raise llm.ModelError(str(error)) from error

    def _answer(
        self, prompt: Any, response: Any, conversation: Any | None, use: ToolUse
    ) -> Iterator[str]:
        from hornito.runtime.prefix import start_from_prefix
        from hornito.structured.formats import json_schema

        given = {name: value for name, value in prompt.options if value is not None}
        model, session = self._load({name: given.pop(name, None) for name in _LOADING})
        earlier = conversation.responses if conversation is not None else []
        template = model.chat_template if model.has_chat_template else None
        if template is None:
            ids = model.tokenizer.encode(_plain(self.model_id, earlier, prompt))
        else:
            ids = use.chat_ids(model.tokenizer, template, _messages(earlier, prompt))
        reused = start_from_prefix(session, ids)
        form = None if not prompt.schema else json_schema(prompt.schema)
        chunks = model.stream_session(
            session,
            ids[reused:],
            continuation=template is None,
            response_format=form if template is None else use.form(template, form),
            **{"max_tokens": 1024, **given},
        )
        parser, made = None if template is None else use.parser(template), 0
        calls: list[list[str]] = []
        for chunk in chunks:
            made += len(chunk.token_ids)
            if parser is None:
                yield chunk.text
                continue
            events = parser.push(chunk.text)
            if chunk.finish_reason is not None:
                events += parser.finish()
            yield from _sorted_out(events, calls)
        for name, arguments in calls:
            response.add_tool_call(llm.ToolCall(name=name, arguments=json.loads(arguments)))
        response.set_usage(input=len(ids), output=made, details={"cached_tokens": reused})

    def _load(self, wanted: dict[str, Any]) -> tuple[LLM, Session]:
        """The model, loaded when it is first asked, and again for another device or context."""
        import hornito
        from hornito.progress import TerminalProgress

        if self._loaded is not None and self._loaded[0] != wanted:
            self.close()
        if self._loaded is None:
            with TerminalProgress() as progress:
                model = hornito.load(self._name, progress=progress, **wanted)
            self._loaded = (wanted, model, model.session())
        return self._loaded[1:]

    def close(self) -> None:
        """Free the device; a second call does nothing."""
        if self._loaded is not None:
            _, model, session = self._loaded
            session.close()
            model.close()
            self._loaded = None


def _tool(tool: Any) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _plain(name: str, earlier: list[Any], prompt: Any) -> str:
    """What a model without a chat template completes; UsageError where a prompt needs one."""
    from hornito.errors import UsageError

    for given, what in (
        (prompt.system, "a system prompt"),
        (earlier, "a conversation"),
        (prompt.tools or prompt.tool_results, "tools"),
    ):
        if given:
            raise UsageError(
                f"{name} has no chat template: it completes plain text, and can't take {what}"
            )
    return str(prompt.prompt)


def _messages(earlier: list[Any], prompt: Any) -> list[dict[str, Any]]:
    """The conversation as OpenAI's API has it."""
    messages: list[dict[str, Any]] = []
    system = None
    for before in earlier:
        system = before.prompt.system or system
        messages += _asked(before.prompt)
        calls = [
            {
                "id": call.tool_call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in before.tool_calls_or_raise()
        ]
        message = {"role": "assistant", "content": before.text_or_raise()}
        messages.append({**message, "tool_calls": calls} if calls else message)
    system = prompt.system or system
    head = [{"role": "system", "content": system}] if system else []
    return [*head, *messages, *_asked(prompt)]


def _asked(prompt: Any) -> list[dict[str, Any]]:
    """What one prompt adds: results of functions, and text."""
    results = [
        {"role": "tool", "name": r.name, "tool_call_id": r.tool_call_id, "content": r.output}
        for r in prompt.tool_results
    ]
    text = [{"role": "user", "content": prompt.prompt}] if prompt.prompt else []
    return [*results, *text]


def _sorted_out(events: list[Any], calls: list[list[str]]) -> Iterator[str]:
    """The text among events; calls go into their list."""
    from hornito.text.tool_calls import CallBegun, Text

    for event in events:
        if isinstance(event, Text):
            yield event.text
        elif isinstance(event, CallBegun):
            calls.append([event.name, ""])
        else:
            calls[event.index][1] += event.text
