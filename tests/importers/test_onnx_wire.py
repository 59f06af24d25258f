"""ONNX files are parsed without their weights, which are found where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from hornito.errors import FormatError  # noqa: E402
from hornito.importers.onnx.reader import Branch, read_model  # noqa: E402
from hornito.importers.onnx.tensors import TensorReader  # noqa: E402
from hornito.importers.onnx.wire import INLINE, THRESHOLD, parse_file  # noqa: E402

BIG = np.arange(3 * THRESHOLD, dtype=np.float32).reshape(3, THRESHOLD)
SMALL = np.arange(7, dtype=np.float32)


def branch(name: str, value: Any) -> Any:
    """A subgraph whose result is an initialiser."""
    info = helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape)
    return helper.make_graph([], name, [], [info], [numpy_helper.from_array(value, name)])


def sample() -> Any:
    """Tensors in every place: initialisers, attributes, branches."""
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(BIG + 1, "c_value")),
        helper.make_node("Constant", [], ["s"], value=numpy_helper.from_array(SMALL)),
        helper.make_node(
            "If", ["flag"], ["y"], then_branch=branch("t", BIG + 2), else_branch=branch("e", SMALL)
        ),
    ]
    inputs = [helper.make_tensor_value_info("flag", TensorProto.BOOL, [])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    weights = [
        numpy_helper.from_array(BIG, "big"),
        numpy_helper.from_array(SMALL, "small"),
        helper.make_tensor("typed", TensorProto.FLOAT, BIG.shape, BIG.ravel() + 3),
    ]
    graph = helper.make_graph(nodes, "sample", inputs, outputs, weights, doc_string="x" * 9000)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def test_every_tensor_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(sample().SerializeToString())
    model = read_model(path)
    np.testing.assert_array_equal(model.constants["big"].array, BIG)
    np.testing.assert_array_equal(model.constants["small"].array, SMALL)
    np.testing.assert_array_equal(model.constants["typed"].array, BIG + 3)
    constants = {n.outputs[0]: n.attrs for n in model.nodes}
    np.testing.assert_array_equal(constants["c"]["value"].array, BIG + 1)
    np.testing.assert_array_equal(constants["s"]["value"].array, SMALL)
    then = constants["y"]["then_branch"]
    assert isinstance(then, Branch)
    np.testing.assert_array_equal(then.constants["t"].array, BIG + 2)
    assert model.files == set()


def test_what_is_parsed_is_small(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    whole = sample()
    path.write_bytes(whole.SerializeToString())
    proto = onnx.ModelProto()
    parse_file(path, proto)
    kept = BIG.nbytes + 2 * SMALL.nbytes + 12000  # the typed one, and the text
    assert proto.ByteSize() < kept < whole.ByteSize() - 2 * BIG.nbytes
    # Put back, it is the file again.
    for tensor in (proto.graph.initializer[0], proto.graph.node[0].attribute[0].t):
        (start, length) = (int(e.value) for e in tensor.external_data if e.key != "location")
        tensor.raw_data = path.read_bytes()[start : start + length]
        del tensor.external_data[:]
        tensor.ClearField("data_location")
    del proto.graph.node[2], whole.graph.node[2]
    assert proto == whole


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


@pytest.mark.parametrize("order", ["big last", "small last"])
def test_of_data_given_twice_the_last_counts(tmp_path: Path, order: str) -> None:
    values = [SMALL, BIG.ravel()] if order == "big last" else [BIG.ravel(), SMALL]
    tensor = b"".join(varint(9 << 3 | 2) + varint(v.nbytes) + v.tobytes() for v in values)
    head = TensorProto(name="w", data_type=1, dims=values[-1].shape).SerializeToString()
    body = varint(5 << 3 | 2) + varint(len(head + tensor)) + head + tensor
    path = tmp_path / "model.onnx"
    path.write_bytes(varint(7 << 3 | 2) + varint(len(body)) + body)
    proto = onnx.ModelProto()
    parse_file(path, proto)
    (found,) = proto.graph.initializer
    np.testing.assert_array_equal(TensorReader(path, onnx).const(found).array, values[-1])


@pytest.mark.parametrize("facts", [("x", "8"), ("-8", "16384"), ("0", "-4"), ("8", "1" * 30)])
def test_a_forged_reference_is_refused(tmp_path: Path, facts: tuple[str, str]) -> None:
    tensor = TensorProto(name="w", data_type=1, dims=[4096], data_location=1)
    for key, value in zip(("location", "offset", "length"), (INLINE, *facts), strict=True):
        tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph([], "g", [], [], [tensor])
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    with pytest.raises(FormatError, match="'w'"):
        TensorReader(path, onnx).const(tensor)


def test_cut_files_are_refused(tmp_path: Path) -> None:
    data = sample().SerializeToString()
    path = tmp_path / "model.onnx"
    for stop in range(1, len(data), 997):
        path.write_bytes(data[:stop])
        with pytest.raises(FormatError, match="not an ONNX file"):
            parse_file(path, onnx.ModelProto())
