"""Checks of arguments: the value as it is used, or a UsageError that names argument and range."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

from hornito.errors import UsageError


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """A whole number of the range, of any type that stands for one, but no bool.

    Raises:
        UsageError: it is of another type, or out of the range.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} must be a whole number {allowed}, not {value!r:.80}") from None
    if number < least or (most is not None and number > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} must be {allowed}, not {number}")
    return number


def token_ids(name: str, value: object) -> list[int]:
    """The token ids of an iterable; whether the model has them is not looked at.

    Raises:
        UsageError: it is no iterable of whole numbers.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be text or a list of token ids, not {value!r:.80}")
    ids = []
    for place, item in enumerate(value):
        try:
            if isinstance(item, bool):
                raise TypeError
            ids.append(operator.index(item))
        except TypeError:
            raise UsageError(
                f"{name} must be text or a list of token ids, which are whole numbers; at place "
                f"{place} is {item!r:.80}"
            ) from None
    return ids


def texts(name: str, value: object) -> tuple[str, ...]:
    """The texts of an iterable, none of them empty; None stands for no text.

    Raises:
        UsageError: it is no iterable of texts.
    """
    if value is None:
        return ()
    found = () if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    listed = not isinstance(value, str) and isinstance(value, Iterable)
    if not listed or not all(isinstance(text, str) and text for text in found):
        raise UsageError(f"{name} must be a list of strings that are not empty, not {value!r:.80}")
    return found
