"""What forms a caller may ask for, and what is said of the others."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hornito.errors import UsageError
from hornito.request import Request
from hornito.structured.formats import ResponseFormat, choose_format, json_schema

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_openai_forms() -> None:
    """Objects of OpenAI's API, and the two that are Hornito's own."""
    assert ResponseFormat.of(None) is None
    assert ResponseFormat.of({"type": "text"}) is None
    free = ResponseFormat.of({"type": "json_object"})
    assert free == json_schema({"type": "object"})
    form = ResponseFormat.of(
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    )
    assert form is not None and form.kind == "json_schema" and json.loads(form.text) == SCHEMA
    assert ResponseFormat.of({"type": "regex", "regex": "a+"}) == ResponseFormat("regex", "a+")
    lark = {"type": "grammar", "grammar": 'start: "a"'}
    assert ResponseFormat.of(lark) == ResponseFormat("grammar", 'start: "a"')
    assert form == ResponseFormat.of(form)


@pytest.mark.parametrize(
    ("value", "said"),
    (
        ("json", "an object with a 'type'"),
        ({}, "response_format.type must be one of text, json_object"),
        ({"type": "xml"}, "not 'xml'"),
        ({"type": ["text"]}, "must be one of"),
        ({"type": "json_object", "schema": {}}, "no field 'schema'"),
        ({"type": "json_schema"}, "json_schema must be"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "json_schema.schema must be"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "x": 1}}, "no field 'x'"),
        ({"type": "json_schema", "json_schema": {"schema": [1]}}, "must be a JSON schema"),
        ({"type": "regex"}, "response_format.regex must be text"),
        ({"type": "grammar", "grammar": ""}, "not empty"),
    ),
)
def test_what_is_no_form_is_named(value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ResponseFormat.of(value)


def test_true_is_a_schema() -> None:
    assert json_schema(True) == json_schema({})


def test_a_schema_must_be_json() -> None:
    loop: dict[str, Any] = {"type": "object"}
    loop["properties"] = {"self": loop}
    for schema in (loop, {"const": {1, 2}}):
        with pytest.raises(UsageError, match="no JSON"):
            json_schema(schema)


def test_one_form_at_a_time() -> None:
    assert choose_format(None, "a|b", None) == ResponseFormat("regex", "a|b")
    assert choose_format({"type": "text"}, None, 'start: "x"').kind == "grammar"  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="one form"):
        choose_format({"type": "json_object"}, "a", None)
    with pytest.raises(UsageError, match="regex must be text"):
        choose_format(None, 7, None)  # type: ignore[arg-type]


def test_a_request_takes_a_form() -> None:
    request = Request.of({"regex": "a"}, {}, vocabulary=9, has_tokenizer=True)
    assert request.form == ResponseFormat("regex", "a")
    with pytest.raises(UsageError, match="need a tokenizer"):
        Request.of({"regex": "a"}, {}, vocabulary=9, has_tokenizer=False)
    with pytest.raises(UsageError, match="no ignore_eos"):
        Request.of({"regex": "a", "ignore_eos": True}, {}, vocabulary=9, has_tokenizer=True)
    assert math.isclose(request.params.temperature, 0.0)
