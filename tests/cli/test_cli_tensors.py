"""`hornito compile`, `check` and `run` on ONNX models that are no decoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from hornito.cli.main import main
from onnx_samples import checkpoint, unpack
from tensor.models import bert_golden, bert_tiny, model, save

DIMS = ["--dim", "batch_size=1", "--dim", "sequence_length=16"]


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(bert_tiny(), tmp_path, "bert.onnx")


@pytest.fixture
def arrays(tmp_path: Path) -> list[str]:
    """Options of BERT's inputs."""
    golden = bert_golden()
    inputs = {
        "input_ids": golden["input_ids"],
        "attention_mask": golden["attention_mask"],
        "token_type_ids": np.zeros_like(golden["input_ids"]),
    }
    options = []
    for name, array in inputs.items():
        np.save(tmp_path / f"{name}.npy", array)
        options += ["--input", f"{name}={tmp_path / name}.npy"]
    return options


def test_dims_are_listed(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", str(bert), "--list-dims"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "batch_size: input_ids[0], attention_mask[0], token_type_ids[0]",
        "sequence_length: input_ids[1], attention_mask[1], token_type_ids[1]",
    ]


def test_dims_of_a_decoder_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = unpack("qwen2-tiny", tmp_path)
    assert main(["compile", str(path), "--list-dims"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[:2] == [
        "batch_size: " + ", ".join(_places(0)),
        "sequence_length: input_ids[1], position_ids[1]",
    ]
    assert "none needs a number" in err
    assert main(["compile", str(path), str(tmp_path / "x.vxm"), "--dim", "batch_size=1"]) == 2
    assert "need no --dim" in capsys.readouterr().err
    assert main(["compile", str(checkpoint("qwen2-tiny")), "--list-dims"]) == 2
    assert "is no ONNX model" in capsys.readouterr().err


def _places(axis: int) -> list[str]:
    caches = [f"past_key_values.{i}.{part}" for i in range(3) for part in ("key", "value")]
    names = ["input_ids", "attention_mask", "position_ids", *caches]
    return [f"{name}[{axis}]" for name in names]


def test_free_dims_are_named(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bert.vxm"
    assert main(["compile", str(bert), str(out), "--dim", "batch_size=1"]) == 2
    assert "--dim sequence_length=N" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dim", "batch_size"], "'batch_size' is not NAME=VALUE"),
        (["--dim", "batch_size=x"], "'x' is no number"),
        (["--shape", "input_ids=1,2"], "'1,2' is not of the form 1x128"),
        (["--dim", "rows=2"], "no such dim; there are: batch_size, sequence_length"),
        (["--shape", "ids=1x2"], "no input named 'ids'; there are: input_ids"),
        (["--value", "input_ids=nowhere.npy"], "can't read nowhere.npy"),
        ([], "OUT.vxm is missing"),
    ],
)
def test_wrong_options(
    bert: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    out = [str(bert.with_name("x.vxm"))] if options else []
    assert main(["compile", str(bert), *out, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_decoder_without_a_cache_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(bert_tiny(), tmp_path, "decoder_with_past_model.onnx")
    assert main(["compile", str(path), str(tmp_path / "x.vxm")]) == 2
    assert "past" in capsys.readouterr().err


def test_check_names_every_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["a"], name="first"),
        helper.make_node("LpPool", ["x"], ["b"], name="second", kernel_shape=[2]),
        helper.make_node("Add", ["a", "b"], ["out"]),
    ]
    path = save(model(nodes, {"x": (TensorProto.FLOAT, [3, 3])}), tmp_path)
    assert main(["check", str(path)]) == 2
    out = capsys.readouterr().out
    assert "UNSUPPORTED" in out and "first (Det)" in out and "second (LpPool)" in out


def test_compile_and_check(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "bert.vxm", tmp_path / "report.json"
    options = [*DIMS, "--json", "--support-report", str(report)]
    assert main(["compile", str(bert), str(out), *options]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed["buckets"][0]["outputs"] == {"last_hidden_state": ["float32", [1, 16, 48]]}
    for file in (out, report):
        assert main(["check", str(file)]) == 0
        assert "208 nodes of the source" in capsys.readouterr().out
    assert main(["check", str(bert), *DIMS]) == 0


@pytest.mark.gpu
def test_run_a_package_and_its_source(
    bert: Path, arrays: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "bert.vxm"
    assert main(["compile", str(bert), str(package), *DIMS]) == 0
    golden = bert_golden()["last_hidden_state"]
    for source in (package, bert):
        folder = tmp_path / f"out-{source.suffix[1:]}"
        assert main(["run", str(source), *arrays, "--output", str(folder), "--json"]) == 0
        result = np.load(folder / "last_hidden_state.npy")
        assert np.abs(result[0] - golden).max() < 1e-4


@pytest.mark.gpu
def test_a_text_prompt_is_refused(
    bert: Path, arrays: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "bert.vxm"
    assert main(["compile", str(bert), str(package), *DIMS]) == 0
    assert main(["run", str(package), "hello"]) == 2
    assert "--input NAME=FILE.npy --output DIR" in capsys.readouterr().err
    assert main(["run", str(package), "hello", *arrays, "--output", "x"]) == 2
    assert "take no prompt" in capsys.readouterr().err
    assert main(["run", str(package), *arrays]) == 2
    assert "--output DIR is missing" in capsys.readouterr().err
