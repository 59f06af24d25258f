"""`hornito compare` and `--backend cpu` on the command line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import load_file, save_file

from gguf_samples import HF
from hornito.cli.main import main
from hornito.ops.base import Lowering
from hornito.plan.selftest import exempt
from hornito.vk.device import open_device
from tensor.models import bert_golden, bert_tiny, model, save
from tiny import golden

LLAMA = str(HF / "llama-tiny")
IDS = ",".join(map(str, golden("llama-tiny").prompt))
DECODER = ["compare", LLAMA, "--ids", IDS, "--context", "256", "--precision", "high"]
DIMS = ["--dim", "batch_size=1", "--dim", "sequence_length=16"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(bert_tiny(), tmp_path, "bert.onnx")


def halved(monkeypatch: pytest.MonkeyPatch, stem: str) -> None:
    """Launch a kernel with half its grid."""
    right = Lowering.emit

    def wrong(self: Lowering, node: Any, kernel: str, *args: Any, **keywords: Any) -> None:
        push, values, (x, y, z) = args
        x = max(1, x // 2) if kernel.startswith(stem) else x
        right(self, node, kernel, push, values, (x, y, z), **keywords)

    monkeypatch.setattr(Lowering, "emit", wrong)


@pytest.mark.gpu
def test_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DECODER, "--ref", "cpu"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[1] == "against cpu (fp16 weights): 28 tokens, the last 4 of them decoded"
    order = [line.split()[0] for line in lines if line.startswith(("embedding", "layer", "logits"))]
    assert order[0] == "embedding" and order[-1] == "logits" and "layer2.cache.keys" in order
    assert lines[-1] == "EQUAL within relative error 0.001, cosine 0.999"
    assert "layer0.q_rope" in out and "DIFFERS" not in out


@pytest.mark.gpu
def test_differs_and_the_guilty_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with open_device(os.environ.get("HORNITO_DEVICE")) as device:
        if not exempt(device.caps):
            pytest.skip("the self-test of this device drops wrong kernels")
    halved(monkeypatch, "linear/words.gated")
    dump = ["--dump", "layer0.mlp.gated", str(tmp_path / "out")]
    assert main([*DECODER, "--ref", "cpu", "--bisect", "--json", *dump]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["equal"] is False and found["runs"][0]["steps"][0]["relative"] is None
    assert found["first_divergence"]["value"] == "layer0.mlp.gated"
    assert found["first_divergence"]["relative"] is None  # NaN where the kernel left something out
    (guilty,) = found["bisect"]["culprits"]
    assert guilty.startswith("kernel linear/words.gated")
    assert np.isnan(np.load(tmp_path / "out/layer0.mlp.gated.step.npy")).any()
    assert np.isfinite(np.load(tmp_path / "out/layer0.mlp.gated.reference.npy")).all()

    assert main([*DECODER, "--ref", "cpu", "--bisect", "--summary"]) == 1
    out = capsys.readouterr().out
    first = next(line for line in out.splitlines() if line.startswith("first divergence: "))
    assert first.startswith("first divergence: layer0.mlp.gated, made by gated_linear (")
    assert "linear/words.gated" in first
    assert out.splitlines()[-1].startswith("guilty: kernel linear/words.gated")


def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--backend", "cpu", "--bisect"]
    assert main([*DECODER, "--ref", LLAMA, *options]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "nothing differs: nobody to blame"
    assert "--backend cpu: the numpy reference evaluator runs this, not the GPU" in err


@pytest.mark.parametrize("place", ["self_attn.o_proj", "self_attn.k_proj"])
def test_two_rows_that_change_places_show_whatever_rounding_hides(
    place: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In 4 bits every value lies within its tolerance still; the weight itself does not."""
    clean, other = HF / "qwen2-tiny", Path(shutil.copytree(HF / "qwen2-tiny", tmp_path / "other"))
    tensors = load_file(clean / "model.safetensors")
    rows = tensors[f"model.layers.1.{place}.weight"]
    rows[[1, 5]] = rows[[5, 1]]
    save_file(tensors, other / "model.safetensors")
    sides = ["compare", str(clean), "--weights", "int4", "--ref-weights", "fp32"]
    options = ["--ids", "1,2,3,4", "--steps", "1", "--context", "64", "--backend", "cpu"]
    assert main([*sides, "--ref", str(clean), *options, "--summary"]) == 0
    assert "compared, 0 differ; relative 1." in capsys.readouterr().out

    assert main([*sides, "--ref", str(other), *options, "--json", "--bisect"]) == 1
    found = json.loads(capsys.readouterr().out)
    joined = "layer1.attention.qkv.weight", 64 + 1
    name, row = joined if "k_proj" in place else (f"model.layers.1.{place}.weight", 1)
    assert (found["first_divergence"]["value"], found["first_divergence"]["first"]) == (name, row)
    assert [w["value"] for w in found["stored_weights"] if not w["equal"]] == [name]
    assert all(value["equal"] for run in found["runs"] for value in run["values"])
    assert name in found["bisect"]["verdict"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--ref"),
        (["--ref", "cpu", "text"], "give one of PROMPT and --ids"),
        (["--ref", "cpu", "--dump", "nothing*", "out"], "--dump 'nothing*' matches none of"),
        (["--ref", "cpu", "--fp32-tensors", "x.*"], "--fp32-tensors 'x.*' matches none of"),
        (["--ref", "cpu", "--disable-pass", "fuse"], "no pass named fuse"),
        (["--ref", "cpu", "--tolerance", "-1"], "--tolerance must be a number from 0"),
        (["--ref", "cpu", "--input", "a=b.npy"], "are for models of tensors"),
        (["--ref", "nowhere.gguf"], "nowhere.gguf"),
        (["--ref", "cpu", "--backend", "cuda"], "'cuda' is none of vulkan, cpu"),
    ],
)
def test_wrong_options(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    backend = [] if "--backend" in options else ["--backend", "cpu"]
    assert main([*DECODER, *backend, *options]) == 2
    assert message in capsys.readouterr().err


# -- models of tensors --------------------------------------------------------------------------


@pytest.mark.gpu
def test_tensors(bert: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", bert_golden()["input_ids"])
    given = ["--input", f"input_ids={tmp_path / 'ids.npy'}", *DIMS]
    dump = ["--dump", "*", str(tmp_path / "out")]
    assert main(["compare", str(bert), "--ref", "cpu", *given, *dump, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["equal"] and len(found["values"]) > 50
    assert found["inputs"]["input_ids"] == "given" and "attention_mask is made up" in err
    assert len(found["dumped"]) == 2 * len(found["values"])

    package = tmp_path / "bert.vxm"
    assert main(["compile", str(bert), str(package), *DIMS]) == 0
    assert main(["compare", str(package), "--ref", str(bert), *DIMS]) == 0
    assert "output last_hidden_state" in capsys.readouterr().out


def test_a_bucket_is_chosen_by_its_dims(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "bert.vxm"
    buckets = ["--bucket", "sequence_length=16", "--bucket", "sequence_length=8"]
    assert main(["compile", str(bert), str(package), "--dim", "batch_size=1", *buckets]) == 0
    compare = ["compare", str(package), "--backend", "cpu", "--summary"]
    assert main([*compare, "--ref", str(bert), *DIMS]) == 0
    assert main([*compare, "--ref", "cpu", "--dim", "sequence_length=8"]) == 0
    np.save(tmp_path / "ids.npy", np.ones((1, 16), np.int64))
    assert main([*compare, "--ref", "cpu", "--input", f"input_ids={tmp_path / 'ids.npy'}"]) == 0
    capsys.readouterr()
    assert main([*compare, "--ref", "cpu"]) == 2
    assert "choose one with --bucket: " in capsys.readouterr().err


@pytest.mark.gpu
def test_tensors_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for scale in (1.0, 1.1):
        node = helper.make_node("Mul", ["x", "scale"], ["out"])
        constants = {"scale": np.array([1.0, scale, 1.0], np.float32)}
        proto = model([node], {"x": (TensorProto.FLOAT, [2, 3])}, constants)
        files.append(str(save(proto, tmp_path, f"{scale}.onnx")))
    assert main(["compare", files[0], "--ref", "cpu"]) == 0
    capsys.readouterr()
    assert main(["compare", files[0], "--ref", files[1]]) == 1
    assert "first divergence: output out" in capsys.readouterr().out


def test_tensors_take_no_prompt(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(bert), "--ref", "cpu", *DIMS, "--bisect"]) == 2
    assert "it takes no --bisect" in capsys.readouterr().err
    assert main(["compare", str(bert), "--ref", "cpu", *DIMS, "--precision", "low"]) == 2
    assert "--precision low is for decoders" in capsys.readouterr().err


# -- run --backend cpu --------------------------------------------------------------------------


def test_run_on_the_evaluator(capsys: pytest.CaptureFixture[str]) -> None:
    expected = golden("llama-tiny").tokens[:6]
    options = ["--backend", "cpu", "--weights", "fp32", "--max-tokens", "6", "--ignore-eos"]
    assert main(["run", LLAMA, "--ids", IDS, *options]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == ",".join(map(str, expected))
    assert "not the GPU: slow, and for comparison only" in err
    assert "the answer was cut at 6 tokens; --max-tokens 12 allows more" in err
    assert main(["run", LLAMA, "--ids", IDS, *options, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["token_ids"] == expected and "cut" not in err


def test_run_tensors_on_the_evaluator(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = {name: bert_golden()[name] for name in ("input_ids", "attention_mask")}
    arrays["token_type_ids"] = np.zeros_like(arrays["input_ids"])
    options = []
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        options += ["--input", f"{name}={tmp_path / name}.npy"]
    out = tmp_path / "out"
    assert main(["run", str(bert), *options, "--output", str(out), "--backend", "cpu"]) == 0
    found = np.load(out / "last_hidden_state.npy")
    np.testing.assert_allclose(found[0], bert_golden()["last_hidden_state"], atol=1e-5)
    assert "numpy" in capsys.readouterr().err
    low = ["--output", str(out), "--precision", "low"]
    assert main(["run", str(bert), *options, *low]) == 2
    assert "--precision low is for decoders" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--temp", "0.7"], ["--stop", "x"], ["--logprobs", "2"]])
def test_the_evaluator_is_greedy(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", LLAMA, "--ids", IDS, "--backend", "cpu", *options]) == 2
    assert f"most likely tokens, and no {options[0]}" in capsys.readouterr().err


def test_a_chat_needs_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["run", LLAMA, "--backend", "cpu"]) == 2
    assert "--backend cpu needs a prompt" in capsys.readouterr().err
