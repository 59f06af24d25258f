"""Arguments of the wrong type or range: the error names the argument, the range and the value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hornito
from hornito.arguments import texts, token_ids, whole
from hornito.errors import UsageError
from hornito.request import Request
from hornito.runtime.overflow import REFUSE, Overflow


def request(**keywords: Any) -> Request:
    return Request.of(keywords, {}, vocabulary=512, has_tokenizer=True)  # type: ignore[arg-type]


WHOLE = "max_tokens must be a whole number of at least 1, not "


@pytest.mark.parametrize(
    ("keywords", "message"),
    (
        ({"max_tokens": None}, WHOLE + "None"),
        ({"max_tokens": "5"}, WHOLE + "'5'"),
        ({"max_tokens": 2.5}, WHOLE + "2.5"),
        ({"max_tokens": float("nan")}, WHOLE + "nan"),
        ({"max_tokens": float("inf")}, WHOLE + "inf"),
        ({"max_tokens": True}, WHOLE + "True"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"stop": "x"}, "stop must be a list of strings that are not empty, not 'x'"),
        ({"stop": 5}, "stop must be a list of strings that are not empty, not 5"),
        ({"stop": ["a", 5]}, r"stop must be a list of strings .*\['a', 5\]"),
        ({"stop": [""]}, r"stop must be a list of strings .*\[''\]"),
        ({"overflow": "cut"}, "overflow must be one of error, truncate, not 'cut'"),
        ({"overflow": 3}, "overflow must be an Overflow, or one of error, truncate, not 3"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty must be at least 1e-30 .*not 1e-320"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0 and at most 100, not 0"),
        (
            {"temperature": 1.0, "top_k": 1.5},
            "top_k must be a whole number from 0 to 2147483647, not 1.5",
        ),
    ),
)
def test_bad_keywords(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        request(**keywords)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "did you mean max_tokens?"),
        ("topk", "did you mean top_k?"),
        ("stops", "did you mean stop?"),
        ("json_schema", "give response_format={'type': 'json_schema', "),
        ("max_new_tokens", "give max_tokens."),
        ("tools", "give chat(messages, tools=...)."),
        ("qqq", ""),
    ],
)
def test_names_that_there_are_not(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        request(**{name: 3})
    message = str(caught.value)
    assert message.startswith(f"there is no argument {name!r}; {hint}")
    _, _, names = message.partition("The arguments of an answer are ")
    listed = names.split(", ")
    assert listed == sorted(listed) and {"max_tokens", "stop", "top_k", "regex"} <= {*listed}


def test_what_stands_for_the_default_or_a_policy() -> None:
    plain = request(stop=None, overflow=None)
    assert plain == request() and plain.stop == () and plain.overflow is REFUSE
    assert request(overflow="truncate").overflow == Overflow("truncate")
    assert request(overflow=Overflow("truncate", 3)).overflow.keep_first == 3
    number = request(max_tokens=np.int64(7)).max_tokens
    assert number == 7 and type(number) is int


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("truncate", 1.5), "keep_first must be a whole number of at least 0, not 1.5"),
        (("truncate", -1), "keep_first must be at least 0, not -1"),
        (("truncate", True), "keep_first must be a whole number of at least 0, not True"),
        (("truncate", 0, 0), "keep_last must be at least 1, not 0"),
        (("truncate", 0, "9"), "keep_last must be a whole number of at least 1, not '9'"),
        ((None,), "overflow must be one of error, truncate, not None"),
    ),
)
def test_bad_overflow(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Overflow(*arguments)


@pytest.mark.parametrize(
    ("keywords", "message"),
    (
        ({"context": 1.5}, "context must be a whole number of at least 1, not 1.5"),
        ({"context": "64"}, "context must be a whole number of at least 1, not '64'"),
        ({"context": 0}, "context must be at least 1, not 0"),
        ({"slots": True}, "slots must be a whole number of at least 1, not True"),
        ({"slots": 0}, "slots must be at least 1, not 0"),
        ({"kv_bytes": 0.5}, "kv_bytes must be a whole number of at least 1, not 0.5"),
        ({"rewind_budget": -1}, "rewind_budget must be at least 0, not -1"),
    ),
)
def test_bad_arguments_of_load(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hornito.load("no-such-model.vxm", **keywords)


def test_token_ids() -> None:
    assert token_ids("p", np.array([3, 4])) == [3, 4] and token_ids("p", range(2)) == [0, 1]
    for value in (None, 1.0, b"ab", {"a": 1}):
        with pytest.raises(UsageError, match="the prompt must be text or a list of token ids, not"):
            token_ids("the prompt", value)
    with pytest.raises(UsageError, match=r"whole numbers; at place 1 is 2\.0"):
        token_ids("the prompt", [1, 2.0])
    with pytest.raises(UsageError, match="at place 0 is True"):
        token_ids("the prompt", [True])


def test_texts_and_whole() -> None:
    assert texts("stop", ["a", "b"]) == ("a", "b") and texts("stop", None) == ()
    assert whole("n", 5, 0, 5) == 5
    with pytest.raises(UsageError, match="n must be from 0 to 5, not 6"):
        whole("n", 6, 0, 5)


def test_names_of_the_package_root() -> None:
    from hornito.runtime.session import Session
    from hornito.runtime.snapshot import Snapshot

    assert (hornito.Overflow, hornito.Session, hornito.Snapshot) == (Overflow, Session, Snapshot)
