"""Chat templates, rendered as Hugging Face renders them, safe against control tokens in messages.

A template's text holds control tokens (`<|im_end|>`) that must be recognised, and the messages'
text may spell the same tokens, which must stay plain text. Where no message spells one, the
rendered text is encoded as it is. Where one does, the template is rendered a second time with a
mark (a Unicode non-character) inside every such spelling. If the marks are all that differs
between the two results, they show which spellings came from messages, whatever the template
trimmed, moved or repeated. If anything else differs, the template looked into the spelling
itself, the two can't be told apart, and the chat is refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from hornito.errors import FormatError, UsageError
from hornito.text.marks import free_marks, special_pattern

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes
    from jinja2.parser import Parser
    from jinja2.runtime import Macro

Message = Mapping[str, Any]


class _TemplateRefusal(Exception):
    """What `raise_exception` in a template raises."""


def _raise_exception(message: object) -> None:
    raise _TemplateRefusal(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> jinja2.Environment:
    """The environment of transformers' `apply_chat_template`."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`: marks the assistant's part for training; here its content only."""

        tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_content")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _content(self, caller: Macro) -> str:
            return str(caller())

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _map_strings(value: Any, change: Any) -> Any:
    """A copy of a JSON-like value with `change` applied to every string that is not a key."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(inner, change) for inner in value]
    return value


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [s for key, inner in value.items() for s in (str(key), *_strings(inner))]
    if isinstance(value, list | tuple):
        return [s for inner in value for s in _strings(inner)]
    return []


ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of messages as templates take them: a role and a text each, other keys as they are.

    `developer` becomes `system`, as templates call it, and text parts one text. The content of a
    message that calls functions may be left out.

    Raises:
        UsageError: they are no messages; its text begins with the path of what is wrong, such as
            `messages[0].content`.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(
            "messages must be a non-empty list of {'role': ..., 'content': ...}, not "
            f"{messages!r:.80}"
        )
    return [_checked(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _checked(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} must be {{'role': ..., 'content': ...}}, not {message!r:.80}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        given = "missing" if role is None else f"{role!r:.80}"
        raise UsageError(f"{where}.role must be one of {', '.join(ROLES)}; it is {given}")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, list | tuple):
        content = "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        given = "missing" if content is None else f"{content!r:.80}"
        raise UsageError(f"{where}.content must be text, or a list of text parts; it is {given}")
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def _part(where: str, part: object) -> str:
    given = {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
    text = given.pop("text", None)
    if given != {"type": "text"} or not isinstance(text, str):
        raise UsageError(f"{where} must be {{'type': 'text', 'text': ...}}, not {part!r:.80}")
    return text


def text_messages(checked: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The role and the text of each message, which is all that a conversation keeps.

    Raises:
        UsageError: one calls functions or holds what a function gave.
    """
    for i, message in enumerate(checked):
        if message.get("tool_calls") or message["role"] == "tool":
            raise UsageError(
                f"messages[{i}] is of a call of functions; a conversation can go on with text only"
            )
    return [{"role": message["role"], "content": message["content"]} for message in checked]


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: its jinja2 text.
    """

    def __init__(self, source: str, token_strings: Mapping[str, str] | None = None) -> None:
        """Compile a template.

        Args:
            source: jinja2 text.
            token_strings: texts of `bos_token`, `eos_token`, ... that it may use.

        Raises:
            FormatError: it does not parse; says the line.
        """
        import jinja2

        self.source = source
        self._token_strings = dict(token_strings or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise FormatError(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, ValueError, OverflowError) as error:
            raise FormatError(f"chat template can't be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, as transformers' `apply_chat_template` gives it.

        Args:
            messages: `{"role": ..., "content": ...}` in order.
            add_generation_prompt: end with the start of the assistant's answer.
            tools: JSON schemas of functions, for templates that take them.
            variables: further names for the template (`enable_thinking`, ...).

        Raises:
            UsageError: the template refuses the conversation (its own message is given), or fails.
        """
        return self._render(checked_messages(messages), add_generation_prompt, tools, variables)

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        import jinja2

        names = {
            **self._token_strings,
            **(variables or {}),
            "messages": messages,
            "tools": list(tools) if tools is not None else None,
            "documents": (variables or {}).get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except _TemplateRefusal as refusal:
            raise UsageError(f"the model's chat template says: {refusal}") from refusal
        except jinja2.TemplateError as error:
            raise UsageError(f"the model's chat template failed: {error}") from error
        except Exception as error:
            # Templates run any expression, so any error can come out of one.
            raise UsageError(
                f"the model's chat template failed: {type(error).__name__}: {error}"
            ) from error

    def render_marked(
        self,
        messages: Sequence[Message],
        special_texts: Collection[str],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, str | None]:
        """The text of a conversation for `Tokenizer.encode_chat`.

        Args:
            messages, add_generation_prompt, tools, variables: as for `render`.
            special_texts: spellings of the tokenizer's control tokens.

        Returns:
            `(text, None)` when no message spells a control token, else `(text, mark)`, where
            `mark` stands after the first character of each spelling that came from a message.

        Raises:
            UsageError: as for `render`; or a message spells a control token and the template
                treats it so that it can't be told from the template's own.
        """
        given = checked_messages(messages)
        text = self._render(given, add_generation_prompt, tools, variables)
        pattern = special_pattern(special_texts)
        outside = _strings([given, list(tools or []), dict(variables or {})])
        if not any(pattern.search(s) for s in outside):
            return text, None
        mark = free_marks([*outside, text], 1)

        def marking(value: str) -> str:
            # A mark in one spelling may leave another that overlaps it: look again from there.
            at = 0
            while (match := pattern.search(value, at)) is not None:
                at = match.start() + 1
                value = value[:at] + mark + value[at:]
            return value

        marked = self._render(
            _map_strings(given, marking),
            add_generation_prompt,
            _map_strings(list(tools), marking) if tools is not None else None,
            _map_strings(dict(variables or {}), marking),
        )
        if marked.replace(mark, "") != text:
            found = next(m[0] for s in outside if (m := pattern.search(s)))
            raise UsageError(
                f"a message spells the control token {found!r}, and this model's chat template "
                "treats it in a way that does not let it be kept as plain text. Remove it from "
                "the message."
            )
        return marked, mark


def encode_chat(
    tokenizer: Any,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of a conversation: rendered, encoded, one BOS, nothing from messages taken as control.

    Args:
        tokenizer: a `hornito.text.tokenizer.Tokenizer`.
        template: the model's template.
        messages, add_generation_prompt, tools, variables: as for `ChatTemplate.render`.
    """
    marked, mark = template.render_marked(
        messages,
        tokenizer.special_tokens.keys(),
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        variables=variables,
    )
    return list(tokenizer.encode_chat(marked, mark))
