"""Importing ONNX models as tensor graphs: bound dims, folded shapes, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from hornito.errors import FormatError, UnsupportedError, UsageError
from hornito.importers.onnx_generic import (
    Binding,
    NeedsValue,
    import_generic,
    parse,
    symbolic_dims,
)
from hornito.support import UnsupportedNodesError
from hornito.tensor.graph import TensorGraph, runs, unrolled
from tensor.models import bert_tiny, model

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def build(proto: Any, **binding: Any) -> TensorGraph:
    return import_generic(parse(Path("model"), proto), Binding(**binding)).graph


def test_dims_are_listed_and_must_be_bound() -> None:
    parsed = parse(Path("bert"), bert_tiny())
    assert symbolic_dims(parsed) == {
        "batch_size": ["input_ids[0]", "attention_mask[0]", "token_type_ids[0]"],
        "sequence_length": ["input_ids[1]", "attention_mask[1]", "token_type_ids[1]"],
    }
    with pytest.raises(UsageError, match=r"--dim sequence_length=N"):
        import_generic(parsed, Binding(dims={"batch_size": 1}))
    with pytest.raises(UsageError, match="--dim heads: no such dim; there are: batch_size"):
        import_generic(parsed, Binding(dims={"heads": 1}))
    with pytest.raises(UsageError, match="axis 1 is 7, elsewhere 8"):
        import_generic(parsed, Binding(shapes={"input_ids": (1, 8), "attention_mask": (1, 7)}))


def test_shapes_fold_to_nothing() -> None:
    graph = build(bert_tiny(), dims={"batch_size": 2, "sequence_length": 9})
    assert graph.values[graph.outputs["last_hidden_state"]].shape == (2, 9, 48)
    # Of 208 nodes, those that do arithmetic on the device are left.
    assert sum(node.op != "alias" for node in graph.nodes) < 85


def test_64_bit_shape_arithmetic_is_exact() -> None:
    big = 1 << 40
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Mul", ["shape", "big"], ["wide"]),
        helper.make_node("Div", ["wide", "big"], ["back"]),
        helper.make_node("Expand", ["y", "back"], ["out"]),
    ]
    proto = model(
        nodes, {"x": (FLOAT, ["n", 3]), "y": (FLOAT, [1])}, {"big": np.asarray([big], np.int64)}
    )
    graph = build(proto, dims={"n": 5})
    assert graph.values[graph.outputs["out"]].shape == (5, 3)


def test_every_unsupported_node_is_named() -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("LpPool", ["x"], ["c"], name="second", kernel_shape=[2]),
        helper.make_node("Add", ["b", "c"], ["out"]),
    ]
    with pytest.raises(UnsupportedNodesError) as caught:
        build(model(nodes, {"x": (FLOAT, [3, 3])}))
    found = [(p.node, p.op) for p in caught.value.problems]
    assert found == [("first", "Det"), ("second", "LpPool")]
    assert "there are: " in str(caught.value)


def test_a_loop_is_named() -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["v", "v"], ["w"]), helper.make_node("Identity", ["c"], ["d"])],
        "body",
        [helper.make_tensor_value_info(n, t, []) for n, t in (("i", 7), ("c", 9), ("v", FLOAT))],
        [helper.make_tensor_value_info(n, t, []) for n, t in (("d", 9), ("w", FLOAT))],
    )
    loop = helper.make_node("Loop", ["times", "", "x"], ["out"], name="again", body=body)
    proto = model([loop], {"x": (FLOAT, [])}, {"times": np.asarray(3)})
    with pytest.raises(UnsupportedNodesError, match=r"again \(Loop\): no kernel for Loop"):
        build(proto)


def test_an_operand_of_another_type_is_refused() -> None:
    nodes = [helper.make_node("Add", ["x", "y"], ["out"], name="sum")]
    proto = model(nodes, {"x": (FLOAT, [3]), "y": (INT64, [3])})
    with pytest.raises(UnsupportedNodesError, match=r"sum \(Add\): type int64 is not supported"):
        build(proto)


def test_strings_are_refused() -> None:
    nodes = [helper.make_node("Identity", ["x"], ["out"])]
    with pytest.raises(UnsupportedError, match="element type 8"):
        build(model(nodes, {"x": (TensorProto.STRING, [3])}))


def test_a_shape_that_depends_on_numbers_needs_them() -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["out"])]
    proto = model(nodes, {"x": (FLOAT, [6]), "shape": (INT64, [2])})
    with pytest.raises(NeedsValue, match=r"--value shape=FILE\.npy"):
        build(proto)
    graph = build(proto, values={"shape": np.asarray([2, -1])})
    assert graph.inputs == ["x"]
    assert graph.values[graph.outputs["out"]].shape == (2, 3)


HUGE = np.asarray([1 << 40], np.int64)
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "Expand": ("x", {"n": HUGE}),
    "Expand of a constant": ("c", {"c": np.ones(1, np.float32), "n": HUGE}),
    "Tile": ("x", {"n": HUGE}),
    "Pad": ("x", {"n": np.asarray([0, 1 << 40], np.int64)}),
    "ConstantOfShape": ("", {"n": HUGE}),
    "Range": ("zero", {"zero": HUGE[0] * 0, "n": HUGE[0], "one": HUGE[0] * 0 + 1}),
}


@pytest.mark.parametrize("case", SIZES)
def test_a_size_beyond_any_device_is_refused_before_it_takes_memory(case: str) -> None:
    first, constants = SIZES[case]
    names = [name for name in (first, "n", *list(constants)[2:]) if name]
    nodes = [
        helper.make_node(case.split()[0], names, ["much"], name="big"),
        helper.make_node("Size", ["much"], ["size"]),
        helper.make_node("Cast", ["size"], ["count"], to=FLOAT),
        helper.make_node("Add", ["x", "count"], ["out"]),
    ]
    with pytest.raises(UnsupportedNodesError, match=r"big \(\w+\): .*too large: 1099511627"):
        build(model(nodes, {"x": (FLOAT, [1])}, constants))


def test_nothing_joined_to_nothing_is_nothing() -> None:
    nodes = [helper.make_node("Concat", ["x", "x"], ["out"], axis=0)]
    graph = build(model(nodes, {"x": (FLOAT, [0, 3])}))
    assert graph.values[graph.outputs["out"]].shape == (0, 3)


def test_a_constant_beyond_32_bits_is_refused() -> None:
    nodes = [helper.make_node("Add", ["x", "c"], ["out"], name="far")]
    proto = model(nodes, {"x": (INT64, [1])}, {"c": np.asarray([1 << 33], np.int64)})
    with pytest.raises(UnsupportedNodesError, match="8589934592"):
        build(proto)


def test_ranks_above_eight_are_refused() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["out"], name="deep")]
    with pytest.raises(UnsupportedNodesError, match="rank 9; at most 8"):
        build(model(nodes, {"x": (FLOAT, [1] * 9)}))


def test_an_old_opset_is_refused() -> None:
    proto = model([helper.make_node("Relu", ["x"], ["out"])], {"x": (FLOAT, [1])})
    proto.opset_import[0].version = 12
    with pytest.raises(UnsupportedError, match="opset 12; supported are 13 to 28"):
        parse(Path("old"), proto)


def test_json_keeps_the_graph() -> None:
    graph = build(bert_tiny(), dims={"batch_size": 1, "sequence_length": 4})
    again = TensorGraph.from_json(graph.to_json(), graph.constants)
    assert again.to_json() == graph.to_json()
    assert again.nodes == graph.nodes


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": [{"op": "map"}]},
        {"values": {"x": ["float32", [-1]]}},
        {"values": []},
        {"outputs": {"out": "nowhere"}},
        {"constants": ["nothing"]},
    ],
)
def test_damaged_json_is_refused(change: dict[str, Any]) -> None:
    graph = build(model([helper.make_node("Exp", ["x"], ["out"])], {"x": (FLOAT, [3])}))
    with pytest.raises((FormatError, UnsupportedError)):
        TensorGraph.from_json({**graph.to_json(), **change}, {})


def test_maps_pack_as_runs() -> None:
    for entries in ([], [5], [0, 1, 2, 9, 7, 5, 5, 5], [-1, -1, 0, 3, 6, -1], list(range(50))):
        assert unrolled(runs(entries)).tolist() == entries
    assert runs(range(0, 30, 3)) == [0, 3, 10]
