"""Products with constant matrices, and rows of constant tables, that are stored in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hornito.cli.main import main
from hornito.errors import FormatError, HornitoError, UsageError
from hornito.importers.onnx_generic import Binding, parse
from hornito.importers.onnx_generic.builder import Builder
from hornito.package import open_package
from hornito.quant.formats import weight_format
from hornito.tensor.graph import Attr, TensorGraph
from hornito.tensor.kernels import TensorLowering
from hornito.tensor.model import TensorModel
from hornito.tensor.package import GraphSpec, compile_graphs, load_buckets
from hornito.tensor.plan import Least
from hornito.tensor.reference import evaluate
from hornito.tensor.stored import CHOICES, store_matrices
from hornito.vk.device import Device
from tensor.cases import constant, finished, stored
from tensor.models import bert_golden, bert_tiny

FEWER = [choice for choice in CHOICES if choice != "fp32"]
INPUTS = {
    "x": np.random.default_rng(9).standard_normal((2, 7, 64)).astype(np.float32),
    "ids": np.array([[0, 1029, 5], [-1, 517, -1030]]),
}


def products(graph: TensorGraph) -> list[str]:
    return [n.op for n in graph.nodes if n.op in ("matmul", "linear", "gather", "lookup")]


@pytest.mark.gpu
@pytest.mark.parametrize("weights", FEWER)
@pytest.mark.parametrize("bias", [True, False])
def test_the_device_computes_what_is_stored(device: Device, weights: str, bias: bool) -> None:
    graph = stored(weights, bias=bias)
    assert products(graph) == ["linear", "linear", "lookup"]
    exact = evaluate(graph, INPUTS)
    with TensorModel(device, graph, guard=1024) as loaded:
        found = loaded.run(INPUTS)
        again = loaded.run(INPUTS)
    for name, value in found.items():
        np.testing.assert_allclose(value, exact[name], rtol=1e-5, atol=1e-4)
        assert np.array_equal(value, again[name])


def test_fewer_bits_lose_more() -> None:
    plain = stored("fp32")
    assert products(plain) == ["matmul", "matmul", "gather"]
    exact = evaluate(plain, INPUTS)["out"]
    errors = [np.abs(evaluate(stored(w), INPUTS)["out"] - exact).max() for w in FEWER]
    fp16, bf16, int8, int4, int4m = errors
    assert 0 < fp16 < bf16 < int4 and fp16 < int8 < int4m < int4 < np.abs(exact).max()


def test_bytes_are_those_of_the_format() -> None:
    for weights in FEWER:
        graph = stored(weights)
        words = sum(a.size for n, a in graph.constants.items() if graph.values[n].kind == 2)
        fmt = weight_format(weights)
        table = weight_format("int8g64" if weights in ("int4", "int4m") else weights)
        assert 4 * words == fmt.nbytes((96, 64)) + fmt.nbytes((9, 96)) + table.nbytes((1030, 64))


def test_what_linear_can_t_compute_stays() -> None:
    """Batches of matrices, other scales, odd strides, products of two inputs, odd widths."""
    b = Builder()
    rng = np.random.default_rng(1)
    x, y = (b.input(name, "float32", (2, 3, 32)) for name in "xy")
    w = constant(rng.standard_normal((32, 8)))
    ids = b.input("ids", "int64", (1,))
    attrs: dict[str, Attr] = {"fn": "gather", "p": [9, 64, 1, 0]}
    row = ((1, 64), attrs)
    graph = finished(
        b,
        batch=b.matmul(x, constant(rng.standard_normal((2, 32, 8)))),
        scaled=b.matmul(b.reshape(x, (6, 32)), w, alpha=0.5),
        turned=b.matmul(b.reshape(x, (32, 6)), w, flip_a=True),
        inputs=b.matmul(x, y, flip_b=True),
        left=b.matmul(constant(rng.standard_normal((3, 3))), x),
        matrix=b.matmul(b.reshape(x, (6, 32)), w, c=constant(rng.standard_normal((6, 8)))),
        odd=b.matmul(b.reshape(x, (12, 16)), constant(rng.standard_normal((16, 8)))),
        small=b.node("gather", [constant(rng.standard_normal((9, 64))), ids], "float32", *row),
    )
    inputs = {name: rng.standard_normal((2, 3, 32)).astype(np.float32) for name in "xy"}
    inputs["ids"] = np.array([3])
    before = evaluate(graph, inputs)
    formats, note = store_matrices(graph, "int8")
    assert formats == {} and set(products(graph)) == {"matmul", "gather"}
    assert note == "1 matrices stay fp32: their rows do not fit int8"
    after = evaluate(graph, inputs)
    assert all(np.array_equal(after[name], value) for name, value in before.items())
    with pytest.raises(UsageError, match="weights must be one of"):
        store_matrices(graph, "keep")


def test_a_matrix_that_is_used_twice_is_stored_once() -> None:
    b = Builder()
    x = b.input("x", "float32", (4, 64))
    w = constant(np.random.default_rng(1).standard_normal((64, 64)))
    graph = finished(b, out=b.matmul(b.matmul(x, w), w))
    formats, _ = store_matrices(graph, "int8")
    assert formats["int8"]["matrices"] == len(graph.constants) == 1


@pytest.mark.parametrize(
    "change",
    [{"k": 32}, {"n": 10}, {"rows": 15}, {"format": "int4"}, {"rows": 0}],
)
@pytest.mark.parametrize("op", ["linear", "lookup"])
def test_damaged_nodes_are_refused(change: dict[str, Any], op: str) -> None:
    graph = stored("int8")
    node = next(node for node in graph.nodes if node.op == op)
    node.attrs.update(change)  # type: ignore[attr-defined]
    with pytest.raises(FormatError, match="do not fit its attributes"):
        TensorLowering(graph, Least()).run()


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [1030, -1031, 2**31 - 1])
def test_an_index_outside_the_table_is_an_error(device: Device, bad: int) -> None:
    inputs = {**INPUTS, "ids": np.array([[0, 1, 2], [3, bad, 4]])}
    graph = stored("int8")
    with (
        TensorModel(device, graph) as loaded,
        pytest.raises(HornitoError, match="an index lies outside its axis"),
    ):
        loaded.run(inputs)
    with pytest.raises(HornitoError, match="an index lies outside its axis"):
        evaluate(graph, inputs)


@pytest.mark.gpu
def test_bert_with_stored_matrices(device: Device, tmp_path: Path) -> None:
    """A package is written and read, and its embeddings stay close to those in fp32."""
    golden = bert_golden()
    ids = golden["input_ids"]
    inputs = {
        "input_ids": ids,
        "attention_mask": golden["attention_mask"],
        "token_type_ids": ids * 0,
    }
    dims = {"batch_size": 1, "sequence_length": 16}
    spec = GraphSpec(parse(Path("bert"), bert_tiny()), Binding(dims=dims))
    sizes = []
    for weights, bound in (("fp32", 1e-4), ("fp16", 5e-3), ("int8", 0.05), ("int4", 0.5)):
        path = tmp_path / f"{weights}.vxm"
        report = compile_graphs([spec], path, weights=weights)
        sizes.append(report.bytes)
        with open_package(path) as package:
            assert package.manifest.quant["weights"] == weights and package.verify() == []
        (bucket,) = load_buckets(path)
        with TensorModel(device, bucket.graph) as loaded:
            (out,) = loaded.run(inputs).values()
        assert np.abs(out - golden["last_hidden_state"]).max() < bound, weights
        if weights != "fp32":
            assert "linear" in products(bucket.graph)
    assert sizes[0] > sizes[1]


def test_compile_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    onnx.save(bert_tiny(), str(tmp_path / "bert.onnx"))
    dims = ["--dim", "batch_size=1", "--dim", "sequence_length=16"]
    command = ["compile", str(tmp_path / "bert.onnx"), str(tmp_path / "bert.vxm"), *dims]
    assert main([*command, "--weights", "int8"]) == 0
    error = capsys.readouterr().err
    assert "stay fp32: their rows do not fit int8" in error
    assert main(["inspect", str(tmp_path / "bert.vxm")]) == 0
    assert "quant.formats.int8" in capsys.readouterr().out
    assert main([*command, "--weights", "keep"]) == 2
    assert "weights must be one of fp32" in capsys.readouterr().err
