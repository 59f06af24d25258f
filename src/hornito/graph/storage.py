"""Which storage type each weight of a graph gets.

A choice (`--weights`) is a storage type for all matrices, or `keep`: each matrix as its source
holds it, where blocks that no kernel reads become fp16. `int8`, `int4` and `int4m` come in groups
of 32, 64 or 128, and may keep some input columns in fp16 beside (outliers). Tables, which tokens
are looked up in or scored by, lose most by rounding: beside 4 bits they have 8 unless the user says
otherwise.

A matrix whose rows are no multiple of a block long gets smaller groups, then the next larger type
that fits: fp16 at the end. Learned positions stay fp32 or fp16, and vectors fp32.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from hornito.errors import UsageError
from hornito.graph.graph import Graph, Weight
from hornito.graph.weights import stored_as
from hornito.quant.formats import (
    FORMATS,
    OUTLIER_STEP,
    WeightFormat,
    format_of_blocks,
    weight_format,
)

KEEP = "keep"
ROUNDED = ("int8", "int4", "int4m")
CHOICES = ("fp32", "fp16", "bf16", *ROUNDED, KEEP)
"""What `--weights` takes."""

GROUPS = (32, 64, 128)
TABLE_FORMAT = "int8g64"
DEFAULT_GROUPS = {"int8": 32, "int4": 64, "int4m": 64}
DEFAULT_OUTLIERS = {"int8": 0.0, "int4": 0.01, "int4m": 0.01}
_LARGER = {"int8": "fp16", "int4": "int8", "int4m": "int8"}


@dataclass(frozen=True, slots=True)
class Storage:
    """How the matrices of a graph are stored.

    Attributes:
        weights: one of `CHOICES`.
        group: weights that share a scale; None for the choice's own.
        table: storage type of tables, such as `int4` or `int8g64`; None for the choice's own.
        outliers: part of the input columns that are kept in fp16 beside the rest; None for the
            choice's own.

    Raises:
        UsageError: a part is unknown, or does not go with the choice.
    """

    weights: str
    group: int | None = None
    table: str | None = None
    outliers: float | None = None

    def __post_init__(self) -> None:
        check_choice(self.weights)
        rounded = self.weights in ROUNDED
        if self.group is not None and (not rounded or self.group not in GROUPS):
            raise UsageError(
                f"group {self.group} with {self.weights} weights: groups are 32, 64 or 128, of "
                f"{', '.join(ROUNDED)}"
            )
        if self.outliers is not None and (not rounded or not 0 <= self.outliers <= 0.2):
            raise UsageError(
                f"{self.outliers:.1%} outliers with {self.weights} weights: from none to 20 % of "
                f"the columns of {', '.join(ROUNDED)}"
            )
        if self.table is not None and self.table not in _TABLES:
            raise UsageError(
                f"tables can't be stored as {self.table!r}; they can as {', '.join(_TABLES)}"
            )

    @property
    def body(self) -> WeightFormat:
        """What matrices other than tables are stored as, before outliers; fp16 for `keep`."""
        if self.weights not in ROUNDED:
            return weight_format("fp16" if self.weights == KEEP else self.weights)
        group = self.group or DEFAULT_GROUPS[self.weights]
        return weight_format(self.weights + (f"g{group}" if group != 32 else ""))

    @property
    def share(self) -> float:
        """The part of the columns that are outliers."""
        if self.outliers is not None:
            return self.outliers
        return DEFAULT_OUTLIERS.get(self.weights, 0.0)


_TABLES = ("fp32", "fp16", "bf16", *(f.name for f in FORMATS.values() if f.number in (2, 3, 4)))


def check_choice(weights: str) -> None:
    """Refuse what is no choice.

    Raises:
        UsageError: names the choices.
    """
    if weights not in CHOICES:
        raise UsageError(f"weights must be one of {', '.join(CHOICES)}, not {weights!r}")


def assign_formats(graph: Graph, storage: Storage) -> list[str]:
    """Give every matrix of a graph before passes its storage type, and return what the user should
    know of it."""
    positions = {n.inputs[2] for n in graph if n.op == "position_embedding"}
    tables = table_names(graph)
    widened: dict[tuple[str, str], list[str]] = {}
    for name, weight in graph.weights.items():
        if not weight.matrix:
            continue
        wanted = _wanted(storage, name in tables, weight)
        if name in positions:
            chosen = _positions(wanted)
        else:
            fitting = fitting_format(wanted, weight.shape)
            same_bits = fitting.number == wanted.number
            if same_bits and wanted.number == storage.body.number:
                fitting = with_share(fitting, storage.share, weight.shape)
            chosen = fitting.name
            if not same_bits or (storage.weights == KEEP and _lost(weight, chosen)):
                kind = stored_as(weight.data) if storage.weights == KEEP and weight.data else ""
                widened.setdefault((kind or wanted.name, chosen), []).append(name)
        graph.weights[name] = replace(weight, dtype=chosen)
    return [
        f"stored as {chosen} instead of {kind}, {len(names)} in all: "
        + ", ".join(names[:4])
        + (", ..." if len(names) > 4 else "")
        for (kind, chosen), names in widened.items()
    ]


def table_names(graph: Graph) -> set[str]:
    """The weights that tokens are looked up in or scored by."""
    return {n.inputs[1] for n in graph if n.op in ("embedding", "head")}


def _wanted(storage: Storage, table: bool, weight: Weight) -> WeightFormat:
    if storage.weights == KEEP:
        stored = stored_as(weight.data) if weight.data is not None else ""
        return format_of_blocks(stored) or weight_format("fp16")
    if table and storage.table is not None:
        return weight_format(storage.table)
    if table and storage.weights in ("int4", "int4m"):
        return weight_format(TABLE_FORMAT)
    return storage.body


def with_share(fmt: WeightFormat, share: float, shape: tuple[int, ...]) -> WeightFormat:
    """A format with outliers in eights: those nearest to a part of the columns, eight at least."""
    if share == 0 or fmt.number not in (2, 3, 4) or len(shape) != 2 or shape[1] < 2 * OUTLIER_STEP:
        return fmt
    eights = max(1, round(share * shape[1] / OUTLIER_STEP))
    return fmt.with_outliers(eights * OUTLIER_STEP)


def _lost(weight: Weight, chosen: str) -> bool:
    """Whether `keep` does not keep a matrix as it is."""
    stored = stored_as(weight.data) if weight.data is not None else ""
    return stored not in ("", weight_format(chosen).ggml)


def _positions(wanted: WeightFormat) -> str:
    return "fp32" if wanted.name in ("fp32", "bf16") else "fp16"


def fitting_format(wanted: WeightFormat, shape: tuple[int, ...]) -> WeightFormat:
    """The format itself, or in smaller groups, or the next larger type, as the shape allows."""
    found = wanted
    while not found.fits(shape):
        found = _smaller_groups(found) or larger_format(found)
    return found


def _smaller_groups(fmt: WeightFormat) -> WeightFormat | None:
    if fmt.group <= 32 or fmt.number not in (2, 3, 4):
        return None
    group = fmt.group // 2
    base = fmt.name.partition("g")[0]
    smaller = weight_format(base if group == 32 else f"{base}g{group}")
    return smaller.with_outliers(fmt.outliers)


def larger_format(fmt: WeightFormat) -> WeightFormat:
    """The next type of more bits, without outliers: 8 bits behind 4, and fp16 behind all others."""
    name = fmt.name.partition("o")[0].partition("g")[0]
    return weight_format(_LARGER.get(name, "fp16"))


def format_counts(graph: Graph) -> dict[str, dict[str, float]]:
    """Of each storage type of the graph's matrices: how many, their bytes, and bits a weight with
    all that belongs to it (scales, outliers)."""
    found: dict[str, dict[str, float]] = {}
    elements: Counter[str] = Counter()
    for weight in graph.weights.values():
        if weight.matrix:
            entry = found.setdefault(weight.dtype, {"matrices": 0, "bytes": 0})
            entry["matrices"] += 1
            entry["bytes"] += weight_format(weight.dtype).nbytes(weight.shape)
            elements[weight.dtype] += math.prod(weight.shape)
    for name, entry in found.items():
        entry["bits"] = round(8 * entry["bytes"] / elements[name], 4)
    return found
