"""A model of tensors on the device against the numpy evaluator, node by node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hornito.diag.compare_values import Difference, Tolerance, Trace, measure
from hornito.errors import UsageError
from hornito.tensor.graph import FLOATS, Array, TensorGraph
from hornito.tensor.model import TensorModel
from hornito.tensor.reference import evaluate

if TYPE_CHECKING:
    from hornito.vk.device import Device


@dataclass(slots=True)
class TensorComparison:
    """What was found: every value in graph order, and the two sides' numbers."""

    values: tuple[Difference, ...]
    tolerance: Tolerance
    model: Trace
    reference: Trace
    inputs: dict[str, str] = field(default_factory=dict)
    dumped: list[str] = field(default_factory=list)

    @property
    def first(self) -> Difference | None:
        """The first divergence in graph order."""
        return next((value for value in self.values if not value.equal), None)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types, without the numbers."""
        return {
            "equal": self.first is None,
            "relative_tolerance": self.tolerance.relative,
            "cosine_tolerance": self.tolerance.cosine,
            "inputs": self.inputs,
            "first_divergence": None if self.first is None else self.first.to_dict(),
            "values": [value.to_dict() for value in self.values],
            "dumped": self.dumped,
        }


def compare_tensors(
    graph: TensorGraph,
    reference: TensorGraph,
    inputs: Mapping[str, Array],
    device: Device | None,
    ref_device: Device | None,
    tolerance: Tolerance,
) -> TensorComparison:
    """Run both on the same inputs.

    Where both are one graph, the result of every node is compared; of two files only the outputs,
    since each has names of its own for what lies between.

    Args:
        device, ref_device: what runs either side; None for the numpy evaluator.

    Raises:
        UsageError: they have no output of one name and shape.
    """
    model = _trace(graph, inputs, device)
    nodes = {name: node for node in graph.nodes for name in node.outputs}
    if reference is graph and ref_device is None:
        other = Trace("", evaluate(graph, inputs, keep=True))
    else:
        named = {f"output {label}": name for label, name in graph.outputs.items()}
        nodes = {label: nodes[name] for label, name in named.items() if name in nodes}
        model = Trace("", {label: model.values[named[label]] for label in nodes})
        found = _trace(reference, inputs, ref_device).values
        outputs = reference.outputs.items()
        other = Trace("", {f"output {label}": found[n] for label, n in outputs if n in found})
    shared = [
        name
        for name, array in model.values.items()
        if name in other.values and other.values[name].shape == array.shape
    ]
    if not shared:
        raise UsageError("model and reference have no output of one name and shape")
    values = tuple(
        measure(
            "",
            name,
            model.values[name],
            other.values[name],
            tolerance,
            op=f"{nodes[name].op} of {nodes[name].source}".removesuffix(" of "),
            kernels=(f"tensor/{nodes[name].op}",),
        )
        for name in shared
    )
    return TensorComparison(values, tolerance, model, other)


def made_up(graph: TensorGraph, given: Mapping[str, Array]) -> dict[str, Array]:
    """Inputs for a graph: those given, random floats, and ones for integers."""
    rng = np.random.default_rng(0)
    found = dict(given)
    for name in graph.inputs:
        value = graph.values[name]
        if name not in found and value.dtype in FLOATS:
            found[name] = rng.standard_normal(value.shape).astype(np.float32)
        elif name not in found:
            found[name] = np.ones(value.shape, value.dtype)
    return found


def _trace(graph: TensorGraph, inputs: Mapping[str, Array], device: Device | None) -> Trace:
    if device is None:
        return Trace("", evaluate(graph, inputs, keep=True))
    with TensorModel(device, graph, keep_values=True) as model:
        model.run(inputs)
        return Trace("", model.values())
