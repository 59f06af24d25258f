"""Which storage type each weight of a graph gets.

A choice (`--weights`) is a storage type for all matrices or one of:

* `int4`: 4 bits in groups of 32, and 8 bits in groups of 64 for tables that tokens are looked up in
  or scored by, which lose most by rounding.
* `keep`: each matrix as its source holds it. Blocks that no kernel reads become fp16.

A matrix whose rows are no multiple of a block long gets the next larger type that fits: fp16 at the
end. Learned positions stay fp32 or fp16, and vectors fp32.
"""

from __future__ import annotations

from dataclasses import replace

from hornito.errors import UsageError
from hornito.graph.graph import Graph, Weight
from hornito.graph.weights import stored_as
from hornito.quant.formats import WeightFormat, format_of_blocks, weight_format

KEEP = "keep"
CHOICES = ("fp32", "fp16", "bf16", "int8", "int4", KEEP)
"""What `--weights` takes."""

TABLE_FORMAT = "int8g64"
_LARGER = {"int8g64": "int8", "int8": "fp16", "int4": "fp16"}


def check_choice(weights: str) -> None:
    """Refuse what is no choice.

    Raises:
        UsageError: names the choices.
    """
    if weights not in CHOICES:
        raise UsageError(f"weights must be one of {', '.join(CHOICES)}, not {weights!r}")


def assign_formats(graph: Graph, weights: str) -> list[str]:
    """Give every matrix of a graph before passes its storage type, and return what the user should
    know of it."""
    check_choice(weights)
    positions = {n.inputs[2] for n in graph if n.op == "position_embedding"}
    tables = {n.inputs[1] for n in graph if n.op in ("embedding", "head")}
    widened: dict[tuple[str, str], list[str]] = {}
    for name, weight in graph.weights.items():
        if not weight.matrix:
            continue
        wanted = _wanted(weights, name in tables, weight)
        if name in positions:
            chosen = _positions(wanted)
        else:
            chosen = _fitting(wanted, weight)
            if chosen != wanted.name or (weights == KEEP and _lost(weight, chosen)):
                kind = stored_as(weight.data) if weights == KEEP and weight.data else wanted.name
                widened.setdefault((kind, chosen), []).append(name)
        graph.weights[name] = replace(weight, dtype=chosen)
    return [
        f"stored as {chosen} instead of {kind}, {len(names)} in all: "
        + ", ".join(names[:4])
        + (", ..." if len(names) > 4 else "")
        for (kind, chosen), names in widened.items()
    ]


def _wanted(weights: str, table: bool, weight: Weight) -> WeightFormat:
    if weights == KEEP:
        stored = stored_as(weight.data) if weight.data is not None else ""
        return format_of_blocks(stored) or weight_format("fp16")
    if weights == "int4" and table:
        return weight_format(TABLE_FORMAT)
    return weight_format(weights)


def _lost(weight: Weight, chosen: str) -> bool:
    """Whether `keep` does not keep a matrix as it is."""
    stored = stored_as(weight.data) if weight.data is not None else ""
    return stored not in ("", weight_format(chosen).ggml)


def _positions(wanted: WeightFormat) -> str:
    return "fp32" if wanted.name in ("fp32", "bf16") else "fp16"


def _fitting(wanted: WeightFormat, weight: Weight) -> str:
    name = wanted.name
    while not weight_format(name).fits(weight.shape):
        name = _LARGER.get(name, "fp16")
    return name


def format_counts(graph: Graph) -> dict[str, dict[str, float]]:
    """Of each storage type of the graph's matrices: how many, their bytes, and bits a weight."""
    found: dict[str, dict[str, float]] = {}
    for weight in graph.weights.values():
        if weight.matrix:
            stored = weight_format(weight.dtype)
            entry = found.setdefault(
                weight.dtype, {"matrices": 0, "bytes": 0, "bits": round(stored.bits, 4)}
            )
            entry["matrices"] += 1
            entry["bytes"] += stored.nbytes(weight.shape)
    return found
