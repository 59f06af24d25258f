"""Facts that exporters drop come back from a config.json beside the file, and are reported; and
what else of a directory is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hornito.errors import UnsupportedError, UsageError
from hornito.graph.weights import load_all
from hornito.importers import Source, open_source
from hornito.models import phi3
from onnx_decoder import DIM, HEADS, KV_HEADS, MS, Decoder, random_ids, run_graph, run_runtime, save
from onnx_samples import checkpoint, expected, unpack


def graph_of(source: Source) -> Any:
    assert source.builder is not None
    return source.builder("fp32")


def beside(name: str, folder: Path, **changes: Any) -> Source:
    """The export with its checkpoint's config.json (changed) beside it."""
    unpack(name, folder, "model.onnx")
    config = json.loads((checkpoint(name) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return open_source(folder)


def test_the_cap_on_scores_of_gemma2(tmp_path: Path) -> None:
    source = beside("gemma2-tiny-pos", tmp_path)
    attentions = [n for n in graph_of(source) if n.op == "attention"]
    assert [n.attr("softcap") for n in attentions] == [50.0] * 4
    assert any("capped at 50" in w and "restored in 4 layers" in w for w in source.warnings)
    # Logits are those of the model's definition, not of the file.
    with np.load(checkpoint("gemma2-tiny-pos") / "golden.npz") as golden:
        got = run_graph(graph_of(source), golden["prompt"].tolist())
        assert np.abs(got - golden["prefill_logits"]).max() < 1e-4
    lost = expected("gemma2-tiny-pos")
    assert lost.error(got) > 1e-3


def test_both_sets_of_longrope(tmp_path: Path) -> None:
    source = beside("phi3-longrope", tmp_path)
    graph = graph_of(source)
    theirs = open_source(checkpoint("phi3-longrope"))
    reference = phi3.build(theirs.config, theirs.tensors, "fp32")
    assert [(n.op, n.name, n.inputs, dict(n.attrs)) for n in graph] == [
        (n.op, n.name, n.inputs, dict(n.attrs)) for n in reference
    ]
    np.testing.assert_array_equal(
        load_all(graph.weights["rope.inv_freq"].data),
        load_all(reference.weights["rope.inv_freq"].data),  # type: ignore[arg-type]
    )
    assert any("froze the short factors; both sets are restored" in w for w in source.warnings)


def test_factors_of_neither_set_are_kept(tmp_path: Path) -> None:
    scaling = json.loads((checkpoint("phi3-longrope") / "config.json").read_text())["rope_scaling"]
    other = {**scaling, "short_factor": [3.0] * len(scaling["short_factor"])}
    source = beside("phi3-longrope", tmp_path, rope_scaling=other)
    assert graph_of(source).shape("rope.inv_freq") == (8,)
    assert any("of neither of its sets; kept the file's" in w for w in source.warnings)


def test_a_config_that_contradicts_the_file_is_reported(tmp_path: Path) -> None:
    source = beside("mistral-tiny", tmp_path, num_hidden_layers=3, sliding_window=20)
    assert any("num_hidden_layers is 3, but the file has 2" in w for w in source.warnings)
    assert source.config["num_hidden_layers"] == 2
    assert {n.attr("window") for n in graph_of(source) if n.op == "attention"} == {16}


def test_config_generation_and_tokenizer_come_from_the_directory(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    unpack("llama-tiny", folder / "onnx", "model.onnx")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(checkpoint("llama-tiny") / name, folder)
    config = json.loads((folder / "config.json").read_text())
    for source in (open_source(folder), open_source(folder / "onnx" / "model.onnx")):
        assert source.config["max_position_embeddings"] == config["max_position_embeddings"]
        assert source.generation_config == json.loads(
            (folder / "generation_config.json").read_text()
        )
        assert source.eos_ids == open_source(checkpoint("llama-tiny")).eos_ids
        assert not any("context is unknown" in w for w in source.warnings)


def test_genai_config_names_file_and_context(tmp_path: Path) -> None:
    unpack("qwen2-tiny-genai-int4", tmp_path)
    unpack("gpt2-tiny", tmp_path)
    with pytest.raises(UnsupportedError, match="several ONNX files"):
        open_source(tmp_path)
    facts = {
        "type": "qwen2",
        "context_length": 512,
        "eos_token_id": [2, 7],
        "decoder": {"filename": "qwen2-tiny-genai-int4.onnx"},
    }
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": facts}))
    source = open_source(tmp_path)
    assert source.model_type == "qwen2" and source.config["max_position_embeddings"] == 512
    assert source.eos_ids == (2, 7)


def test_a_directory_with_safetensors_is_imported_from_them(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("gpt2-tiny"), tmp_path / "model"))
    unpack("gpt2-tiny", folder, "model.onnx")
    assert open_source(folder).format == "safetensors"
    assert open_source(folder / "model.onnx").format == "onnx"


def test_a_text_file_is_no_onnx(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_text("hello, this is text")
    with pytest.raises((UsageError, Exception), match="not an ONNX"):
        open_source(tmp_path / "a.onnx")


def tables_by_length(d: Decoder) -> tuple[str, str, list[np.ndarray[Any, Any]]]:
    """GenAI's longrope: both tables in an If on the total length."""
    index = np.arange(0, DIM, 2) / DIM
    sets = [10000.0**-index / f for f in (1.0, np.linspace(2, 4, DIM // 2))]
    branches = []
    for which, inv in zip(("small", "large"), sets, strict=True):
        angle = np.arange(64)[:, None] * inv[None]
        names = [f"{which}_cos", f"{which}_sin"]
        values = [(1.2 * f(angle)).astype(np.float32) for f in (np.cos, np.sin)]
        nodes = [
            helper.make_node("Constant", [], [n], value=numpy_helper.from_array(v), name=n)
            for n, v in zip(names, values, strict=True)
        ]
        infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [64, DIM // 2]) for n in names]
        branches.append(helper.make_graph(nodes, which, [], infos))
    total = d.op("Gather", [d.op("Shape", ["attention_mask"]), d.scalar(1)], axis=0)
    longer = d.op("Greater", [total, d.scalar(32)])
    d.op(
        "If",
        [longer],
        outputs=["cos", "sin"],
        then_branch=branches[1],
        else_branch=branches[0],
    )
    return "cos", "sin", sets


def test_tables_that_an_if_chooses_by_length(tmp_path: Path) -> None:
    d = Decoder(seed=21)
    x, _, q, k, v = d.start()
    past = d.past()
    cos, sin, sets = tables_by_length(d)
    y = d.op(
        "GroupQueryAttention",
        [q, k, v, *past, *d.lengths(), cos, sin],
        outputs=["attended", "present.0.key", "present.0.value"],
        domain=MS,
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        do_rotary=1,
    )
    d.finish(x, y)
    model = d.build()
    graph = graph_of(open_source(save(model, tmp_path / "model.onnx")))
    ropes = [n for n in graph if n.op == "rope"]
    assert {n.attr("original_max") for n in ropes} == {32}
    assert [n.attr("scale") for n in ropes] == pytest.approx([1.2, 1.2], abs=1e-6)
    found = load_all(graph.weights["rope.inv_freq"].data)
    np.testing.assert_allclose(found, np.stack(sets), rtol=1e-5)
    for count, context in ((20, 32), (40, 64)):
        ids = random_ids(count)
        want = run_runtime(model, ids, [count])
        np.testing.assert_allclose(run_graph(graph, ids, context), want, rtol=0, atol=5e-4)


def test_an_fp16_file_is_turned_in_fp32(tmp_path: Path) -> None:
    """Angles of far positions: the file's own arithmetic is wrong there, Hornito's is not."""
    source = open_source(unpack("qwen2-tiny-q4f16", tmp_path))
    graph = graph_of(source)
    index = np.arange(8) / 8
    np.testing.assert_array_equal(
        load_all(graph.weights["rope.inv_freq"].data),
        (source_theta() ** -index).astype(np.float32),
    )
    assert {n.attr("eps") for n in graph if n.op == "rms_norm"} == {1e-6}
    assert {n.attr("scale") for n in graph if n.op == "attention"} == {0.25}


def source_theta() -> float:
    config = json.loads((checkpoint("qwen2-tiny") / "config.json").read_text())
    return float(config["rope_theta"])


def test_a_clip_that_only_keeps_fp16_from_overflowing(tmp_path: Path) -> None:
    model = onnx.load(str(unpack("qwen2-tiny-dyn18", tmp_path)))
    (add,) = (n for n in model.graph.node if n.output[0] == "add_395")
    add.output[0] = "before_clip"
    low, high = (
        numpy_helper.from_array(np.float32(v), n) for v, n in ((-65504, "lo"), (65504, "hi"))
    )
    model.graph.initializer.extend([low, high])
    clip = helper.make_node("Clip", ["before_clip", "lo", "hi"], ["add_395"], name="clip")
    model.graph.node.append(clip)
    graph = graph_of(open_source(save(model, tmp_path / "clipped.onnx")))
    whole = graph_of(open_source(tmp_path / "qwen2-tiny-dyn18.onnx"))
    assert [(n.op, n.name, n.inputs) for n in graph] == [(n.op, n.name, n.inputs) for n in whole]
    assert any("clip" in n.covers for n in graph)
    high.CopyFrom(numpy_helper.from_array(np.float32(6.0), "hi"))
    model.graph.initializer[-1].CopyFrom(high)
    with pytest.raises(UnsupportedError, match=r"clip \(Clip\)"):
        open_source(save(model, tmp_path / "clipped.onnx"))


def test_a_cap_on_scores_that_is_spelled_out(tmp_path: Path) -> None:
    """Eager exports of Gemma 2: `cap * tanh(scores / cap)` before the mask."""
    model = onnx.load(str(unpack("gemma2-tiny-pos", tmp_path)))
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        model.graph.node.append(node)
        if node.op_type == "MatMul" and node.name.endswith("/self_attn/MatMul"):
            name, whole = node.name, node.output[0]
            model.graph.node[-1].output[0] = f"{name}/raw"
            model.graph.node.extend(
                [
                    helper.make_node(
                        "Div", [f"{name}/raw", "cap"], [f"{name}/d"], name=f"{name}/d"
                    ),
                    helper.make_node("Tanh", [f"{name}/d"], [f"{name}/t"], name=f"{name}/t"),
                    helper.make_node("Mul", [f"{name}/t", "cap"], [whole], name=f"{name}/m"),
                ]
            )
    model.graph.initializer.append(numpy_helper.from_array(np.float32(50.0), "cap"))
    source = open_source(save(model, tmp_path / "capped.onnx"))
    attentions = [n for n in graph_of(source) if n.op == "attention"]
    assert [n.attr("softcap") for n in attentions] == [50.0] * 4
    assert [n.attr("scale") for n in attentions] == [24**-0.5] * 4
    with np.load(checkpoint("gemma2-tiny-pos") / "golden.npz") as golden:
        got = run_graph(graph_of(source), golden["prompt"].tolist())
        assert np.abs(got - golden["prefill_logits"]).max() < 1e-4


@pytest.mark.parametrize("way", ["gather", "slice"])
def test_a_head_of_the_last_row_only(tmp_path: Path, way: str) -> None:
    model = onnx.load(str(unpack("qwen2-tiny-dyn18", tmp_path)))
    whole = graph_of(open_source(tmp_path / "qwen2-tiny-dyn18.onnx"))
    (head,) = (n for n in model.graph.node if "logits" in n.output)
    x, head.input[0] = head.input[0], "last"
    for name, value in (("m1", [-1]), ("end", [1 << 62]), ("axis", [1])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    if way == "gather":
        model.graph.node.append(helper.make_node("Gather", [x, "m1"], ["last"], axis=1, name="l"))
    else:
        inputs = [x, "m1", "end", "axis"]
        model.graph.node.append(helper.make_node("Slice", inputs, ["last"], name="l"))
    graph = graph_of(open_source(save(model, tmp_path / "last.onnx")))
    assert [(n.op, n.name, n.inputs) for n in graph] == [(n.op, n.name, n.inputs) for n in whole]


def test_a_change_of_external_data_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hornito.compiler import compile_cached

    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    path = unpack("gemma3-tiny-genai", tmp_path / "model")
    first = compile_cached(path, "fp16")
    assert compile_cached(path, "fp16") == first
    data = path.with_name("gemma3-tiny-genai.onnx.data")
    data.write_bytes(data.read_bytes() + b"\0")
    assert compile_cached(path, "fp16") != first
