"""The numpy evaluator of tensor graphs against the ONNX project's node tests, without a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from hornito.errors import HornitoError, UsageError
from hornito.importers.onnx_generic import bind_to, parse
from hornito.tensor.reference import evaluate
from tensor.models import bert_golden, bert_tiny, model
from tensor.node_tests import EXCEPTIONS, array, check, claimed, node_tests

ROUNDED_IN_FP32 = ("test_dynamicquantizelinear", "test_dynamicquantizelinear_expanded")
"""Their numbers lie between two integers in fp32 and beside the middle in float64."""


def failure(name: str) -> str:
    """What is wrong with the evaluator's results of a node test, or nothing."""
    test = node_tests()[name]
    parsed = parse(Path(name), test.model, range(1, 29))
    for given, wanted in test.data_sets:
        arrays = {n: np.asarray(array(a)) for n, a in zip(parsed.inputs, given, strict=True)}
        graph = bind_to(parsed, arrays).graph
        found = evaluate(graph, {n: a for n, a in arrays.items() if n in graph.inputs})
        for label, expected in zip(parsed.outputs, wanted, strict=True):
            try:
                check(array(expected), found[label], test.rtol, test.atol)
            except AssertionError as error:
                return f"{name}: {str(error).strip()[:200]}"
    return ""


def test_every_node_test_that_the_device_passes() -> None:
    left_out = {*EXCEPTIONS, *ROUNDED_IN_FP32}
    names = [name for name in claimed() if name not in left_out]
    assert len(names) > 1000
    assert [found for found in map(failure, names) if found] == []


def test_bert() -> None:
    golden = bert_golden()
    ids = golden["input_ids"]
    inputs = {
        "input_ids": ids,
        "attention_mask": golden["attention_mask"],
        "token_type_ids": np.zeros_like(ids),
    }
    graph = bind_to(parse(Path("bert.onnx"), bert_tiny()), inputs).graph
    found = evaluate(graph, inputs)
    name = next(iter(found))
    np.testing.assert_allclose(found[name][0], golden["last_hidden_state"], atol=1e-5)
    kept = evaluate(graph, inputs, keep=True)
    assert set(kept) == {n for node in graph.nodes for n in node.outputs}
    np.testing.assert_allclose(kept[graph.outputs[name]], found[name], atol=1e-6)


def test_wrong_inputs_and_indices() -> None:
    gather = helper.make_node("Gather", ["table", "ids"], ["out"])
    parsed = parse(
        Path("gather.onnx"),
        model([gather], {"ids": (TensorProto.INT64, [2])}, {"table": np.eye(3, dtype=np.float32)}),
    )
    graph = bind_to(parsed, {"ids": np.zeros(2, np.int64)}).graph
    assert evaluate(graph, {"ids": np.array([0, -1])})["out"].tolist() == [[1, 0, 0], [0, 0, 1]]
    with pytest.raises(HornitoError, match="an index lies outside its axis"):
        evaluate(graph, {"ids": np.array([0, 3])})
    with pytest.raises(UsageError, match=r"'ids' must be an array of shape \(2,\)"):
        evaluate(graph, {})
