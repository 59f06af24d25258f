"""Ops without a node test in the ONNX project, against their definitions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from hornito.importers.onnx_generic import bind_to, parse
from hornito.tensor.model import TensorModel
from hornito.vk.device import Device
from tensor.models import model

pytestmark = pytest.mark.gpu


def run(device: Device, node: Any, arrays: dict[str, Any]) -> Any:
    inputs = {name: (TensorProto.FLOAT, array.shape) for name, array in arrays.items()}
    graph = bind_to(parse(Path("model"), model([node], inputs)), arrays).graph
    with TensorModel(device, graph) as loaded:
        return loaded.run(arrays)["out"]


def samples(*shape: int) -> Any:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32) * 3


def test_gelu(device: Device) -> None:
    x = samples(7, 33)
    node = helper.make_node("Gelu", ["x"], ["out"], domain="com.microsoft")
    expected = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.reshape(-1).tolist()]
    out = run(device, node, {"x": x})
    assert np.abs(out.reshape(-1) - expected).max() < 2e-6


def test_fast_gelu_with_a_bias(device: Device) -> None:
    x, bias = samples(7, 33), samples(33)
    node = helper.make_node("FastGelu", ["x", "bias"], ["out"], domain="com.microsoft")
    v = (x + bias).astype(np.float64)
    expected = 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    assert np.abs(run(device, node, {"x": x, "bias": bias}) - expected).max() < 3e-6


def test_simplified_layer_norm(device: Device) -> None:
    x, scale = samples(5, 130), samples(130)
    node = helper.make_node("SimplifiedLayerNormalization", ["x", "scale"], ["out"], epsilon=1e-6)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale
    assert np.abs(run(device, node, {"x": x, "scale": scale}) - expected).max() < 1e-5


def test_dynamic_quantisation_of_zeros(device: Device) -> None:
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["out", "scale", "zero"])
    assert run(device, node, {"x": np.zeros((2, 3), np.float32)}).tolist() == [[0] * 3] * 2


@pytest.mark.parametrize("width", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMax", "ReduceLogSumExp", "ReduceL2"])
def test_reductions_of_every_width(device: Device, op: str, width: int) -> None:
    x = samples(3, width)
    node = helper.make_node(op, ["x"], ["out"], keepdims=0)
    wide = x.astype(np.float64)
    expected = {
        "ReduceSum": wide.sum(),
        "ReduceMax": wide.max(),
        "ReduceLogSumExp": np.log(np.exp(wide).sum()),
        "ReduceL2": np.sqrt((wide**2).sum()),
    }[op]
    assert abs(float(run(device, node, {"x": x})) - expected) < 1e-4 * max(1.0, abs(expected))
