"""The ONNX project's node tests that belong to the ops and types which Hornito claims."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test import loader

from hornito.importers.onnx_generic.table import TYPE_NAMES, handlers

EXCEPTIONS = {
    **dict.fromkeys(
        (
            f"test_attention_{name}_bf16{form}"
            for name in (
                "4d_causal",
                "4d_padded_kv",
                "4d_causal_padded_kv",
                "4d_attn_mask_causal",
                "3d_causal",
            )
            for form in ("", "_expanded")
        ),
        "bfloat16 is computed in fp32; the expected values are rounded after every node",
    ),
    **dict.fromkeys(
        (
            "test_training_dropout_default",
            "test_training_dropout_default_mask",
            "test_training_dropout",
            "test_training_dropout_mask",
            "test_training_dropout_zero_ratio",
            "test_training_dropout_zero_ratio_mask",
        ),
        "dropout in training mode is refused: models are run, not trained",
    ),
    **dict.fromkeys(
        ("test_identity_sequence", "test_identity_opt"), "sequences and optionals are no tensors"
    ),
}


@cache
def node_tests() -> dict[str, Any]:
    """Every node test of a released onnx, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {test.name: test for test in loader.load_model_tests(kind="node")}


def ops_of(model: Any) -> set[str]:
    """Keys of the ops in a model."""
    return {
        n.op_type if n.domain in ("", "ai.onnx") else f"{n.domain}:{n.op_type}"
        for n in model.graph.node
    }


def types_of(model: Any) -> set[int]:
    """Numbers of the element types of a model's tensors and casts."""
    graph = model.graph
    found = {t.data_type for t in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.HasField("tensor_type"):
            found.add(value.type.tensor_type.elem_type)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                found.add(attribute.t.data_type)
            elif attribute.name == "to":
                found.add(attribute.i)
    return found


@cache
def claimed() -> tuple[str, ...]:
    """Names of the tests whose ops all have handlers, of element types that the device has."""
    ops = set(handlers())
    return tuple(
        name
        for name, test in node_tests().items()
        if ops_of(test.model) <= ops and types_of(test.model) <= set(TYPE_NAMES)
    )


@cache
def refused() -> tuple[str, ...]:
    """Names of the tests of ops with handlers whose element types the device does not have."""
    ops = set(handlers())
    return tuple(
        name
        for name, test in node_tests().items()
        if ops_of(test.model) <= ops and not types_of(test.model) <= set(TYPE_NAMES)
    )


def array(value: Any) -> Any:
    """A test's datum as numpy."""
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def check(expected: Any, actual: Any, rtol: float, atol: float) -> None:
    """Raise AssertionError unless two results agree in shape, type and numbers."""
    expected, actual = np.asarray(expected), np.asarray(actual)
    assert actual.shape == expected.shape
    if expected.dtype.kind == "V" or expected.dtype.name == "bfloat16":
        expected = expected.astype(np.float32)
    assert actual.dtype == expected.dtype
    if actual.dtype.kind == "f":
        actual, expected = actual.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)
    else:
        np.testing.assert_array_equal(actual, expected)
