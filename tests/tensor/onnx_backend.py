"""Hornito as an `onnx.backend.base.Backend`, for the ONNX project's own tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx.backend.base import Backend, BackendRep

from hornito.importers.onnx_generic import Parsed, bind_to, parse
from hornito.tensor.model import TensorModel
from hornito.vk.device import Device


class PreparedModel(BackendRep):  # type: ignore[misc]
    """A parsed model; it is compiled for the shapes that it is run with.

    An input that shapes depend on is bound to its value, as `--value` does.
    """

    def __init__(self, parsed: Parsed, device: Device) -> None:
        self.parsed = parsed
        self.device = device
        self.nodes = 0

    def run(self, inputs: Sequence[Any], **options: Any) -> tuple[Any, ...]:
        """The outputs, in the model's order."""
        arrays = {
            name: np.asarray(array) for name, array in zip(self.parsed.inputs, inputs, strict=True)
        }
        model = bind_to(self.parsed, arrays)
        self.nodes = len(model.graph.nodes)
        given = {n: a for n, a in arrays.items() if n in model.graph.inputs}
        with TensorModel(self.device, model.graph, guard=256) as loaded:
            outputs = loaded.run(given)
        return tuple(outputs[name] for name in self.parsed.outputs)


class HornitoBackend(Backend):  # type: ignore[misc]
    """Prepares models on one device."""

    device: Device

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **options: Any) -> PreparedModel:
        """Parse a model."""
        return PreparedModel(
            parse(Path(model.graph.name or "model"), model, range(1, 29)), cls.device
        )

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whatever the tests call it, it is the Vulkan device."""
        return device == "CPU"
