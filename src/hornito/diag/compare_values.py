"""Values of two sides of a comparison: what they are, how far apart, and where that begins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hornito.ops.base import Array
from hornito.quant.formats import weight_format


@dataclass(frozen=True, slots=True)
class Trace:
    """What one run of one side computed.

    Attributes:
        run: the schedule, such as `chunk 16`; empty for a side that has only one.
        values: by name, in graph order, `[positions, width]`; of tensor models of any shape.
        kernels: by name of a node, the kernels that ran it.
    """

    run: str
    values: Mapping[str, Array]
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Up to where values count as equal: the worst row's relative error, and the cosine."""

    relative: float
    cosine: float

    def with_choice(self, relative: float | None, cosine: float | None) -> Tolerance:
        """These with what the user gave; a relative error alone brings the cosine that fits it."""
        if relative is None:
            return self if cosine is None else Tolerance(self.relative, cosine)
        return Tolerance(relative, max(0.0, 1 - relative) if cosine is None else cosine)


PRECISION_TOLERANCE = {
    "high": Tolerance(1e-3, 0.999),
    "normal": Tolerance(2e-2, 0.98),
    "low": Tolerance(5e-2, 0.95),
}
"""Where both sides have the same weights, by the precision."""
STORAGE_TOLERANCE = (
    (24, Tolerance(1e-3, 0.999)),
    (11, Tolerance(5e-2, 0.99)),
    (8, Tolerance(0.3, 0.97)),
    (0, Tolerance(3.0, 0.6)),
)
"""Where they store them in different types, by the least bits of a weight: rounding moves single
rows far, but leaves the direction of the whole."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One value of one run against the reference.

    Attributes:
        run: the schedule.
        value: name.
        op: what made it.
        kernels: and how.
        cosine: of the two as vectors.
        max_abs: largest difference of two numbers.
        relative: the largest `|got - want| / |want|` of a row (a position), as Euclidean norms.
        position: of that row.
        first: the first row beyond the tolerance; None when the value is equal.
    """

    run: str
    value: str
    op: str
    kernels: tuple[str, ...]
    cosine: float
    max_abs: float
    relative: float
    position: int
    first: int | None

    @property
    def equal(self) -> bool:
        """Whether it lies within the tolerance."""
        return self.first is None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return plain(self) | {"kernels": list(self.kernels), "equal": self.equal}


def plain(record: Any) -> dict[str, Any]:
    """The fields of a dataclass; numbers that JSON has not are None."""
    fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


def storage_tolerance(formats: Iterable[str]) -> Tolerance:
    """How far apart the same model may be when one side stores its weights in these types."""
    bits = min((weight_format(name).bits for name in formats), default=32)
    return next(tolerance for least, tolerance in STORAGE_TOLERANCE if bits >= least)


def measure(
    run: str,
    name: str,
    got: Array,
    want: Array,
    tolerance: Tolerance,
    *,
    op: str = "",
    kernels: tuple[str, ...] = (),
) -> Difference:
    """Compare two arrays of one shape; a row is what lies along the last axis.

    A row of the reference that is all but zero beside the largest one is measured against a
    millionth of that one. Numbers that are equal, infinities included, differ by nothing; a NaN on
    one side alone is an infinite difference.
    """
    a = _rows(got)
    b = _rows(want)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(a - b))
    apart = np.where(np.isnan(apart), np.inf, apart)
    finite = np.where(np.isfinite(b), b, 0.0)
    norms = np.linalg.norm(finite, axis=1)
    floor = max(norms.max(initial=0.0) * 1e-6, np.finfo(np.float32).tiny)
    relative = np.linalg.norm(apart, axis=1) / np.maximum(norms, floor)
    worst = int(relative.argmax()) if len(relative) else 0
    cosine = _cosine(a, b, same)
    beyond = np.flatnonzero(relative > tolerance.relative)
    first = int(beyond[0]) if len(beyond) else None
    if first is None and not cosine >= tolerance.cosine:
        first = worst
    return Difference(
        run,
        name,
        op,
        kernels,
        cosine,
        float(apart.max(initial=0.0)),
        float(relative.max(initial=0.0)),
        worst,
        first,
    )


def _rows(array: Array) -> Array:
    """The array as float64 `[rows, width]`, floats rounded to what fp32 holds; an array of one axis
    or none is one row."""
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    numbers = np.asarray(array, np.float64)
    if numbers.ndim < 2:
        return numbers.reshape(1, -1)
    return numbers.reshape(math.prod(numbers.shape[:-1]), numbers.shape[-1])


def _cosine(a: Array, b: Array, same: Array) -> float:
    """Of all numbers as one vector; 1 where both are the same, NaN where one is not finite."""
    if same.all():
        return 1.0
    alike = same & ~np.isfinite(b)
    a, b = np.where(alike, 0.0, a), np.where(alike, 0.0, b)
    with np.errstate(all="ignore"):
        lengths = np.linalg.norm(a) * np.linalg.norm(b)
        return float(np.sum(a * b) / lengths) if lengths else 0.0


def dump(folder: str | Path, names: Iterable[str], trace: Trace, reference: Trace) -> list[str]:
    """Write values of both sides as `NAME.RUN.npy` and `NAME.reference.npy`; returns the paths."""
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    written = []
    for name in names:
        for label, side in ((trace.run or "model", trace), ("reference", reference)):
            if name in side.values:
                stem = f"{name}.{label}".replace("/", "_").replace(" ", "-").replace(",", "")
                path = where / f"{stem.lstrip('.')}.npy"
                np.save(path, side.values[name])
                written.append(str(path))
    return written
