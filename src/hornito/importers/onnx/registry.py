"""Where matchers register: handlers of ONNX ops, and matchers of elementwise operations.

A handler gets the inputs as values and returns the result or results. An elementwise matcher gets
the op and its operands and returns None when it is not concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hornito.importers.onnx.values import Value

if TYPE_CHECKING:
    from hornito.importers.onnx.lift import Lift
    from hornito.importers.onnx.reader import OpNode

Inputs = Sequence[Value | None]
Result = Value | Sequence[Value | None]
Handler = Callable[["Lift", "OpNode", Inputs], Result]
Binary = Callable[["Lift", str, Value, Value], Value | None]
Unary = Callable[["Lift", str, Value], Value | None]

HANDLERS: dict[str, Handler] = {}
BINARY: dict[str, list[Binary]] = {}
UNARY: dict[str, list[Unary]] = {}

#: Ops that give each element a number of its own place.
ELEMENTWISE: set[str] = set()

#: Modules that register; the order of elementwise matchers is theirs.
MODULES = (
    "numbers",
    "shapes",
    "masks",
    "rope",
    "norms",
    "activations",
    "attention",
    "linear",
    "quantised",
    "standard",
    "contrib",
)


def handles(*keys: str) -> Callable[[Handler], Handler]:
    """Declares the handler of some ops (`Add`, `com.microsoft:MatMulNBits`)."""

    def declare(handler: Handler) -> Handler:
        for key in keys:
            if key in HANDLERS:
                raise ValueError(f"{key} has two handlers")
            HANDLERS[key] = handler
        return handler

    return declare


def binary(*ops: str) -> Callable[[Binary], Binary]:
    """Declares a matcher of elementwise ops of two operands."""

    def declare(matcher: Binary) -> Binary:
        for op in ops:
            BINARY.setdefault(op, []).append(matcher)
        return matcher

    return declare


def unary(*ops: str) -> Callable[[Unary], Unary]:
    """Declares a matcher of elementwise ops of one operand."""

    def declare(matcher: Unary) -> Unary:
        for op in ops:
            UNARY.setdefault(op, []).append(matcher)
        return matcher

    return declare
