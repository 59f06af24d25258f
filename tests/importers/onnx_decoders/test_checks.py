"""Faults that others met with exported decoders, each named by its row of the check list."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx
from onnx import TensorProto, helper, numpy_helper

from hornito.cli.main import main
from hornito.compiler import build_graph, compile_source, source_support
from hornito.errors import FormatError, UnsupportedError
from hornito.graph.graph import Graph
from hornito.graph.weights import load_all
from hornito.importers import open_source
from hornito.importers.source import SourceNode
from hornito.package import open_package
from onnx_decoder import run_graph, save
from onnx_samples import checkpoint, expected, unpack

PROMPT = expected("qwen2-tiny").prompt


def load(name: str, folder: Path) -> onnx.ModelProto:
    return onnx.load(str(unpack(name, folder)))


def raised(path: Path) -> Graph:
    source = open_source(path)
    assert source.builder is not None
    return source.builder("fp32")


def spelled(graph: Graph) -> list[Any]:
    """The graph less what its nodes cover."""
    return [(n.op, n.name, n.inputs, dict(n.attrs)) for n in graph]


def same_graph(a: Graph, b: Graph) -> None:
    """Node for node and weight for weight."""
    assert spelled(a) == spelled(b)
    for name, weight in a.weights.items():
        other = b.weights[name]
        assert weight.data is not None and other.data is not None
        np.testing.assert_array_equal(load_all(weight.data), load_all(other.data), err_msg=name)


def drop_input(model: onnx.ModelProto, name: str) -> None:
    (found,) = (i for i in model.graph.input if i.name == name)
    model.graph.input.remove(found)


def put_first(model: onnx.ModelProto, nodes: list[Any]) -> None:
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *rest])


def constant(name: str, *values: int, scalar: bool = False) -> Any:
    array = np.array(values[0] if scalar else values, np.int64)
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))


# -- A1 -------------------------------------------------------------------------------------


def positions_from_the_past(model: onnx.ModelProto) -> None:
    """position_ids as Range(past length, past length + rows)."""
    drop_input(model, "position_ids")
    put_first(
        model,
        [
            helper.make_node("Shape", ["past_key_values.0.key"], ["p_s"], start=2, end=3),
            helper.make_node("Shape", ["input_ids"], ["p_n"], start=1, end=2),
            helper.make_node("Squeeze", ["p_s"], ["p_first"]),
            helper.make_node("Squeeze", ["p_n"], ["p_rows"]),
            helper.make_node("Add", ["p_first", "p_rows"], ["p_last"]),
            constant("p_one", 1, scalar=True),
            helper.make_node("Range", ["p_first", "p_last", "p_one"], ["p_range"]),
            constant("p_axis", 0),
            helper.make_node("Unsqueeze", ["p_range", "p_axis"], ["position_ids"]),
        ],
    )


def positions_from_the_mask(model: onnx.ModelProto) -> None:
    """position_ids as the last entries of CumSum(attention_mask) - 1, 1 where it is not set."""
    drop_input(model, "position_ids")
    put_first(
        model,
        [
            constant("p_axis", 1, scalar=True),
            constant("p_one", 1, scalar=True),
            helper.make_node("CumSum", ["attention_mask", "p_axis"], ["p_sum"]),
            helper.make_node("Sub", ["p_sum", "p_one"], ["p_all"]),
            constant("p_zero", 0, scalar=True),
            helper.make_node("Equal", ["attention_mask", "p_zero"], ["p_unset"]),
            helper.make_node("Where", ["p_unset", "p_one", "p_all"], ["p_filled"]),
            helper.make_node("Shape", ["input_ids"], ["p_n"], start=1, end=2),
            helper.make_node("Neg", ["p_n"], ["p_from"]),
            constant("p_end", (1 << 63) - 1),
            constant("p_axes", 1),
            helper.make_node("Slice", ["p_filled", "p_from", "p_end", "p_axes"], ["position_ids"]),
        ],
    )


@pytest.mark.parametrize("rewrite", [positions_from_the_past, positions_from_the_mask])
def test_a1_positions_come_from_any_source(tmp_path: Path, rewrite: Any) -> None:
    model = load("qwen2-tiny", tmp_path)
    whole = raised(tmp_path / "qwen2-tiny.onnx")
    rewrite(model)
    same_graph(raised(save(model, tmp_path / "other.onnx")), whole)


def test_a1_positions_that_ignore_the_past_are_refused(tmp_path: Path) -> None:
    model = load("qwen2-tiny", tmp_path)
    positions_from_the_past(model)
    for node in model.graph.node:
        if node.output[0] == "p_range":
            node.input[0], node.input[1] = "p_nothing", "p_rows"
    put_first(model, [constant("p_nothing", 0, scalar=True)])
    with pytest.raises(UnsupportedError, match="positions that start at 0, not after the past"):
        open_source(save(model, tmp_path / "other.onnx"))


# -- A2 -------------------------------------------------------------------------------------


def without_past(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same decoder for a first call: its past is empty."""
    model = copy.deepcopy(model)
    for i in [i for i in model.graph.input if i.name.startswith("past_key_values")]:
        model.graph.input.remove(i)
        sizes = [d.dim_value for d in i.type.tensor_type.shape.dim]
        empty = np.zeros((1, sizes[1], 0, sizes[3]), np.float32)
        model.graph.initializer.append(numpy_helper.from_array(empty, i.name))
    return model


