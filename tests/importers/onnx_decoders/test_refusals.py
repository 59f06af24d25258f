"""What can't be raised is refused by name, all of it at once; what is malformed says where."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx
from onnx import TensorProto, helper, numpy_helper

from hornito.cli.main import main
from hornito.errors import FormatError, UnsupportedError, UsageError
from hornito.importers import open_source
from hornito.support import UnsupportedNodesError
from onnx_decoder import save
from onnx_samples import unpack


def load(name: str, folder: Path) -> onnx.ModelProto:
    return onnx.load(str(unpack(name, folder)))


def test_every_unsupported_node_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load("qwen2-tiny", tmp_path)
    changed = []
    for node in model.graph.node:
        if node.op_type == "Sigmoid":
            node.op_type = "HardSigmoid"
            changed.append(node.name)
    path = save(model, tmp_path / "changed.onnx")
    with pytest.raises(UnsupportedNodesError) as caught:
        open_source(path)
    assert [p.node for p in caught.value.problems] == changed and len(changed) == 3
    assert {p.reason for p in caught.value.problems} == {"the op HardSigmoid is not supported"}
    assert main(["check", str(path)]) == 2
    out = capsys.readouterr().out
    assert out.startswith(f"UNSUPPORTED: {path}\n") and all(name in out for name in changed)
    assert main(["check", str(path), "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "UNSUPPORTED" and report["summary"]["unsupported"] == 3
    assert [row["backend"] for row in report["source_nodes"]] == ["none"] * 3
    assert main(["compile", str(path), str(tmp_path / "out.vxm")]) == 2
    assert not (tmp_path / "out.vxm").exists()


def test_an_activation_without_kernel_is_named(tmp_path: Path) -> None:
    model = load("gemma3-tiny-dyn23", tmp_path)
    for node in model.graph.node:
        if node.op_type == "Gelu":
            del node.attribute[:]
    with pytest.raises(
        UnsupportedNodesError, match="no kernel for the activation 'gelu'"
    ) as caught:
        open_source(save(model, tmp_path / "changed.onnx"))
    assert len(caught.value.problems) == 7


def test_check_of_supported_sources_packages_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, package, report = unpack("gpt2-tiny", tmp_path), tmp_path / "m.vxm", tmp_path / "r.json"
    assert main(["compile", str(path), str(package), "--support-report", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "source nodes: 540, 121 of them run on Vulkan, 419 folded" in printed
    assert "raised to 31 nodes, 18 after passes (7 a layer)" in printed
    for file in (path, package, report):
        assert main(["check", str(file)]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"SUPPORTED: {file}\n540 nodes of the source: 121 run on Vulkan")
    data = json.loads(report.read_text())
    data["support"]["source_nodes"][0].update(backend="cpu", reason="")
    report.write_text(json.dumps(data))
    assert main(["check", str(report)]) == 2
    assert main(["check", str(tmp_path / "nothing")]) == 2
    report.write_text("[1")
    assert main(["check", str(report)]) == 2
    report.write_text('{"a": 1}')
    assert main(["check", str(report)]) == 2


def test_a_package_that_names_no_package_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "onnx":
            raise ImportError("No module named 'onnx'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"pip install 'hornito\[onnx\]'"):
        open_source(unpack("gpt2-tiny", tmp_path))


@pytest.mark.parametrize(("version", "supported"), [(12, False), (25, False), (17, True)])
def test_opsets(tmp_path: Path, version: int, supported: bool) -> None:
    model = load("gpt2-tiny", tmp_path)
    model.opset_import[0].version = version
    path = save(model, tmp_path / "changed.onnx")
    if supported:
        assert open_source(path).model_type == "gpt2"
        return
    with pytest.raises(UnsupportedError, match=f"opset {version}; supported are 13 to 24"):
        open_source(path)


def test_inputs_that_make_it_no_decoder(tmp_path: Path) -> None:
    model = load("gpt2-tiny", tmp_path)
    for name, message in (
        ("inputs_embeds", "takes inputs_embeds instead of input_ids, and the file"),
        ("pixels", "no input named input_ids: not a decoder. Inputs: pixels"),
    ):
        old, model.graph.input[0].name = model.graph.input[0].name, name
        for node in model.graph.node:
            node.input[:] = [name if i == old else i for i in node.input]
        with pytest.raises(UnsupportedError, match=message):
            open_source(save(model, tmp_path / "changed.onnx"))
    other = load("qwen2-tiny", tmp_path)
    other.graph.input.append(helper.make_tensor_value_info("encoder_hidden_states", 1, None))
    with pytest.raises(UnsupportedError, match="cross-attention"):
        open_source(save(other, tmp_path / "changed.onnx"))


def test_new_keys_in_front_of_the_cached_ones_are_refused(tmp_path: Path) -> None:
    model = load("qwen2-tiny", tmp_path)
    for node in model.graph.node:
        if "past_key_values.1.key" in node.input and node.op_type == "Concat":
            node.input[:] = [node.input[1], node.input[0]]
    with pytest.raises(UnsupportedError, match=r"layers\.1/self_attn/Concat_5 \(Concat\)"):
        open_source(save(model, tmp_path / "changed.onnx"))


def test_layers_that_swap_their_caches_are_refused(tmp_path: Path) -> None:
    """Present of layer 0 given out as that of layer 1 would break the next step."""
    model = load("qwen2-tiny", tmp_path)
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "past_key_values.0.value":
                node.input[i] = "past_key_values.1.value"
    with pytest.raises(
        UnsupportedError, match="attention reads key of layer 0 and value of layer 1"
    ):
        open_source(save(model, tmp_path / "changed.onnx"))


@pytest.mark.parametrize("other", ["present.0.value", "present.1.key"])
def test_outputs_that_swap_their_caches_are_refused(tmp_path: Path, other: str) -> None:
    """The next call would read keys as values, or those of another layer."""
    model = load("qwen2-tiny", tmp_path)
    swapped = {"present.0.key": other, other: "present.0.key"}
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [swapped.get(name, name) for name in names]
    with pytest.raises(UnsupportedError, match=r"output present.* is what past_key_values"):
        open_source(save(model, tmp_path / "changed.onnx"))


@pytest.mark.parametrize(
    ("op", "numbers", "message"),
    [
        ("Mul", np.float32(0.5), "no plain product"),
        ("Add", np.linspace(-1, 1, 512, dtype=np.float32), "a head with a bias"),
    ],
)
def test_a_node_behind_the_logits_is_named(
    op: str, numbers: Any, message: str, tmp_path: Path
) -> None:
    model = load("qwen2-tiny", tmp_path)
    for node in model.graph.node:
        node.output[:] = ["before" if n == "logits" else n for n in node.output]
    model.graph.initializer.append(numpy_helper.from_array(numbers, "numbers"))
    model.graph.node.append(helper.make_node(op, ["before", "numbers"], ["logits"], name="last"))
    with pytest.raises(UnsupportedError, match=rf"logits of node last \({op}\): {message}"):
        open_source(save(model, tmp_path / "changed.onnx"))


def test_logits_by_another_name_behind_the_caches(tmp_path: Path) -> None:
    model = load("qwen2-tiny", tmp_path)
    for node in model.graph.node:
        node.output[:] = ["scores" if n == "logits" else n for n in node.output]
    logits, *caches = model.graph.output
    logits.name = "scores"
    moved = [*caches, logits]
    del model.graph.output[:]
    model.graph.output.extend(moved)
    source = open_source(save(model, tmp_path / "changed.onnx"))
    assert source.builder is not None and len(source.builder("fp32").outputs) == 1


def test_an_output_of_scaled_keys_is_refused(tmp_path: Path) -> None:
    model = load("qwen2-tiny", tmp_path)
    node = next(n for n in model.graph.node if "present.0.key" in n.output)
    node.output[0] = "joined"
    for reader in model.graph.node:
        reader.input[:] = ["joined" if n == "present.0.key" else n for n in reader.input]
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1.5), "factor"))
    model.graph.node.append(helper.make_node("Mul", ["joined", "factor"], ["present.0.key"]))
    with pytest.raises(UnsupportedError, match=r"present\.0\.key, .* is scaled"):
        open_source(save(model, tmp_path / "changed.onnx"))


def test_nodes_out_of_order_are_sorted(tmp_path: Path) -> None:
    model = load("qwen2-tiny-dyn18", tmp_path)
    whole = open_source(tmp_path / "qwen2-tiny-dyn18.onnx")
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    shuffled = open_source(save(model, tmp_path / "changed.onnx"))
    assert whole.builder is not None and shuffled.builder is not None
    a, b = whole.builder("fp32").to_json(), shuffled.builder("fp32").to_json()
    for graph in (a, b):
        for node in graph["nodes"]:
            node["covers"] = sorted(node["covers"])
    assert a == b


def test_functions_are_inlined(tmp_path: Path) -> None:
    """The gate's SiLU as a model-local function."""
    model = load("qwen2-tiny-dyn18", tmp_path)
    whole = open_source(tmp_path / "qwen2-tiny-dyn18.onnx")
    silu = helper.make_function(
        "local",
        "Silu",
        ["x"],
        ["y"],
        [
            helper.make_node("Sigmoid", ["x"], ["s"], name="s"),
            helper.make_node("Mul", ["x", "s"], ["y"], name="m"),
        ],
        [helper.make_opsetid("", 18)],
    )
    model.functions.append(silu)
    model.opset_import.append(helper.make_opsetid("local", 1))
    gone = []
    for node in model.graph.node:
        if node.op_type == "Sigmoid":
            gone.append(node)
        elif node.op_type == "Mul" and gone and gone[-1].output[0] in node.input:
            node.op_type, node.domain = "Silu", "local"
            node.input[:] = list(gone[-1].input)
    for node in gone:
        model.graph.node.remove(node)
    other = open_source(save(model, tmp_path / "changed.onnx"))
    assert whole.builder is not None and other.builder is not None
    a, b = whole.builder("fp32"), other.builder("fp32")
    assert [(n.op, n.name, n.inputs) for n in a] == [(n.op, n.name, n.inputs) for n in b]
    assert len(other.nodes) == len(whole.nodes) - 3
    covers = {name for node in b for name in node.covers}
    assert all(n.folded or n.name in covers for n in other.nodes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cycle", "the graph has a cycle"),
        ("unknown", "reads 'nowhere', which nothing makes"),
        ("twice", "two nodes make the value"),
        ("shape", "bad shape"),
        ("short", "takes 131072 bytes, its data has 131071"),
        ("type", "type STRING is not supported"),
        ("empty", "no graph"),
    ],
)
def test_malformed_files(tmp_path: Path, change: str, message: str) -> None:
    model = load("qwen2-tiny", tmp_path)
    nodes, tensor = model.graph.node, model.graph.initializer[0]
    if change == "cycle":
        nodes[0].input[0] = nodes[4].output[0]
    elif change == "unknown":
        nodes[3].input[0] = "nowhere"
    elif change == "twice":
        nodes[3].output[0] = nodes[1].output[0]
    elif change == "shape":
        tensor.dims[0] = -512
    elif change == "short":
        tensor.raw_data = tensor.raw_data[:-1]
    elif change == "type":
        tensor.data_type = TensorProto.STRING
    else:
        del nodes[:]
    with pytest.raises((FormatError, UnsupportedError), match=message):
        open_source(save(model, tmp_path / "changed.onnx"))


def test_values_outside_of_raw_data(tmp_path: Path) -> None:
    """float_data, int32_data of fp16 and bf16, and int64_data hold the same numbers."""
    model = load("qwen2-tiny", tmp_path)
    whole = open_source(tmp_path / "qwen2-tiny.onnx")
    for i, tensor in enumerate(model.graph.initializer):
        array = numpy_helper.to_array(tensor)
        if array.dtype != np.float32:
            continue
        kind = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)[i % 3]
        tensor.CopyFrom(
            helper.make_tensor(tensor.name, kind, array.shape, array.astype(np.float64).ravel())
        )
        if i % 2 and kind == TensorProto.BFLOAT16:
            bits = (array.view(np.uint32) >> 16).astype("<u2")
            tensor.ClearField("int32_data")
            tensor.raw_data = bits.tobytes()
    other = open_source(save(model, tmp_path / "changed.onnx"))
    assert whole.builder is not None and other.builder is not None
    a, b = whole.builder("fp32"), other.builder("fp32")
    for name, weight in a.weights.items():
        first, second = weight.data, b.weights[name].data
        assert first is not None and second is not None
        np.testing.assert_array_equal(
            first.rows(0, weight.shape[0]), second.rows(0, weight.shape[0]), err_msg=name
        )
