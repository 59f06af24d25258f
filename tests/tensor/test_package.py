"""Packages of tensor graphs: what is written is what runs, and damage is found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import TensorProto, helper

from hornito.errors import HornitoError, PackageError, UnsupportedError, UsageError
from hornito.graph.graph import Graph
from hornito.importers.onnx_generic import Binding, import_generic, parse
from hornito.package import open_package
from hornito.support import missing
from hornito.tensor.graph import TensorGraph
from hornito.tensor.package import (
    GraphSpec,
    compile_graphs,
    is_tensor_package,
    load_buckets,
    read_buckets,
)
from tensor.models import bert_tiny, model

DIMS = {"batch_size": 1, "sequence_length": 16}


def only_graph(path: Path) -> TensorGraph:
    (bucket,) = load_buckets(path)
    return bucket.graph


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert") / "bert.vxm"
    compile_graphs([GraphSpec(parse(Path("bert.onnx"), bert_tiny()), Binding(dims=DIMS))], path)
    return path


def test_the_graph_comes_back(package: Path) -> None:
    graph = import_generic(parse(Path("bert"), bert_tiny()), Binding(dims=DIMS)).graph
    read = only_graph(package)
    assert read.to_json() == graph.to_json()
    assert set(read.constants) == set(graph.constants)
    for name, words in graph.constants.items():
        assert np.array_equal(read.constants[name], words), name


def test_every_node_of_the_file_is_accounted_for(package: Path) -> None:
    with open_package(package) as opened:
        assert is_tensor_package(opened)
        report = opened.manifest.support
        (facts,) = opened.manifest.facts["buckets"]
        assert facts["outputs"] == {"last_hidden_state": ["float32", [1, 16, 48]]}
        assert opened.verify() == []
    names = [row["name"] for row in report["source_nodes"]]
    assert names == [n.name for n in bert_tiny().graph.node]
    assert missing(report) == []
    summary = report["summary"]
    assert summary["source_nodes"] == 208
    assert summary["raised"] + summary["folded"] == 208
    assert summary["raised"] > 60


def test_it_is_no_text_model(package: Path) -> None:
    with open_package(package) as opened, pytest.raises(UnsupportedError, match="--input"):
        Graph.from_json(opened.manifest.graph)


def test_a_text_model_is_no_tensor_graph(package: Path) -> None:
    text = SimpleNamespace(path="text.vxm", manifest=SimpleNamespace(graph={"nodes": []}))
    with pytest.raises(UsageError, match=r"text\.vxm is a text model"):
        read_buckets(text)  # type: ignore[arg-type]


def test_doubles_are_reported(tmp_path: Path) -> None:
    proto = model([helper.make_node("Exp", ["x"], ["out"])], {"x": (TensorProto.DOUBLE, [3])})
    report = compile_graphs(
        [GraphSpec(parse(Path("double"), proto), Binding())], tmp_path / "double.vxm"
    )
    assert report.warnings == ["2 float64 values are computed in fp32"]


def test_constants_of_every_type(tmp_path: Path) -> None:
    constants = {
        "f": np.asarray([1.5, -2], np.float16),
        "i": np.asarray([-5, 7], np.int64),
        "u": np.asarray([200, 3], np.uint8),
        "b": np.asarray([True, False]),
        "none": np.zeros((0, 2), np.float32),
    }
    nodes = [helper.make_node("Identity", [name], [f"out_{name}"]) for name in constants]
    nodes.append(helper.make_node("Neg", ["x"], ["out"]))
    outputs = [f"out_{name}" for name in constants] + ["out"]
    proto = model(nodes, {"x": (TensorProto.FLOAT, [1])}, constants, outputs)
    path = tmp_path / "constants.vxm"
    compile_graphs([GraphSpec(parse(Path("constants"), proto), Binding())], path)
    graph = only_graph(path)
    assert {graph.values[v].dtype for v in graph.constants} == {
        "float16",
        "int64",
        "uint8",
        "bool",
        "float32",
    }


def test_mutated_packages_end_in_messages(package: Path, tmp_path: Path) -> None:
    data = package.read_bytes()
    length = int.from_bytes(data[:8], "little")
    rng = np.random.default_rng(7)
    for _ in range(60):
        changed = bytearray(data)
        for at in rng.integers(8, 8 + length, 3):
            changed[int(at)] = int(rng.integers(32, 127))
        path = tmp_path / "bad.vxm"
        path.write_bytes(bytes(changed))
        with pytest.raises(HornitoError):
            only_graph(path)


def test_a_missing_constant_is_found(package: Path) -> None:
    with open_package(package) as opened:
        (graph,) = opened.manifest.graph["buckets"]
        graph["constants"] = [*graph["constants"], "const999"]
        graph["values"]["const999"] = ["float32", [2]]
        with pytest.raises(PackageError, match="no tensor 'const999'"):
            read_buckets(opened)
