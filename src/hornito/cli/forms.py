"""The options that give an answer a form: `--json-schema`, `--regex` and `--grammar`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any, TypedDict

from hornito.cli.files import read_text_file
from hornito.errors import UsageError

if TYPE_CHECKING:
    from hornito.structured.formats import ResponseFormat

    class FormKeywords(TypedDict, total=False):
        """At most one key."""

        response_format: ResponseFormat


FORMS = ("json_schema", "regex", "grammar")


def add_form(parser: argparse.ArgumentParser) -> None:
    """Adds `--json-schema`, `--regex` and `--grammar`."""
    parser.add_argument(
        "--json-schema", metavar="FILE", help="answer in JSON of the schema in FILE"
    )
    parser.add_argument(
        "--regex", metavar="TEXT", help="answer with a text that the regular expression matches"
    )
    parser.add_argument(
        "--grammar", metavar="FILE", help="answer in the grammar in FILE, as Lark or GBNF"
    )


def form_keywords(arguments: argparse.Namespace) -> FormKeywords:
    """What `add_form` read, as a keyword of `LLM.stream`, when it was given.

    Raises:
        UsageError: more than one was given, or a file is not what it should be.
    """
    from hornito.structured.formats import ResponseFormat, json_schema

    given = [name for name in FORMS if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise UsageError("an answer has one form: give one of --json-schema, --regex and --grammar")
    if arguments.json_schema is not None:
        return {"response_format": json_schema(_schema(arguments.json_schema))}
    if arguments.regex is not None:
        return {"response_format": ResponseFormat("regex", arguments.regex)}
    if arguments.grammar is not None:
        text = read_text_file("--grammar", arguments.grammar)
        return {"response_format": ResponseFormat("grammar", text)}
    return {}


def _schema(path: str) -> dict[str, Any] | bool:
    text = read_text_file("--json-schema", path)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--json-schema {path}: no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise UsageError(f"--json-schema {path}: a JSON schema is an object, not {schema!r:.80}")
    return schema
