"""Several graphs in one package: the shapes of one file, several files, weights stored once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from hornito.cli.main import main
from hornito.errors import UsageError
from hornito.package import open_package
from hornito.tensor.buckets import pick
from hornito.tensor.model import TensorModels
from hornito.tensor.package import load_buckets
from hornito.vk.device import Device
from tensor.models import bert_tiny, model, save

WEIGHT = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)


def linear(folder: Path, name: str, bias: float = 0.0) -> Path:
    """`x @ WEIGHT + bias`, x of `[batch, length, 8]`."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
        helper.make_node("Add", ["y", "b"], ["out"], name="sum"),
    ]
    constants = {"w": WEIGHT, "b": np.full(4, bias, np.float32)}
    inputs = {"x": (TensorProto.FLOAT, ["batch", "length", 8])}
    return save(model(nodes, inputs, constants), folder, f"{name}.onnx")


def compiled(folder: Path, *options: str) -> Path:
    out = folder / "out.vxm"
    assert main(["compile", *options[:1], str(out), *options[1:]]) == 0
    return out


def stored(package: Path) -> list[str]:
    with open_package(package) as opened:
        return list(opened.tensors)


def test_buckets_of_one_file_share_its_weights(tmp_path: Path) -> None:
    path = str(linear(tmp_path, "linear"))
    package = compiled(
        tmp_path, path, "--dim", "batch=2", *("--bucket", "length=3"), *("--bucket", "length=5")
    )
    buckets = load_buckets(package)
    assert [b.name for b in buckets] == ["batch=2,length=3", "batch=2,length=5"]
    assert [b.shapes() for b in buckets] == [{"x": (2, 3, 8)}, {"x": (2, 5, 8)}]
    assert len(stored(package)) == 2
    first, second = (b.graph.constants for b in buckets)
    for words in second.values():
        assert any(np.shares_memory(words, other) for other in first.values())


