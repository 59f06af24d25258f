"""Passes on every family's tiny checkpoint: the meaning stays, and each finds what it is for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from graph import small_llama
from hornito.compiler import build_graph
from hornito.graph.graph import Graph
from hornito.graph.passes import ORDER
from hornito.importers import open_source
from hornito.plan.plan import PlanOptions, build_plan
from hornito.vk import api
from hornito.vk.caps import Caps

SOFTWARE = Caps.parse(
    {
        "deviceType": api.VK_PHYSICAL_DEVICE_TYPE_CPU,
        "subgroupSize": 8,
        "subgroupSupportedStages": api.VK_SHADER_STAGE_COMPUTE_BIT,
        "subgroupSupportedOperations": 255,
    }
)
HF = Path(__file__).parent.parent / "data" / "hf"

# How many nodes each pass makes; a pass that is not named finds nothing.
MATCHES: dict[str, dict[str, int]] = {
    "gpt2-tiny": {
        "select_in_norm": 1,
        "merge_qkv": 2,
        "activation_in_linear": 2,
        "residual_in_linear": 4,
        "append_in_linear": 2,
    },
    "gemma2-tiny": {
        "select_in_norm": 1,
        "merge_qkv": 4,
        "merge_gate_up": 4,
        "residual_in_norm": 8,
        "norm_in_linear": 8,
        "append_in_linear": 4,
    },
    "gemma3-tiny": {
        "select_in_norm": 1,
        "merge_qkv": 7,
        "merge_gate_up": 7,
        "residual_in_norm": 14,
        "norm_in_linear": 14,
    },
}
COMMON = ("merge_qkv", "merge_gate_up", "append_in_linear")
NAMES = tuple(
    sorted(path.name for path in HF.iterdir() if path.name.endswith(("-tiny", "-longrope")))
)


def graph_of(name: str, disabled: tuple[str, ...]) -> tuple[Graph, dict[str, int]]:
    """The graph after passes, and the matches of each."""
    graph, _, reports = build_graph(open_source(HF / name), "fp32", disabled)
    return graph, {r.name: len(r.matched) for r in reports if r.matched}


def layers_of(graph: Graph) -> int:
    return sum(node.op == "attention" for node in graph)


@pytest.mark.parametrize("weights", ("fp32", "int4"))
@pytest.mark.parametrize("name", NAMES)
def test_d21_a_plan_has_few_pipelines(name: str, weights: str) -> None:
    """A software device compiles each with LLVM before its first dispatch: seconds, if many."""
    graph, _, _ = build_graph(open_source(HF / name), weights)
    options = PlanOptions(context=256, kv_half=True, slots=16)
    plan = build_plan(graph, SOFTWARE, options)
    pipelines = plan.distinct()
    assert len(pipelines) <= 42 and len({d.kernel for d in pipelines}) <= 20


@pytest.mark.parametrize(
    ("name", "context"), (*((name, 0) for name in NAMES), ("phi3-longrope", 4096))
)
def test_passes_keep_the_meaning(name: str, context: int) -> None:
    plain, matches = graph_of(name, ORDER)
    assert matches == {}
    expected = small_llama.logits(plain, context)
    for disabled in ((), *(tuple(p for p in ORDER if p != one) for one in ORDER)):
        graph, _ = graph_of(name, disabled)
        for found, wanted in zip(small_llama.logits(graph, context), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11, err_msg=str(disabled))


@pytest.mark.parametrize("name", NAMES)
def test_passes_find_what_they_are_for(name: str) -> None:
    graph, matches = graph_of(name, ())
    layers = layers_of(graph)
    common = {pass_name: layers for pass_name in COMMON}
    common |= {"select_in_norm": 1, "residual_in_linear": 2 * layers, "norm_in_linear": 2 * layers}
    if any(node.op == "rope_append" for node in graph):  # its heads have norms
        del common["append_in_linear"]
    assert matches == MATCHES.get(name, common)
    left = Counter(node.op for node in graph)
    for op in ("add", "rope", "kv_append", "select_rows", "gated_activation", "activation"):
        assert left[op] == 0, f"{left[op]} {op} nodes are left"


@pytest.mark.parametrize("name", NAMES)
def test_json_round_trip(name: str) -> None:
    for disabled in ((), ORDER):
        graph, _ = graph_of(name, disabled)
        again = Graph.from_json(graph.to_json())
        assert again.nodes == graph.nodes and again.values == graph.values