def merged(model: onnx.ModelProto) -> onnx.ModelProto:
    """Both decoders under an If of use_cache_branch, as optimum merges them."""
    first = without_past(model)
    branches = []
    for part, prefix in ((model, "with/"), (first, "without/")):
        names = {o.name: prefix + o.name for o in model.graph.output}
        graph = helper.make_graph(
            list(copy.deepcopy(part.graph.node)),
            prefix,
            [],
            [helper.make_tensor_value_info(names[o.name], 1, None) for o in model.graph.output],
            list(copy.deepcopy(part.graph.initializer)),
        )
        for node in graph.node:
            for values in (node.input, node.output):
                values[:] = [names.get(v, v) for v in values]
        branches.append(graph)
    outer = helper.make_graph(
        [
            helper.make_node(
                "If",
                ["use_cache_branch"],
                [o.name for o in model.graph.output],
                name="optimum::if",
                then_branch=branches[0],
                else_branch=branches[1],
            )
        ],
        "merged",
        [
            *model.graph.input,
            helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]),
        ],
        list(model.graph.output),
    )
    result = helper.make_model(outer, opset_imports=model.opset_import)
    result.ir_version = model.ir_version
    return result


def test_a2_single_pair_and_merged_files_are_one_graph(tmp_path: Path) -> None:
    model = load("llama-tiny", tmp_path / "single")
    whole = raised(tmp_path / "single")
    pair = tmp_path / "pair"
    save(model, pair / "decoder_with_past_model.onnx")
    save(without_past(model), pair / "decoder_model.onnx")
    save(merged(model), tmp_path / "merged" / "decoder_model_merged.onnx")
    same_graph(raised(pair), whole)
    same_graph(raised(tmp_path / "merged"), whole)
    report = open_source(tmp_path / "merged")
    assert report.patterns["branch resolved"] == 1
    inner = [(n.name or n.output[0], n.op_type) for n in model.graph.node]
    assert [(n.name, n.op) for n in report.nodes] == [
        ("optimum::if", "If"),
        *((f"optimum::if/else_branch/{name}", op) for name, op in inner),
        *((f"optimum::if/then_branch/{name}", op) for name, op in inner),
    ]
    reasons = {n.folded for n in report.nodes if "/else_branch/" in n.name}
    assert reasons == {"in a branch that is not taken"}
    taken = [n for n in report.nodes if "/then_branch/" in n.name]
    assert sum(not n.folded for n in taken) == sum(not n.folded for n in open_source(pair).nodes)


# -- Inputs by role -------------------------------------------------------------------------


