"""Reading the fields of a request: of the right type, or an error that names them; none unread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hornito.serve.errors import ApiError

_NAMES = {
    bool: "a boolean",
    int: "an integer",
    str: "a string",
    list: "an array",
    dict: "an object",
}

MISSING = object()


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a request's body.

    Raises:
        ApiError: it is none; NaN and infinities are no JSON.
    """

    def refuse(word: str) -> float:
        raise ValueError(f"{word} is no JSON")

    try:
        body = json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


class Fields:
    """The fields of an object, each taken once; a null counts as left out."""

    def __init__(self, body: Mapping[str, Any], where: str = "") -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def path(self, name: str) -> str:
        """The name of a field as errors give it."""
        return f"{self._where}.{name}" if self._where else name

    def any(self, name: str, default: Any = None) -> Any:
        """A field of any type."""
        return self._left.pop(name, default)

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of one JSON type; MISSING as the default makes it a must."""
        value = self._left.pop(name, MISSING)
        if value is MISSING:
            if default is MISSING:
                raise ApiError(
                    400,
                    f"you must provide {self.path(name)}",
                    param=self.path(name),
                    code="missing_required_parameter",
                )
            return default
        # A boolean is an int for Python, but not for JSON.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.wrong(name, f"must be {_NAMES[kind]}, not {_shown(value)}")
        return value

    def whole(self, name: str, default: Any, least: int, most: int) -> Any:
        """An integer of a range."""
        value = self.take(name, int, default)
        if value is not default and not least <= value <= most:
            raise self.wrong(name, f"must be from {least} to {most}, not {value}")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A string, or an array of up to `most`, none of them empty."""
        value = self.any(name, [])
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(t, str) and t for t in found):
            raise self.wrong(name, "must be a string or an array of strings that are not empty")
        if len(found) > most:
            raise self.wrong(name, f"takes up to {most} strings, not {len(found)}")
        return tuple(found)

    def neutral(self, name: str, *values: Any) -> None:
        """A field that may only be given as what leaving it out means.

        Raises:
            ApiError: it asks for something.
        """
        value = self._left.pop(name, MISSING)
        if value is not MISSING and not any(value == v and type(value) is type(v) for v in values):
            raise self.wrong(name, "is not supported")

    def finish(self) -> None:
        """Refuse what nobody has taken."""
        for name in self._left:
            raise ApiError(
                400,
                f"unrecognized request argument: {self.path(name)}",
                param=self.path(name),
                code="unknown_parameter",
            )

    def wrong(self, name: str, what: str) -> ApiError:
        """An error about a field."""
        return ApiError(400, f"{self.path(name)} {what}", param=self.path(name))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
