"""Messages of a conversation are checked before a template sees them."""

from __future__ import annotations

from typing import Any

import pytest

from hornito.errors import UsageError
from hornito.text.template import ChatTemplate, checked_messages

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a non-empty list of {'role': ..., 'content': ...}, not []"),
        ("Hi", "messages must be a non-empty list of {'role': ..., 'content': ...}, not 'Hi'"),
        (USER, "messages must be a non-empty list"),
        (None, "messages must be a non-empty list"),
        ([USER, "Hi"], "messages[1] must be {'role': ..., 'content': ...}, not 'Hi'"),
        ([{"content": "Hi"}], "messages[0].role must be one of system, developer, user, "),
        ([{"role": "usr", "content": "Hi"}], "assistant, tool; it is 'usr'"),
        ([{"role": ["user"], "content": "Hi"}], "it is ['user']"),
        (
            [{"role": "user"}],
            "messages[0].content must be text, or a list of text parts; it is missing",
        ),
        ([{"role": "user", "content": None}], "it is missing"),
        ([{"role": "assistant", "tool_calls": []}], "it is missing"),
        ([USER, {"role": "user", "content": 5}], "messages[1].content must be text, or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "messages[0].content[0] must be {'type': 'text', 'text': ...}, not {'type': 'im",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0] must be"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0] must be"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}],
            "messages[0].content[0] must be",
        ),
    ],
)
def test_what_is_no_message(messages: Any, message: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for check in (checked_messages, template.render):
        with pytest.raises(UsageError) as caught:
            check(messages)
        assert message in str(caught.value)


def test_messages_as_templates_take_them() -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    given = [
        {"role": "developer", "content": "Be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "", "name": "f"},
        {"role": "assistant", "content": "Hi", "reasoning_content": "hm"},
    ]
    found = checked_messages(given)
    assert found == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "", "name": "f"},
        {"role": "assistant", "content": "Hi", "reasoning_content": "hm"},
    ]
    assert checked_messages(found) == found and given[0]["role"] == "developer"
