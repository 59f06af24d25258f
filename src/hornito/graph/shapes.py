"""Dimensions: numbers, or affine expressions over named symbols.

A decoder graph has two symbols: `T`, the token rows of one call, and `S`, the rows whose output is
wanted. Context capacity is no dimension; it belongs to the KV cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hornito.errors import FormatError


@dataclass(frozen=True, slots=True)
class Affine:
    """`const + sum(coefficient * symbol)`, with at least one symbol."""

    terms: tuple[tuple[str, int], ...]
    const: int = 0

    def __add__(self, other: Dim) -> Dim:
        merged = dict(self.terms)
        const = self.const
        if isinstance(other, int):
            const += other
        else:
            const += other.const
            for name, coefficient in other.terms:
                merged[name] = merged.get(name, 0) + coefficient
        return _make(merged, const)

    __radd__ = __add__

    def __mul__(self, factor: int) -> Dim:
        return _make({name: c * factor for name, c in self.terms}, self.const * factor)

    __rmul__ = __mul__

    def __str__(self) -> str:
        parts = [name if c == 1 else f"{c}*{name}" for name, c in self.terms]
        if self.const:
            parts.append(str(self.const))
        return "+".join(parts)


Dim = int | Affine
Shape = tuple[Dim, ...]


def _make(terms: Mapping[str, int], const: int) -> Dim:
    kept = tuple(sorted((name, c) for name, c in terms.items() if c))
    return Affine(kept, const) if kept else const


def symbol(name: str) -> Affine:
    """The dimension that is just the symbol `name`."""
    return Affine(((name, 1),))


T = symbol("T")
S = symbol("S")

_TERM = re.compile(r"(?:(?P<c>-?\d+)\*)?(?P<name>[A-Za-z_]\w*)|(?P<const>-?\d+)")


def bind(dim: Dim, values: Mapping[str, int]) -> int:
    """The number that `dim` is once every symbol has a value.

    Raises:
        FormatError: a symbol has no value.
    """
    if isinstance(dim, int):
        return dim
    total = dim.const
    for name, coefficient in dim.terms:
        if name not in values:
            raise FormatError(f"dimension {dim}: the symbol {name} has no value")
        total += coefficient * values[name]
    return total


def bind_shape(shape: Shape, values: Mapping[str, int]) -> tuple[int, ...]:
    """`bind` for every dimension of a shape."""
    return tuple(bind(dim, values) for dim in shape)


def dim_to_json(dim: Dim) -> int | str:
    """A dimension as a JSON number or string such as `"2*T+1"`."""
    return dim if isinstance(dim, int) else str(dim)


def dim_from_json(data: object) -> Dim:
    """The inverse of `dim_to_json`.

    Raises:
        FormatError: the text is no affine expression.
    """
    if isinstance(data, int) and not isinstance(data, bool):
        return data
    if not isinstance(data, str):
        raise FormatError(f"a dimension must be a number or a string, not {data!r}")
    total: Dim = 0
    for part in data.split("+"):
        match = _TERM.fullmatch(part)
        if match is None:
            raise FormatError(f"not an affine dimension: {data!r}")
        if match["const"] is not None:
            total = total + int(match["const"])
        else:
            total = total + symbol(match["name"]) * int(match["c"] or 1)
    return total
