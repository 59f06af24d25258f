"""Pins (`--fp32-tensors`) on names that fusion removed."""

from __future__ import annotations

import logging

import pytest

from gguf_samples import HF
from hornito.compiler import build_graph
from hornito.errors import UsageError
from hornito.graph.graph import Graph
from hornito.importers import open_source
from hornito.plan.pins import pinned_nodes


@pytest.fixture(scope="module")
def graph() -> Graph:
    """After passes, as a package has it."""
    built, _, _ = build_graph(open_source(HF / "llama3-tiny"), "fp16")
    return Graph.from_json(built.to_json())


@pytest.mark.parametrize(
    ("pattern", "nodes"),
    [
        ("layer0.q", ["layer0.attention.qkv"]),
        ("layer1.mlp.gate", ["layer1.mlp.gated"]),
        ("layer0.mlp.down", ["layer0.mlp_sum"]),
        ("model.layers.1.self_attn.v_proj.weight", ["layer1.attention.qkv"]),
    ],
)
def test_a_value_that_fusion_removed_pins_what_took_it_in(
    graph: Graph, pattern: str, nodes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hornito"):
        assert pinned_nodes(graph, [pattern], "normal") == nodes
    assert caplog.messages == [
        f"{pattern} is part of {', '.join(nodes)}, which keeps fp32 operands as a whole"
    ]


def test_names_that_exist_need_no_words(graph: Graph, caplog: pytest.LogCaptureFixture) -> None:
    assert pinned_nodes(graph, ["layer0.mlp.gated"], "normal") == [
        "layer0.mlp.gated",
        "layer0.mlp_sum",
    ]
    assert pinned_nodes(graph, ["layer?.attention.qkv.weight"], "normal") == [
        "layer0.attention.qkv",
        "layer1.attention.qkv",
    ]
    assert caplog.messages == []
    with pytest.raises(UsageError, match="'nothing' matches none"):
        pinned_nodes(graph, ["nothing"], "normal")


def test_low_has_one_form_of_storage(graph: Graph) -> None:
    assert pinned_nodes(graph, [], "low") == []
    with pytest.raises(UsageError, match="--fp32-tensors does not go with precision low"):
        pinned_nodes(graph, ["layer0.mlp.gated"], "low")
