"""What the model files share: weights by name, and the blocks that most decoders are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError, UnsupportedError
from hornito.graph.graph import INT, Graph, Weight
from hornito.graph.shapes import S, T
from hornito.graph.weights import ArrayData, FloatArray

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


class SourceTensor(Protocol):
    """What a builder needs of an importer's tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> FloatArray: ...


@dataclass(frozen=True, slots=True)
class _TensorData:
    name: str
    tensor: SourceTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def source_names(self) -> tuple[str, ...]:
        return (self.name,)

    def rows(self, start: int, stop: int) -> FloatArray:
        return self.tensor.rows(start, stop)


class Builder:
    """A graph under construction, over the tensors of a source.

    `dtype` is the storage type of matrices; vectors stay fp32.
    """

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, SourceTensor], dtype: str
    ) -> None:
        self.config = config
        self.graph = Graph()
        self._tensors = tensors
        self._dtype = dtype
        self.ids = self.graph.add_input("ids", INT, (T,))
        self.positions = self.graph.add_input("positions", INT, (T,))
        self.selection = self.graph.add_input("selection", INT, (S,))

    def weight(self, name: str) -> str:
        """The source tensor `name` as a weight, declared once.

        Raises:
            FormatError: the source lacks it.
        """
        if name not in self.graph.weights:
            if name not in self._tensors:
                raise FormatError(f"the source lacks the tensor {name}")
            tensor = self._tensors[name]
            matrix = len(tensor.shape) == 2
            dtype = self._dtype if matrix else "fp32"
            data = _TensorData(name, tensor)
            self.graph.add_weight(name, Weight(tuple(tensor.shape), dtype, data, matrix))
        return name

    def constant(self, name: str, array: npt.NDArray[np.float32]) -> str:
        """A computed table as a weight, declared once."""
        if name not in self.graph.weights:
            self.graph.add_weight(name, Weight(array.shape, "fp32", ArrayData(array)))
        return name

    def embedding(self, table: str) -> str:
        """Rows of the table for the call's ids."""
        weight = self.weight(table)
        return self.graph.add("embedding", "embedding", [self.ids, weight], covers=[table])

    def linear(self, name: str, x: str, module: str, *, bias: bool = False) -> str:
        """`x @ module.weight.T (+ module.bias)`."""
        weight = self.weight(f"{module}.weight")
        parts = [f"{module}.weight"]
        bias_name = ""
        if bias:
            bias_name = self.weight(f"{module}.bias")
            parts.append(bias_name)
        return self.graph.add("linear", name, [x, weight, bias_name, ""], covers=parts)

    def rms_norm(self, name: str, x: str, weight: str, eps: float) -> str:
        """RMS norm with the named weight."""
        inputs = [x, self.weight(weight), ""]
        return self.graph.add("rms_norm", name, inputs, {"eps": eps}, [weight])

    def add(self, name: str, a: str, b: str) -> str:
        """Elementwise sum."""
        return self.graph.add("add", name, [a, b])

    def rope(self, name: str, x: str, heads: int, head_dim: int, inv_freq: str) -> str:
        """Positions turned into x."""
        attrs = {"heads": heads, "head_dim": head_dim, "scale": 1.0}
        return self.graph.add("rope", name, [x, self.positions, inv_freq], attrs)

    def gated_mlp(self, name: str, x: str, module: str, activation: str, *, bias: bool) -> str:
        """`down(activation(gate(x)) * up(x))`."""
        gate = self.linear(f"{name}.gate", x, f"{module}.gate_proj", bias=bias)
        up = self.linear(f"{name}.up", x, f"{module}.up_proj", bias=bias)
        attrs = {"activation": activation}
        product = self.graph.add("gated_activation", f"{name}.gated", [gate, up], attrs)
        return self.linear(f"{name}.down", product, f"{module}.down_proj", bias=bias)

    def finish(self, x: str, norm: str, eps: float, table: str) -> Graph:
        """Final norm of the selected rows, and the head over `table`."""
        rows = self.graph.add("select_rows", "selected", [x, self.selection])
        normed = self.rms_norm("final_norm", rows, norm, eps)
        head = self.graph.add("head", "logits", [normed, self.weight(table)], covers=[table])
        self.graph.outputs = [head]
        return self.graph


def activation(config: Mapping[str, Any], key: str = "hidden_act") -> str:
    """The config's activation in Hornito's names.

    Raises:
        UnsupportedError: Hornito has no kernel for it.
    """
    name = config[key]
    if name not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{key} {name!r} is not supported; supported: {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


def refuse(config: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise UnsupportedError when any of these config keys is set to something."""
    found = [f"{key}={config[key]!r}" for key in keys if config.get(key)]
    if found:
        raise UnsupportedError(f"config settings that Hornito does not handle: {', '.join(found)}")
