"""What form an answer can be asked to have: `response_format`, a regular expression, a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hornito.errors import UsageError

KINDS = ("text", "json_object", "json_schema", "regex", "grammar")


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The form of an answer.

    Attributes:
        kind: `json_schema`, `regex` or `grammar`.
        text: the schema as JSON, the expression, or the grammar (Lark or GBNF).
    """

    kind: str
    text: str

    @classmethod
    def of(cls, value: object) -> ResponseFormat | None:
        """The form that a `response_format` describes; None for free text.

        Args:
            value: None, a form, or OpenAI's object: `{"type": "text"}`, `{"type": "json_object"}`,
                `{"type": "json_schema", "json_schema": {"schema": {...}}}`; and beyond OpenAI
                `{"type": "regex", "regex": "..."}` and `{"type": "grammar", "grammar": "..."}`.

        Raises:
            UsageError: it is none of these; says what is missing or unknown.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise UsageError(f"response_format must be an object with a 'type', not {value!r:.80}")
        kind = value.get("type")
        if kind not in KINDS:
            raise UsageError(
                f"response_format.type must be one of {', '.join(KINDS)}, not {kind!r:.80}"
            )
        _only(value, {"type"} | ({kind} if kind not in ("text", "json_object") else set()))
        if kind == "text":
            return None
        if kind == "json_object":
            return json_schema({"type": "object"})
        if kind == "json_schema":
            return json_schema(_schema_of(value.get("json_schema")))
        return cls(kind, _text(f"response_format.{kind}", value.get(kind)))


def json_schema(schema: Mapping[str, Any] | bool) -> ResponseFormat:
    """JSON of a schema, spelled as Python's `json.dumps` does: `, ` and `: `, no other space.

    Raises:
        UsageError: the schema is no JSON.
    """
    try:
        # llguidance has no schema `true`, which means the same.
        return ResponseFormat("json_schema", json.dumps({} if schema is True else schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is no JSON: {error}") from error


def choose_format(
    response_format: object, regex: str | None, grammar: str | None
) -> ResponseFormat | None:
    """The form that the three arguments of `generate` ask for, of which one may be given.

    Raises:
        UsageError: more than one is given, or one is wrong.
    """
    found = [
        form
        for form in (
            ResponseFormat.of(response_format),
            None if regex is None else ResponseFormat("regex", _text("regex", regex)),
            None if grammar is None else ResponseFormat("grammar", _text("grammar", grammar)),
        )
        if form is not None
    ]
    if len(found) > 1:
        raise UsageError("an answer has one form: give one of response_format, regex and grammar")
    return found[0] if found else None


def _schema_of(value: object) -> Mapping[str, Any] | bool:
    if not isinstance(value, Mapping):
        raise UsageError(
            "response_format.json_schema must be {'name': ..., 'schema': {...}}, not "
            f"{value!r:.80}"
        )
    _only(value, {"name", "description", "schema", "strict"}, "response_format.json_schema")
    schema = value.get("schema")
    if not isinstance(schema, Mapping | bool):
        raise UsageError(
            f"response_format.json_schema.schema must be a JSON schema, not {schema!r:.80}"
        )
    return schema


def _only(value: Mapping[str, Any], known: set[str], where: str = "response_format") -> None:
    unknown = sorted(map(str, set(value) - known))
    if unknown:
        raise UsageError(f"{where} has no field '{unknown[0]}': {', '.join(sorted(known))}")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be text that is not empty, not {value!r:.80}")
    return value