def test_graphs_of_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = linear(tmp_path, "one"), linear(tmp_path, "two", bias=1.0)
    out, report = tmp_path / "out.vxm", tmp_path / "report.json"
    graphs = [
        f"{one};dim:batch=1;dim:length=3",
        f"{one};shape:x=1x4x8",
        f"{two};dim:batch=1;dim:length=3;name:shifted",
    ]
    options = [o for graph in graphs for o in ("--graph", graph)]
    assert main(["compile", str(out), *options, "--support-report", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "bucket one:batch=1,length=3" in printed and "input x: float32 [1, 4, 8]" in printed
    names = [b.name for b in load_buckets(out)]
    assert names == ["one:batch=1,length=3", "one:x=1x4x8", "shifted"]
    assert len(stored(out)) == 3  # the matrix, and two biases
    data: dict[str, Any] = json.loads(report.read_text())["support"]
    assert data["summary"]["source_nodes"] == 6 and data["summary"]["raised"] == 6
    assert [b["name"] for b in data["buckets"]] == names
    assert {row["bucket"] for row in data["source_nodes"]} == set(names)
    assert data["buckets"][1]["memory"]["inputs"] == 4 * 8 * 4
    assert data["buckets"][1]["memory"]["activations"] >= 4 * 4 * 4
    for file in (out, report):
        assert main(["check", str(file)]) == 0
        assert "6 nodes of the source" in capsys.readouterr().out
    assert main(["inspect", str(out)]) == 0
    assert "6 nodes" in capsys.readouterr().out


@pytest.mark.gpu
def test_run_takes_the_bucket_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = compiled(
        tmp_path,
        str(linear(tmp_path, "linear", 0.5)),
        *("--bucket", "batch=1,length=3", "--bucket", "x=1x5x8"),
    )
    capsys.readouterr()
    for length, more in ((3, ["--dim", "length=3"]), (5, []), (4, []), (3, ["--dim", "length=5"])):
        x = np.random.default_rng(length).standard_normal((1, length, 8)).astype(np.float32)
        np.save(tmp_path / "x.npy", x)
        options = ["--input", f"x={tmp_path / 'x.npy'}", "--output", str(tmp_path / "o"), *more]
        code = main(["run", str(package), *options])
        err = capsys.readouterr().err
        if length == 4:
            assert code == 2 and "no bucket takes the inputs x [1, 4, 8]" in err
            assert "batch=1,length=3 (x [1, 3, 8]); x=1x5x8 (x [1, 5, 8])" in err
        elif more == ["--dim", "length=5"]:
            assert code == 2 and "compiled for length = 3" in err
        else:
            assert code == 0
            got = np.load(tmp_path / "o" / "out.npy")
            np.testing.assert_allclose(got, x @ WEIGHT + 0.5, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_two_files_that_take_the_same_inputs(tmp_path: Path, device: Device) -> None:
    files = linear(tmp_path, "one"), linear(tmp_path, "two", bias=1.0)
    options = [o for file in files for o in ("--graph", f"{file};shape:x=1x3x8")]
    out = tmp_path / "out.vxm"
    assert main(["compile", str(out), *options]) == 0
    x = np.ones((1, 3, 8), np.float32)
    with TensorModels(device, load_buckets(out)) as models:
        with pytest.raises(UsageError, match="several buckets; choose one with --bucket: one:x="):
            models.run({"x": x})
        results = [models.run({"x": x}, bucket=b.name)["out"] for b in models.buckets]
        assert results[1] == pytest.approx(results[0] + 1.0)
        with pytest.raises(UsageError, match="no bucket named 'three'"):
            models.run({"x": x}, bucket="three")


@pytest.mark.gpu
def test_buckets_give_what_single_packages_give(tmp_path: Path, device: Device) -> None:
    """BERT at two lengths, its weights on the device once: the same bits."""
    path = str(save(bert_tiny(), tmp_path, "bert.onnx"))
    lengths = (6, 11)
    options = [o for n in lengths for o in ("--bucket", f"sequence_length={n}")]
    package = compiled(tmp_path, path, "--dim", "batch_size=1", *options)
    with TensorModels(device, load_buckets(package)) as models:
        for length in lengths:
            ids = np.random.default_rng(length).integers(0, 100, (1, length))
            inputs = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
            (tmp_path / str(length)).mkdir()
            dims = ["--dim", "batch_size=1", "--dim", f"sequence_length={length}"]
            alone = compiled(tmp_path / str(length), path, *dims)
            with TensorModels(device, load_buckets(alone)) as single:
                want = single.run(inputs)["last_hidden_state"]
            got = models.run(inputs, dims={"sequence_length": length})["last_hidden_state"]
            assert np.array_equal(got, want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bucket", "length=3,length=4"], "'length' is given twice"),
        (["--bucket", "length"], "'length' is not NAME=VALUE"),
        (["--bucket", "batch=1,length=3", "--bucket", "batch=1,length=3"], "two buckets are named"),
        (["--bucket", "batch=1"], "--dim length=N"),
        (["--graph", "linear.onnx;size:x=3"], "is none of dim:NAME=N"),
        (["--graph", ";dim:length=3"], "names no file"),
        (["--bucket", "batch=1,length=3", "--graph", "no.onnx"], "no.onnx: it is no ONNX model"),
    ],
)
def test_wrong_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    path, out = linear(tmp_path, "linear"), tmp_path / "x.vxm"
    assert main(["compile", str(path), str(out), *options]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_options_of_a_source_need_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = linear(tmp_path, "linear")
    graph = ["--graph", f"{path};shape:x=1x3x8"]
    assert main(["compile", str(tmp_path / "x.vxm"), *graph, "--dim", "batch=1"]) == 2
    assert "a --graph has its own" in capsys.readouterr().err
    assert main(["compile", str(tmp_path / "x.vxm"), *graph, "--list-dims"]) == 0
    assert capsys.readouterr().out == "batch: x[0]\nlength: x[1]\n"


@pytest.mark.gpu
def test_dims_bind_a_source_at_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = linear(tmp_path, "linear")
    np.save(tmp_path / "x.npy", np.ones((1, 3, 8), np.float32))
    options = ["--input", f"x={tmp_path / 'x.npy'}", "--output", str(tmp_path / "o")]
    assert main(["run", str(path), *options, "--dim", "length=3"]) == 0
    assert main(["run", str(path), *options, "--dim", "length=4"]) == 2
    assert "axis 1 is 3, elsewhere 4" in capsys.readouterr().err
    assert main(["run", str(path), *options, "--dim", "rows=4"]) == 2
    assert "no such dim" in capsys.readouterr().err


def test_pick_names_the_dims(tmp_path: Path) -> None:
    package = compiled(tmp_path, str(linear(tmp_path, "linear")), "--bucket", "batch=1,length=3")
    with pytest.raises(UsageError, match="--dim rows: no such dim; there are: batch, length"):
        pick(load_buckets(package), {"x": (1, 3, 8)}, dims={"rows": 3})
