"""Tensor graphs on a device: BERT, exact integers, indices, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from hornito.errors import HornitoError, SessionError, UnsupportedError, UsageError
from hornito.importers.onnx_generic import Binding, import_generic, parse
from hornito.tensor.graph import TensorGraph
from hornito.tensor.model import TensorModel
from hornito.vk.device import Device
from tensor.models import bert_golden, bert_tiny, model

pytestmark = pytest.mark.gpu

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def build(proto: Any, **binding: Any) -> TensorGraph:
    return import_generic(parse(Path("model"), proto), Binding(**binding)).graph


def test_bert_gives_its_golden(device: Device) -> None:
    golden = bert_golden()
    ids = golden["input_ids"]
    inputs = {
        "input_ids": ids,
        "attention_mask": golden["attention_mask"],
        "token_type_ids": np.zeros_like(ids),
    }
    assert golden["attention_mask"].sum() == 12  # of 16: the others are padding
    graph = build(bert_tiny(), dims={"batch_size": 1, "sequence_length": 16})
    with TensorModel(device, graph) as loaded:
        (out,) = loaded.run(inputs).values()
        again = loaded.run(inputs)["last_hidden_state"]
    assert np.abs(out[0] - golden["last_hidden_state"]).max() < 1e-4
    assert np.array_equal(out, again)


def test_bert_in_a_batch_equals_single_rows(device: Device) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 100, (3, 11))
    mask = np.arange(11)[None] < np.asarray([[11], [6], [1]])
    inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": ids * 0}
    graph = build(bert_tiny(), dims={"batch_size": 3, "sequence_length": 11})
    with TensorModel(device, graph) as loaded:
        together = loaded.run(inputs)["last_hidden_state"]
    graph = build(bert_tiny(), dims={"batch_size": 1, "sequence_length": 11})
    with TensorModel(device, graph) as loaded:
        for row in range(3):
            one = loaded.run({n: a[row : row + 1] for n, a in inputs.items()})
            assert np.abs(one["last_hidden_state"][0] - together[row]).max() < 1e-5


def test_barriers_are_enough(device: Device) -> None:
    golden = bert_golden()
    ids = golden["input_ids"]
    inputs = {
        "input_ids": ids,
        "attention_mask": golden["attention_mask"],
        "token_type_ids": ids * 0,
    }
    graph = build(bert_tiny(), dims={"batch_size": 1, "sequence_length": 16})
    with TensorModel(device, graph) as loaded:
        computed = loaded.run(inputs)["last_hidden_state"]
    with TensorModel(device, graph, guard=1024, barrier_everywhere=True) as loaded:
        safe = loaded.run(inputs)["last_hidden_state"]
    assert np.array_equal(computed, safe)


@pytest.mark.parametrize(
    ("op", "a", "b"),
    [
        ("Add", (1 << 31) - 1, 1),
        ("Sub", -(1 << 31), 1),
        ("Mul", 1 << 16, 1 << 15),
        ("Div", -(1 << 31), -1),
        ("Pow", 3, 20),
    ],
)
def test_a_64_bit_result_beyond_32_bits_is_refused(device: Device, op: str, a: int, b: int) -> None:
    proto = model(
        [helper.make_node(op, ["x", "y"], ["out"], name="exact")],
        {"x": (INT64, [2]), "y": (INT64, [2])},
    )
    with TensorModel(device, build(proto)) as loaded:
        with pytest.raises(HornitoError, match="node exact"):
            loaded.run({"x": np.asarray([1, a]), "y": np.asarray([1, b])})
        # The model is as good as before.
        fine = loaded.run({"x": np.asarray([7, 6]), "y": np.asarray([1, 1])})["out"]
    expected = {"Add": [8, 7], "Sub": [6, 5], "Mul": [7, 6], "Div": [7, 6], "Pow": [7, 6]}
    assert fine.dtype == np.int64
    assert fine.tolist() == expected[op]


def test_integers_are_exact_where_floats_are_not(device: Device) -> None:
    proto = model(
        [
            helper.make_node("CumSum", ["x", "axis"], ["sum"]),
            helper.make_node("Mul", ["sum", "three"], ["out"]),
        ],
        {"x": (INT64, [4])},
        {"axis": np.asarray(0, np.int64), "three": np.asarray(3, np.int64)},
    )
    values = np.asarray([16777217, 2, 33554433, 1])
    with TensorModel(device, build(proto)) as loaded:
        assert loaded.run({"x": values})["out"].tolist() == (np.cumsum(values) * 3).tolist()


def test_inputs_are_checked(device: Device) -> None:
    proto = model([helper.make_node("Neg", ["x"], ["out"])], {"x": (INT64, [2])})
    with TensorModel(device, build(proto)) as loaded:
        with pytest.raises(UsageError, match="inputs are missing: x"):
            loaded.run({})
        with pytest.raises(UsageError, match=r"no such inputs: y; there are \['x'\]"):
            loaded.run({"x": np.zeros(2, np.int64), "y": np.zeros(1)})
        with pytest.raises(UsageError, match=r"shape \(3,\).*compiled for \(2,\)"):
            loaded.run({"x": np.zeros(3, np.int64)})
        with pytest.raises(UsageError, match="is float64; the model takes int64"):
            loaded.run({"x": np.zeros(2)})
        with pytest.raises(UnsupportedError, match=r"input x.*4294967296"):
            loaded.run({"x": np.asarray([0, 1 << 32])})
    with pytest.raises(SessionError, match="closed"):
        loaded.run({"x": np.zeros(2, np.int64)})


def test_an_index_outside_its_axis_is_an_error(device: Device) -> None:
    proto = model(
        [helper.make_node("Gather", ["table", "ids"], ["out"], name="lookup")],
        {"ids": (INT64, [3])},
        {"table": np.arange(8, dtype=np.float32).reshape(4, 2)},
    )
    with TensorModel(device, build(proto)) as loaded:
        assert loaded.run({"ids": np.asarray([3, -1, -4])})["out"].tolist() == [
            [6, 7],
            [6, 7],
            [0, 1],
        ]
        for bad in (4, -5, 1 << 30):
            with pytest.raises(HornitoError, match=r"node lookup .*an index lies outside its axis"):
                loaded.run({"ids": np.asarray([0, bad, 0])})


def test_large_grids_need_a_second_dimension(device: Device) -> None:
    """More workgroups than one dimension holds."""
    from dataclasses import replace

    from hornito.tensor.kernels import TensorLowering

    proto = model([helper.make_node("Neg", ["x"], ["out"])], {"x": (FLOAT, [100, 70])})
    graph = build(proto)
    caps = replace(device.caps, max_workgroup_count=(20, 65535, 65535))
    (dispatch,) = TensorLowering(graph, caps).run().dispatches
    assert dispatch.groups == (20, 6, 1)
    x = np.random.default_rng(0).standard_normal((100, 70), np.float32)
    with TensorModel(device, graph) as loaded:
        assert np.array_equal(loaded.run({"x": x})["out"], -x)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (33, 31, 7), (64, 96, 65), (5, 130, 257)])
def test_matmul(device: Device, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 3, m, k)), rng.standard_normal((3, k, n))
    proto = model(
        [helper.make_node("MatMul", ["a", "b"], ["out"])],
        {"a": (FLOAT, a.shape), "b": (FLOAT, b.shape)},
    )
    with TensorModel(device, build(proto)) as loaded:
        out = loaded.run({"a": a.astype(np.float32), "b": b.astype(np.float32)})["out"]
    assert np.abs(out - a @ b).max() < 1e-5 * k


def test_nothing_stays_allocated(device: Device) -> None:
    before = device.allocated_bytes
    proto = model([helper.make_node("Exp", ["x"], ["out"])], {"x": (FLOAT, [1000])})
    with TensorModel(device, build(proto)) as loaded:
        assert device.allocated_bytes > before
        loaded.run({"x": np.zeros(1000, np.float32)})
    loaded.close()
    assert device.allocated_bytes == before