def split_embedding(model: onnx.ModelProto, folder: Path, variant: str = "") -> Path:
    """The decoder with inputs_embeds, its table in embed_tokens.onnx beside it."""
    model = copy.deepcopy(model)
    (gather,) = (n for n in model.graph.node if "input_ids" in n.input and n.op_type == "Gather")
    (ids,) = (i for i in model.graph.input if i.name == "input_ids")
    (table,) = (t for t in model.graph.initializer if t.name == gather.input[0])
    embeds = helper.make_tensor_value_info("inputs_embeds", 1, ["b", "n", table.dims[1]])
    graph = helper.make_graph(
        [helper.make_node("Gather", ["w", "input_ids"], ["inputs_embeds"], name="/Gather")],
        "embedding",
        [copy.deepcopy(ids)],
        [embeds],
        [numpy_helper.from_array(numpy_helper.to_array(table), "w")],
    )
    opsets = [helper.make_opsetid("", 18)]
    folder.mkdir(parents=True, exist_ok=True)
    save(helper.make_model(graph, opset_imports=opsets), folder / f"embed_tokens{variant}.onnx")
    old = gather.output[0]
    for node in model.graph.node:
        node.input[:] = ["inputs_embeds" if i in (old, "input_ids") else i for i in node.input]
    model.graph.node.remove(gather)
    model.graph.input.remove(ids)
    model.graph.input.insert(0, embeds)
    return save(model, folder / f"decoder_model_merged{variant}.onnx")


@pytest.mark.parametrize("variant", ["", "_q4"])
def test_embeddings_as_input(tmp_path: Path, variant: str) -> None:
    model = load("llama-tiny", tmp_path / "single")
    path = split_embedding(model, tmp_path / "split", variant)
    same_graph(raised(path), raised(tmp_path / "single"))
    source = open_source(path)
    assert source.nodes[0] == SourceNode(f"embed_tokens{variant}.onnx//Gather", "Gather")
    report = source_support(path)
    assert report["summary"]["coverage"] == 1.0
    assert report["source_nodes"][0]["raised_into"] == ["embedding"]
    if not variant:
        same_graph(raised(tmp_path / "split"), raised(tmp_path / "single"))


def test_embeddings_as_input_without_their_table(tmp_path: Path) -> None:
    path = split_embedding(load("llama-tiny", tmp_path), tmp_path / "split")
    (path.parent / "embed_tokens.onnx").unlink()
    with pytest.raises(UnsupportedError, match=r"is not beside it: embed_tokens\.onnx"):
        open_source(path)
    save(load("llama-tiny", tmp_path), path.parent / "embed_tokens.onnx")
    with pytest.raises(UnsupportedError, match="an embedding of tokens takes input_ids"):
        open_source(path)


def traced_at_one_token(model: onnx.ModelProto) -> onnx.ModelProto:
    """What tracing with one token leaves: no causal comparison, only the attention mask."""
    model = copy.deepcopy(model)
    for node in model.graph.node:
        if node.op_type == "And" and "/model/Cast_5_output_0" in node.input:
            node.input[1] = node.input[0]  # ConstantOfShape(True) twice
    return model


def test_a2_a_mask_traced_at_one_token_is_refused(tmp_path: Path) -> None:
    model = traced_at_one_token(load("qwen2-tiny", tmp_path))
    with pytest.raises(UnsupportedError, match=r"without a causal mask: .*traced with one token"):
        open_source(save(model, tmp_path / "other.onnx"))


def test_a2_the_twin_stands_in_for_a_decoder_traced_at_one_token(tmp_path: Path) -> None:
    model = load("qwen2-tiny", tmp_path / "single")
    whole = raised(tmp_path / "single")
    save(traced_at_one_token(model), tmp_path / "decoder_with_past_model.onnx")
    save(without_past(model), tmp_path / "decoder_model.onnx")
    source = open_source(tmp_path)
    assert source.builder is not None
    same_graph(source.builder("fp32"), whole)
    assert any("decoder_model.onnx was taken" in warning for warning in source.warnings)


