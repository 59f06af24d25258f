"""Op modules by name, imported when first used."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

from hornito.errors import UnsupportedError

if TYPE_CHECKING:
    from hornito.graph.graph import Graph, Node, Value
    from hornito.graph.reference import ReferenceState
    from hornito.ops.base import Array, Lowering

_NOT_OPS = {
    *(
        "attributes",
        "base",
        "digits",
        "gemv",
        "registry",
        "kernels",
        "matrices",
        "sampling",
        "variants",
    ),
}


class OpModule(Protocol):
    """The functions that a module of this folder provides; see `hornito.ops.base`."""

    def infer(self, graph: Graph, node: Node) -> list[Value]: ...

    def reference(
        self, node: Node, inputs: Sequence[Array | None], state: ReferenceState
    ) -> list[Array | None]: ...

    def lower(self, node: Node, low: Lowering) -> None: ...


@cache
def names() -> tuple[str, ...]:
    """Every op that exists, sorted."""
    import hornito.ops

    found = (module.name for module in pkgutil.iter_modules(hornito.ops.__path__))
    return tuple(sorted(name for name in found if name not in _NOT_OPS))


@cache
def op(name: str) -> OpModule:
    """The op module `name`.

    Raises:
        UnsupportedError: there is no such op.
    """
    if name not in names():
        raise UnsupportedError(f"no op named {name!r}; there are: {', '.join(names())}")
    return cast(OpModule, importlib.import_module(f"hornito.ops.{name}"))
