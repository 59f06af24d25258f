"""Raised operations while lifting goes on: Hornito's ops without names, equal ones made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hornito.graph.graph import Attr
from hornito.graph.weights import ArrayData, SlicedData, WeightData
from hornito.importers.onnx.tensors import ViewData

IDS, POSITIONS = "ids", "positions"


@dataclass(slots=True, eq=False)
class Raised:
    """One operation. `roots` are the ONNX nodes whose results it makes."""

    id: str
    op: str
    inputs: tuple[str, ...]
    attrs: dict[str, Attr]
    width: int
    index: int
    roots: set[int] = field(default_factory=set)


class Dag:
    """All raised operations, by id, in the order in which they were made."""

    def __init__(self) -> None:
        self.nodes: dict[str, Raised] = {}
        self.weights: dict[str, WeightData] = {}
        self._keys: dict[object, str] = {}

    def emit(
        self,
        op: str,
        inputs: Sequence[str],
        attrs: Mapping[str, Attr] | None = None,
        *,
        width: int,
        root: int,
    ) -> str:
        """The id of that operation, made now unless it exists."""
        attrs = dict(attrs or {})
        key = (op, tuple(inputs), tuple(sorted(attrs.items())))
        found = self._keys.get(key)
        if found is None:
            found = f"%{len(self.nodes)}"
            self._keys[key] = found
            index = len(self.nodes)
            self.nodes[found] = Raised(found, op, tuple(inputs), attrs, width, index)
        self.nodes[found].roots.add(root)
        return found

    def weight(self, data: WeightData) -> str:
        """The id of a weight; the same view of the same data has one id."""
        key = _identity(data)
        if key not in self._keys:
            name = f"@{len(self.weights)}"
            self._keys[key] = name
            self.weights[name] = data
        return self._keys[key]

    def linear(self, x: str, weight: str, bias: str, *, root: int) -> str:
        """`x @ weight.T + bias`."""
        width = self.weights[weight].shape[0]
        return self.emit("linear", (x, weight, bias, ""), width=width, root=root)

    def sliced(self, linear: Raised, start: int, stop: int, *, root: int) -> str:
        """A linear that makes only some columns of another's result."""
        x, weight, bias, _ = linear.inputs
        names = [
            self.weight(SlicedData(self.weights[name], start, stop)) if name else ""
            for name in (weight, bias)
        ]
        return self.linear(x, names[0], names[1], root=root)

    def frequencies(self, values: npt.NDArray[np.float32]) -> str:
        """The id of a RoPE table."""
        key = ("frequencies", values.shape, values.tobytes())
        if key not in self._keys:
            name = f"@{len(self.weights)}"
            self._keys[key] = name
            self.weights[name] = ArrayData(values)
        return self._keys[key]


def _identity(data: WeightData) -> object:
    if isinstance(data, ViewData):
        array = data.array
        pointer = array.__array_interface__["data"][0]
        if array.size:
            return ("view", pointer, array.shape, array.strides, str(array.dtype), data.bf16)
    if isinstance(data, SlicedData):
        return ("slice", _identity(data.base), data.start, data.stop)
    return ("object", id(data))