def test_a2_a_size_fixed_at_one_row_is_refused(tmp_path: Path) -> None:
    model = load("qwen2-tiny", tmp_path)
    for node in model.graph.node:
        if node.name == "/model/layers.0/self_attn/Reshape":
            node.input[1] = "fixed"
    shape = numpy_helper.from_array(np.array([1, 1, 4, 16]), "fixed")
    model.graph.initializer.append(shape)
    with pytest.raises(UnsupportedError, match="a size was probably fixed when the model was exp"):
        open_source(save(model, tmp_path / "other.onnx"))


# -- A3 -------------------------------------------------------------------------------------


def test_a3_a_decoder_without_past_inputs_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(without_past(load("qwen2-tiny", tmp_path)), tmp_path / "model.onnx")
    with pytest.raises(
        UnsupportedError, match=r"has no past inputs .* although it gives present.0"
    ):
        open_source(path)
    assert main(["compile", str(path), str(tmp_path / "out.vxm")]) == 2
    assert "text-generation-with-past" in capsys.readouterr().err
    assert not (tmp_path / "out.vxm").exists()


# -- A5, A6 ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a5_a_window_does_not_cap_the_context(tmp_path: Path) -> None:
    """gemma3-tiny: a window of 16, a context of 512 in its config."""
    import hornito

    folder = tmp_path / "model"
    unpack("gemma3-tiny", folder, "model.onnx")
    shutil.copy(checkpoint("gemma3-tiny") / "config.json", folder)
    package = tmp_path / "m.vxm"
    compile_source(folder, package)
    with open_package(package) as opened:
        assert opened.manifest.facts["windows"] == [0, 16]
        context = opened.manifest.facts["context_length"]
    stated = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    assert context == stated
    with hornito.load(package, context=stated) as llm:
        assert llm.context == stated
        assert {kind.window for kind in llm.engine.plan.kinds} == {0, 16}


def test_a6_windows_are_the_layers_own(tmp_path: Path) -> None:
    """Five sliding layers to a full one, in every spelling; without them logits past the window
    are others."""
    for name in ("gemma3-tiny", "gemma3-tiny-dyn23", "gemma3-tiny-genai"):
        graph = raised(unpack(name, tmp_path))
        found = [n.attr("window") for n in graph if n.op == "attention"]
        assert found == [16, 16, 16, 16, 16, 0, 16]
    ids = (PROMPT * 2)[:40]
    right = run_graph(graph, ids)
    full = Graph.from_json(graph.to_json())
    for node in full:
        if node.op == "attention":
            node.attrs["window"] = 0  # type: ignore[index]
    full.weights = graph.weights
    wrong = run_graph(full, ids)
    assert np.abs(right[:16] - wrong[:16]).max() == 0
    assert (np.abs(right[16:] - wrong[16:]).max(axis=1) > 1e-3).all()


def test_a6_windows_that_the_export_dropped_are_restored(tmp_path: Path) -> None:
    model = onnx.load(str(unpack("gemma3-tiny-genai", tmp_path)))
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "local_window_size":
                attribute.i = -1
    save(model, tmp_path / "model.onnx")
    graph = raised(tmp_path / "model.onnx")
    assert {n.attr("window") for n in graph if n.op == "attention"} == {0}
    shutil.copy(checkpoint("gemma3-tiny") / "config.json", tmp_path)
    source = open_source(tmp_path / "model.onnx")
    assert source.builder is not None
    found = [n.attr("window") for n in source.builder("fp32") if n.op == "attention"]
    assert found == [16, 16, 16, 16, 16, 0, 16]
    assert any("which the export lost; restored" in warning for warning in source.warnings)


# -- A8 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2-tiny", "gemma3-tiny", "qwen2-tiny-genai-int4"])
def test_a8_a_tied_table_is_stored_once(tmp_path: Path, name: str) -> None:
    """By content: gemma3-tiny holds two copies, the GenAI file one blob in two shapes."""
    path = unpack(name, tmp_path)
    package = tmp_path / "m.vxm"
    compile_source(path, package, weights="fp32")
    with open_package(package) as opened:
        assert "lm_head.weight" not in opened.tensors
        assert opened.manifest.facts["tied_head"] is True
        embedding = opened.tensors["model.embed_tokens.weight"]
        assert embedding.shape == (512, embedding.shape[1])


