"""Passes: the meaning stays, each one alone and all together; what must not match does not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graph import small_llama
from hornito.errors import UsageError
from hornito.graph.graph import Graph
from hornito.graph.passes import ORDER, modules, pass_names, run_passes

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    {"num_key_value_heads": 4, "hidden_act": "gelu_pytorch_tanh"},
    {"num_key_value_heads": 1, "head_dim": 12, "num_hidden_layers": 1},
)

# What the passes that a llama needs make of two layers: ops that appear and ops that vanish.
EFFECTS: dict[str, tuple[dict[str, int], set[str]]] = {
    "select_in_norm": ({}, {"select_rows"}),
    "merge_qkv": ({"rope_append": 2}, {"rope", "kv_append"}),
    "merge_gate_up": ({"gated_linear": 2}, {"gated_activation"}),
    "residual_in_linear": ({}, {"add"}),
    "norm_in_linear": ({}, set()),
}


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph)


def all_but(*names: str) -> list[str]:
    return [name for name in ORDER if name not in names]


def same_logits(graph: Graph, expected: list[Any]) -> None:
    for found, wanted in zip(small_llama.logits(graph), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_order_names_every_module() -> None:
    assert sorted(ORDER) == sorted(modules())
    assert pass_names() == ORDER
    assert set(EFFECTS) <= set(ORDER)


@pytest.mark.parametrize("name", sorted(set(ORDER) - set(EFFECTS)))
def test_passes_of_other_families_leave_a_llama_alone(name: str) -> None:
    graph = small_llama.build()
    nodes = list(graph.nodes)
    (report,) = (r for r in run_passes(graph, all_but(name)) if r.name == name)
    assert report.matched == () and graph.nodes == nodes


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("name", sorted(EFFECTS))
def test_each_pass_alone(name: str, changes: dict[str, Any]) -> None:
    graph = small_llama.build(**changes)
    before, expected = ops(graph), small_llama.logits(graph)
    covered = {tensor for node in graph for tensor in node.covers}
    reports = run_passes(graph, all_but(name))
    same_logits(graph, expected)
    made, gone = EFFECTS[name]
    layers = small_llama.config(**changes)["num_hidden_layers"]
    for op, count in made.items():
        assert ops(graph)[op] == count * layers // 2
    for op in gone:
        assert ops(graph)[op] == 0 and before[op] > 0
    assert {tensor for node in graph for tensor in node.covers} == covered
    for report in reports:
        if report.name != name:
            assert report.matched is None
        else:
            assert report.matched is not None
            assert set(report.matched) <= {node.name for node in graph}
            per_layer = {"select_in_norm": 0, "residual_in_linear": 2, "norm_in_linear": 0}
            # Alone, the norms are read by several projections each, the last one by the head.
            fewest = 0 if name == "norm_in_linear" else 1
            assert len(report.matched) == (per_layer.get(name, 1) * layers or fewest)


@pytest.mark.parametrize("changes", VARIANTS)
def test_all_passes(changes: dict[str, Any]) -> None:
    graph = small_llama.build(**changes)
    expected = small_llama.logits(graph)
    run_passes(graph)
    same_logits(graph, expected)
    layers = small_llama.config(**changes)["num_hidden_layers"]
    assert ops(graph) == {
        "embedding": 1,
        "rms_norm": 1,
        "linear": 2 * layers,
        "qkv_append": layers,
        "attention": layers,
        "gated_linear": layers,
        "head": 1,
    }


def test_norms_go_into_the_linear_that_reads_them_alone() -> None:
    """After the merges a norm has one reader; without them it has several, and is left alone."""
    graph = small_llama.build()
    expected = small_llama.logits(graph)
    reports = run_passes(graph, ["append_in_linear"])
    same_logits(graph, expected)
    matched = {r.name: r.matched for r in reports}["norm_in_linear"]
    assert matched is not None and len(matched) == 4
    normed = [node for node in graph if "eps" in node.attrs and node.op != "rms_norm"]
    assert Counter(node.op for node in normed) == {"linear": 2, "gated_linear": 2}
    assert ops(graph)["rope_append"] == 2


@pytest.mark.parametrize("name", sorted(EFFECTS))
def test_a_disabled_pass_leaves_the_twin(name: str) -> None:
    graph = small_llama.build()
    before, expected = ops(graph), small_llama.logits(graph)
    run_passes(graph, [name])
    same_logits(graph, expected)
    for op in EFFECTS[name][1]:
        assert ops(graph)[op] == before[op]
    for op in EFFECTS[name][0]:
        assert ops(graph)[op] == 0


def test_all_disabled_changes_nothing() -> None:
    graph = small_llama.build()
    nodes = list(graph.nodes)
    assert all(report.matched is None for report in run_passes(graph, ORDER))
    assert graph.nodes == nodes


def test_running_twice_finds_nothing_more() -> None:
    graph = small_llama.build()
    run_passes(graph)
    nodes = list(graph.nodes)
    assert all(report.matched == () for report in run_passes(graph))
    assert graph.nodes == nodes


def test_unknown_pass() -> None:
    with pytest.raises(UsageError, match=r"no pass named fuse_all; there are: .*merge_qkv"):
        run_passes(small_llama.build(), ["fuse_all", "merge_qkv"])


def test_stacked_weights_keep_their_numbers() -> None:
    graph = small_llama.build(attention_bias=True)
    plain = small_llama.weights(graph)
    run_passes(graph)
    fused = small_llama.weights(graph)
    layer = "model.layers.0.self_attn"
    for kind in ("weight", "bias"):
        parts = [plain[f"{layer}.{p}_proj.{kind}"] for p in "qkv"]
        assert np.array_equal(fused[f"layer0.attention.qkv.{kind}"], np.concatenate(parts))
    # Rows across the borders of the parts, as the package writer reads them.
    data = graph.weights["layer0.attention.qkv.weight"].data
    assert data is not None
    whole = fused["layer0.attention.qkv.weight"]
    for start, stop in ((30, 34), (0, 64), (31, 49), (63, 64)):
        assert np.array_equal(data.rows(start, stop), whole[start:stop])
    assert set(data.source_names) == {f"{layer}.{p}_proj.weight" for p in "qkv"}
    # Gate and up rows lie in turn, and so do their biases; any range of rows can be read.
    data = graph.weights["layer1.mlp.gated.gate_up.weight"].data
    assert data is not None
    gate, up = (plain[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up"))
    both = np.stack([gate, up], axis=1).reshape(2 * len(gate), -1)
    for start, stop in ((0, 112), (1, 2), (2, 5), (3, 8), (111, 112), (4, 4)):
        assert np.array_equal(data.rows(start, stop), both[start:stop])
    assert not any("q_proj" in name or "gate_proj" in name for name in graph.weights)


def node_index(graph: Graph, name: str) -> int:
    return next(i for i, node in enumerate(graph.nodes) if node.name == name)


def edit(graph: Graph, name: str, **changes: Any) -> None:
    i = node_index(graph, name)
    graph.nodes[i] = replace(graph.nodes[i], **changes)


def test_values_that_others_read_are_not_fused() -> None:
    """A graph output, or a second reader, keeps a value alive."""
    graph = small_llama.build(num_hidden_layers=1)
    graph.outputs += ["layer0.q", "layer0.mlp.gate", "layer0.o", "selected"]
    run_passes(graph)
    assert ops(graph)["rope_append"] == 0 and ops(graph)["gated_linear"] == 0
    assert ops(graph)["select_rows"] == 1
    assert ops(graph)["add"] == 1, "only the MLP's sum could be fused"
    for name in graph.outputs:
        assert name in graph.values


def test_a_weight_shared_by_two_linears_is_not_stacked() -> None:
    graph = small_llama.build(num_hidden_layers=1)
    gate = graph.nodes[node_index(graph, "layer0.mlp.gate")]
    edit(graph, "layer0.mlp.up", inputs=gate.inputs)
    expected = small_llama.logits(graph)
    run_passes(graph)
    assert ops(graph)["gated_linear"] == 0
    same_logits(graph, expected)


def test_a_bias_on_one_of_three_is_not_stacked() -> None:
    graph = small_llama.build(num_hidden_layers=1, attention_bias=True)
    q = graph.nodes[node_index(graph, "layer0.q")]
    edit(graph, "layer0.q", inputs=(*q.inputs[:2], "", ""))
    expected = small_llama.logits(graph)
    run_passes(graph)
    assert ops(graph)["rope_append"] == 0
    same_logits(graph, expected)


def test_different_storage_types_are_not_stacked() -> None:
    graph = small_llama.build(num_hidden_layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    graph.weights[name] = replace(graph.weights[name], dtype="fp16")
    run_passes(graph)
    assert ops(graph)["gated_linear"] == 0


def test_different_rotations_are_not_merged() -> None:
    for key, value in (("scale", 2.0),):
        graph = small_llama.build(num_hidden_layers=1)
        rope = graph.nodes[node_index(graph, "layer0.k_rope")]
        edit(graph, "layer0.k_rope", attrs={**rope.attrs, key: value})
        expected = small_llama.logits(graph)
        run_passes(graph)
        assert ops(graph)["rope_append"] == 0
        same_logits(graph, expected)


def test_a_sum_of_a_value_with_itself_is_not_a_residual() -> None:
    graph = small_llama.build(num_hidden_layers=1)
    edit(graph, "layer0.attention_sum", inputs=("layer0.o", "layer0.o"))
    expected = small_llama.logits(graph)
    run_passes(graph)
    assert ops(graph)["add"] == 1
    same_logits(graph, expected)


def test_a_residual_is_added_in_either_order() -> None:
    graph = small_llama.build(num_hidden_layers=1)
    a, b = graph.nodes[node_index(graph, "layer0.mlp_sum")].inputs
    edit(graph, "layer0.mlp_sum", inputs=(b, a))
    expected = small_llama.logits(graph)
    run_passes(graph)
    assert ops(graph)["add"] == 0
    same_logits(graph, expected)
