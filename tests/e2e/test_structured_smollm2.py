"""Answers of a given form from SmolLM2: its own words, in the schema's form."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import hornito
from hornito.api import LLM
from structured.schemas import random_schema
from tiny import Compiled

pytestmark = [pytest.mark.gpu, pytest.mark.model]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(smollm2: Compiled) -> Iterator[LLM]:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")
    with hornito.load(smollm2("keep"), context=512) as loaded:
        yield loaded


def answer(llm: LLM, schema: dict[str, object], seed: int) -> str:
    out = llm.chat(
        [{"role": "user", "content": "Describe somebody as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"schema": schema}},
        temperature=1.0,
        seed=seed,
        max_tokens=200,
    )
    assert out.finish_reason == "stop", out.text
    return out.text


def test_a_person(llm: LLM) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    text = answer(llm, PERSON, 3)
    jsonschema.validate(json.loads(text), PERSON)
    assert text.startswith('{"name": "')


@pytest.mark.slow
def test_fifty_schemas_at_temperature_one(llm: LLM) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for seed in range(50):
        schema = random_schema(seed)
        jsonschema.validate(json.loads(answer(llm, schema, seed)), schema)