def test_a8_an_untied_head_is_kept(tmp_path: Path) -> None:
    """Not even one number may differ: gemma3-tiny's second copy is changed in one."""
    model = load("gemma3-tiny", tmp_path)
    (head,) = (n.input[1] for n in model.graph.node if "logits" in n.output)
    (tensor,) = (t for t in model.graph.initializer if t.name == head)
    raw = bytearray(tensor.raw_data)
    raw[-2] ^= 1
    tensor.raw_data = bytes(raw)
    source = open_source(save(model, tmp_path / "model.onnx"))
    graph, _, _ = build_graph(source, "fp32")
    assert "lm_head.weight" in graph.weights and not source.config["tie_word_embeddings"]


def test_a8_head_dim_need_not_be_hidden_over_heads(tmp_path: Path) -> None:
    """qwen3-tiny: 4 heads of 32 in rows of 64."""
    source = open_source(unpack("qwen3-tiny", tmp_path))
    assert source.config["head_dim"] == 32 and source.config["hidden_size"] == 64


# -- A9 -------------------------------------------------------------------------------------


def split_out(model: onnx.ModelProto, folder: Path) -> Path:
    """Matrices in two files at odd offsets, in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"first.bin": bytearray(b"\0" * 7), "second.bin": bytearray(b"\0" * 3)}
    large = [t for t in model.graph.initializer if len(t.raw_data) > 1000]
    for i, tensor in enumerate(large):
        file = ("first.bin", "second.bin")[i % 2]
        raw, at = tensor.raw_data, len(parts[file])
        parts[file] += raw + b"\xff"
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        facts = {"location": file, "offset": str(at), "length": str(len(raw))}
        for key, value in facts.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
    for file, content in parts.items():
        (folder / file).write_bytes(bytes(content))
    return save(model, folder / "model.onnx")


def test_a9_external_data_in_two_files_at_odd_offsets(tmp_path: Path) -> None:
    model = load("qwen2-tiny", tmp_path / "inline")
    path = split_out(model, tmp_path / "external")
    same_graph(raised(path), raised(tmp_path / "inline"))


def test_a9_a_missing_file_is_an_error(tmp_path: Path) -> None:
    path = split_out(load("qwen2-tiny", tmp_path), tmp_path / "external")
    (tmp_path / "external" / "second.bin").unlink()
    with pytest.raises(FormatError, match=r"tensor '.+': .*second\.bin is missing"):
        open_source(path)


def test_a9_a_short_file_is_an_error(tmp_path: Path) -> None:
    path = split_out(load("qwen2-tiny", tmp_path), tmp_path / "external")
    file = tmp_path / "external" / "first.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(FormatError, match=r"tensor '.+': .*first\.bin, which is truncated"):
        open_source(path)


@pytest.mark.parametrize("location", ["../first.bin", "/etc/passwd", "a/../../first.bin", ""])
def test_a9_paths_that_leave_the_directory_are_refused(tmp_path: Path, location: str) -> None:
    path = split_out(load("qwen2-tiny", tmp_path), tmp_path / "external")
    shutil.copy(tmp_path / "external" / "first.bin", tmp_path / "first.bin")
    model = onnx.load(str(path), load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.external_data)
    tensor.external_data[0].value = location
    with pytest.raises(FormatError, match="leaves the model's directory"):
        open_source(save(model, path))


def test_a9_a_name_that_no_file_can_have_is_an_error(tmp_path: Path) -> None:
    path = split_out(load("qwen2-tiny", tmp_path), tmp_path / "external")
    model = onnx.load(str(path), load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.external_data)
    tensor.external_data[0].value = "w" * 5000
    with pytest.raises(FormatError, match="external data: 'wwww"):
        open_source(save(model, path))


def test_a9_stated_lengths_must_be_the_shapes(tmp_path: Path) -> None:
    path = split_out(load("qwen2-tiny", tmp_path), tmp_path / "external")
    model = onnx.load(str(path), load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.external_data)
    tensor.external_data[2].value = "12"
    with pytest.raises(FormatError, match="12 bytes are stated, its shape takes"):
        open_source(save(model, path))
