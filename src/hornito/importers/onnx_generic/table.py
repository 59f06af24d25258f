"""Op handlers by ONNX name; the handler modules are imported when the table is first read."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

from hornito.errors import UnsupportedError
from hornito.importers.onnx.reader import OpNode
from hornito.importers.onnx_generic.builder import Handler, Ref

MODULES = (
    "elementwise",
    "movement",
    "reductions",
    "indexing",
    "linear",
    "einsum",
    "quantised",
    "attention",
)

_HANDLERS: dict[str, Handler] = {}

#: TensorProto's numbers of element types.
TYPE_NAMES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a function as the handler of ops."""

    def register(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return register


@cache
def handlers() -> dict[str, Handler]:
    """Every handler by the op's key."""
    for name in MODULES:
        importlib.import_module(f"hornito.importers.onnx_generic.{name}")
    return dict(sorted(_HANDLERS.items()))


def type_name(number: int) -> str:
    """The element type of TensorProto's number.

    Raises:
        UnsupportedError: the device has no words for it.
    """
    if number not in TYPE_NAMES:
        names = ", ".join(sorted(TYPE_NAMES.values()))
        raise UnsupportedError(f"element type {number} of ONNX is not supported; there are {names}")
    return TYPE_NAMES[number]


def need(x: Ref | None, what: str) -> Ref:
    """An input that must be there."""
    if x is None:
        raise UnsupportedError(f"{what} is absent")
    return x


def inputs(x: list[Ref | None], count: int) -> list[Ref]:
    """The first `count` inputs, all of which must be there."""
    return [need(x[i] if i < len(x) else None, f"input {i}") for i in range(count)]


def optional(x: list[Ref | None], index: int) -> Ref | None:
    """An input that may be absent."""
    return x[index] if index < len(x) else None


def number(node: OpNode, name: str, default: float) -> float:
    """A number attribute."""
    return float(node.attrs.get(name, default))


def integer(node: OpNode, name: str, default: int) -> int:
    """An integer attribute."""
    return int(node.attrs.get(name, default))


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the start.

    Raises:
        UnsupportedError: there is no such axis.
    """
    if not -rank <= axis < max(rank, 1):
        raise UnsupportedError(f"axis {axis} of a value of rank {rank}")
    return axis % max(rank, 1)


def of_type(x: Ref, allowed: tuple[str, ...]) -> Ref:
    """`x`, whose element type must be one of these."""
    if x.dtype not in allowed:
        raise UnsupportedError(f"type {x.dtype} is not supported here; {', '.join(allowed)} are")
    return x
