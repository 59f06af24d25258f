"""Every export is raised whole, to the graph that the directory of the same weights gives."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hornito.compiler import build_graph, source_support
from hornito.graph.graph import Graph
from hornito.graph.reference import ReferenceState, evaluate
from hornito.graph.weights import load_all
from hornito.importers import Source, open_source
from onnx_samples import NAMES, QUANTISED, checkpoint, expected, unpack

pytest.importorskip("onnx")

#: Nodes a layer after passes may have (Gemma's extra norms and Qwen 3's head norms included).
LAYER_BUDGET = {"qwen3": 16, "gemma2": 18, "gemma3_text": 18}


@pytest.fixture(scope="module", params=NAMES)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = unpack(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, path, open_source(path)


def graph_of(source: Source) -> Graph:
    """The graph before passes."""
    if source.builder is not None:
        return source.builder("fp32")
    module = importlib.import_module(f"hornito.models.{source.model_type}")
    graph: Graph = module.build(source.config, source.tensors, "fp32")
    return graph


def plain(graph: Graph) -> dict[str, Any]:
    """The graph's JSON without the names of what each node covers."""
    data = graph.to_json()
    for node in data["nodes"]:
        del node["covers"]
    data["weights"] = dict(sorted(data["weights"].items()))
    return data


def without_dropped_facts(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """The directory's graph less what this exporter lost or rounded."""
    for node in data["nodes"]:
        attrs = node["attrs"]
        if name == "gemma2-tiny-pos" and node["op"] == "attention":
            attrs["softcap"] = 0.0
        if name == "phi3-longrope" and node["op"] == "rope":
            del attrs["original_max"]
            attrs["scale"] = float(np.float32(attrs["scale"]))
        if name == "gemma3-tiny-genai" and node["op"] == "embedding":
            attrs["scale"] = 6.93
    if name == "phi3-longrope":
        table = data["weights"]["rope.inv_freq"]
        table["shape"] = table["shape"][1:]
    return data


def test_equals_the_directory_node_for_node(named: tuple[str, Path, Source]) -> None:
    name, _, source = named
    theirs = open_source(checkpoint(name))
    ours, reference = graph_of(source), graph_of(theirs)
    assert plain(ours) == without_dropped_facts(name, plain(reference))
    assert source.model_type == theirs.model_type
    if name in QUANTISED:
        return
    for weight, found in ours.weights.items():
        got, want = (load_all(g.weights[weight].data) for g in (ours, reference))  # type: ignore[arg-type]
        if name == "phi3-longrope" and weight == "rope.inv_freq":
            want = want[0]  # the short factors
        np.testing.assert_allclose(got, want, rtol=2e-7, atol=0, err_msg=weight)
        assert found.dtype == reference.weights[weight].dtype


def test_every_node_is_covered(named: tuple[str, Path, Source]) -> None:
    _, path, source = named
    report = source_support(path)
    summary = report["summary"]
    assert summary["source_nodes"] == len(source.nodes) == len(report["source_nodes"])
    assert summary["raised"] + summary["folded"] == summary["source_nodes"]
    assert summary["unsupported"] == 0 and summary["coverage"] == 1.0
    for row in report["source_nodes"]:
        assert (row["backend"] == "vulkan") == bool(row["raised_into"])
        assert row["raised_into"] or row["reason"].startswith("folded at import: ")
    raised_ops = {row["op"] for row in report["source_nodes"] if row["raised_into"]}
    assert not raised_ops & {"Constant", "Shape"}
    config, kinds = source.config, report["memory"]["kv"]
    assert sum(kind["layers"] for kind in kinds) == config["num_hidden_layers"]
    per_layer = 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    assert all(k["bytes_per_position_fp32"] == k["layers"] * per_layer for k in kinds)
    assert report["memory"]["weights"] > 0
    budget = LAYER_BUDGET.get(source.model_type, 14)
    assert 4 <= summary["graph_nodes_per_layer"] <= budget
    assert summary["graph_nodes"] / source.config["num_hidden_layers"] <= budget
    assert summary["graph_nodes_before_passes"] > summary["graph_nodes"]


def test_the_reference_evaluator_gives_the_golden(named: tuple[str, Path, Source]) -> None:
    """Teacher-forced along the golden's tokens, after passes."""
    name, _, source = named
    golden = expected(name)
    graph, _, _ = build_graph(source, "fp32")
    ids = np.array(golden.prompt + golden.tokens[:-1])
    rows = np.arange(len(ids))
    weights = {k: load_all(w.data) for k, w in graph.weights.items() if w.data is not None}
    inputs = {"ids": ids, "positions": rows, "selection": rows}
    logits = evaluate(graph, inputs, weights, ReferenceState(context=64))[graph.outputs[0]]
    count = len(golden.prompt)
    assert golden.error(logits[:count]) <= golden.tolerance
    assert logits[count - 1 :].argmax(-1).tolist() == golden.tokens


def test_patterns_are_told(tmp_path: Path) -> None:
    source = open_source(unpack("gemma3-tiny", tmp_path))
    assert source.patterns["attention with a window"] == 6
    assert source.patterns["attention"] == 1
    assert source.patterns["RMS norm of each head"] == 7  # of q; k has one head
    assert source.patterns["NaN guard"] == 7
    assert source.patterns["RoPE"] == 14
