"""Random small JSON schemas whose values are bounded, so that an answer ends."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "age", "tags", "ok", "size", "où", "a b", 'q"uote')


def random_schema(seed: int) -> dict[str, Any]:
    """An object of one to four properties, some of them optional, some nested."""
    rng = random.Random(seed)
    return _object(rng, depth=2)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4 if depth == 2 else 2))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": sorted(rng.sample(names, rng.randint(0, len(names)))),
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "pattern", "integer", "number", "boolean", "null", "enum", "either"]
    kind = rng.choice([*kinds, "object", "array"] if depth else kinds)
    if kind == "object":
        return _object(rng, depth)
    if kind == "array":
        low = rng.randint(0, 2)
        items = _value(rng, 0)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 8)}
    if kind == "pattern":
        return {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]{1,3}$"}
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}
    if kind == "enum":
        return {"enum": ["red", "green", 7, None, True]}
    if kind == "either":
        return {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]}
    return {"type": kind}
