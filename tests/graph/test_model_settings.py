"""Model builders: config settings that they take, refuse by name, or turn into numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gguf_samples import HF, read_config
from hornito.compiler import build_graph, model_facts
from hornito.errors import FormatError, UnsupportedError
from hornito.graph.graph import Graph
from hornito.graph.weights import load_all
from hornito.importers import Source, open_source

FAMILIES = {
    "llama": "llama-tiny",
    "mistral": "mistral-tiny",
    "qwen2": "qwen2-tiny",
    "qwen3": "qwen3-tiny",
    "phi3": "phi3-tiny",
    "smollm3": "smollm3-tiny",
    "gpt2": "gpt2-tiny",
    "gemma2": "gemma2-tiny",
    "gemma3_text": "gemma3-tiny",
}
#: Nodes of a layer at most; what is there now is fewer.
#: What it has; five where norms of whole rows are all there are.
NODES = {"qwen3": 6, "gpt2": 7, "gemma2": 7, "gemma3_text": 8}
BUDGET = {"qwen3": 16, "gemma2": 18, "gemma3_text": 18}


def source(folder: Path, name: str, **changes: Any) -> Source:
    """A tiny checkpoint with other config keys."""
    shutil.copytree(HF / name, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(read_config(name) | changes))
    return open_source(folder)


def graph_of(folder: Path, name: str, **changes: Any) -> Graph:
    return build_graph(source(folder, name, **changes), "fp32")[0]


@pytest.mark.parametrize(("family", "name"), FAMILIES.items())
def test_nodes_of_a_layer(tmp_path: Path, family: str, name: str) -> None:
    graph = graph_of(tmp_path, name)
    layers = sum(node.op == "attention" for node in graph)
    nodes = sum(node.name.startswith("layer") for node in graph)
    assert nodes <= layers * BUDGET.get(family, 14)
    assert nodes == layers * NODES.get(family, 5)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama-tiny", "sliding_window", 128),
        ("llama-tiny", "rope_interleaved", True),
        ("llama-tiny", "partial_rotary_factor", 0.5),
        ("llama-tiny", "logits_scaling", 8.0),
        ("mistral-tiny", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen2-tiny", "use_mrope", True),
        ("qwen3-tiny", "num_experts", 8),
        ("phi3-tiny", "lm_head_bias", True),
        ("smollm3-tiny", "residual_multiplier", 0.2),
        ("gpt2-tiny", "add_cross_attention", True),
        ("gemma2-tiny", "use_bidirectional_attention", True),
        ("gemma3-tiny", "attn_logit_softcapping", 50.0),
        ("gemma3-tiny", "use_bidirectional_attention", True),
    ],
)
def test_settings_that_are_not_handled_are_refused(
    tmp_path: Path, name: str, key: str, value: Any
) -> None:
    with pytest.raises(UnsupportedError, match=f"does not handle for .*{key}="):
        graph_of(tmp_path, name, **{key: value})


def test_neutral_settings_are_nothing(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        "llama-tiny",
        rope_interleaved=False,
        partial_rotary_factor=1.0,
        logit_scale=1.0,
        sliding_window=None,
        num_experts=0,
    )
    assert graph.nodes == graph_of(tmp_path / "plain", "llama-tiny").nodes


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, r"'dynamic' \(NTK\) is not supported"),
        ({"rope_type": "swirl", "factor": 2.0}, "'swirl' is not supported; supported: default"),
        ({"rope_type": "linear", "factor": 2.0, "twist": 3}, "'linear': twist=3"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64,
                "short_mscale": 1.1,
            },
            "'longrope': short_mscale=1.1",
        ),
    ],
)
def test_rope_scalings_that_are_not_handled(
    tmp_path: Path, scaling: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        graph_of(tmp_path, "llama-tiny", rope_scaling=scaling)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "type 'linear' lacks 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "type 'llama3' lacks 'low_freq_factor'"),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 64,
            },
            "high_freq_factor 2.0 is not above low_freq_factor 2.0",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 4},
            "short_factor holds 3 numbers; RoPE over 8 dimensions asks for 4",
        ),
    ],
)
def test_rope_scalings_that_are_incomplete(
    tmp_path: Path, scaling: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        graph_of(tmp_path, "llama-tiny", rope_scaling=scaling)


@pytest.mark.parametrize(("part", "dims"), [(0.01, 0), (9 / 16, 9)])
def test_rope_over_none_or_an_odd_part_of_a_head(tmp_path: Path, part: float, dims: int) -> None:
    with pytest.raises(UnsupportedError, match=f"RoPE over {dims} dimensions"):
        graph_of(tmp_path, "phi3-tiny", partial_rotary_factor=part)


def test_activations_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="hidden_act 'relu2' is not supported"):
        graph_of(tmp_path, "llama-tiny", hidden_act="relu2")
    with pytest.raises(UnsupportedError, match="activation_function 'gelu' is not supported"):
        graph_of(tmp_path / "gpt2", "gpt2-tiny", activation_function="gelu")


def test_windows_by_layer(tmp_path: Path) -> None:
    def windows(graph: Graph) -> list[int]:
        return [node.attr("window") for node in graph if node.op == "attention"]

    assert windows(graph_of(tmp_path / "a", "gemma3-tiny")) == [16] * 5 + [0, 16]
    assert windows(graph_of(tmp_path / "b", "gemma2-tiny")) == [16, 0, 16, 0]
    assert windows(graph_of(tmp_path / "c", "mistral-tiny")) == [16, 16]
    assert windows(graph_of(tmp_path / "d", "mistral-tiny", sliding_window=None)) == [0, 0]
    assert windows(graph_of(tmp_path / "e", "qwen2-tiny")) == [0, 0, 0]
    kinds = ["sliding_attention"] * 3
    with pytest.raises(FormatError, match="there is no sliding_window"):
        graph_of(tmp_path / "f", "qwen2-tiny", layer_types=kinds)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_scales_of_gpt2(tmp_path: Path, by_layer: bool, scaled: bool) -> None:
    graph = graph_of(
        tmp_path,
        "gpt2-tiny",
        scale_attn_weights=scaled,
        scale_attn_by_inverse_layer_idx=by_layer,
    )
    scales = [node.attr("scale") for node in graph if node.op == "attention"]
    base = 12**-0.5 if scaled else 1.0
    assert scales == pytest.approx([base, base / 2 if by_layer else base])


def test_scales_and_caps_of_gemma(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, "gemma2-tiny")
    nodes = {node.op: node for node in graph}
    assert nodes["embedding"].attr("scale") == 8.0
    assert nodes["attention"].attr("softcap") == 50.0
    assert nodes["attention"].attr("scale") == pytest.approx(24**-0.5)
    assert nodes["head"].attr("softcap") == 30.0
    graph = graph_of(
        tmp_path / "plain", "gemma2-tiny", attn_logit_softcapping=None, final_logit_softcapping=None
    )
    nodes = {node.op: node for node in graph}
    assert nodes["attention"].attr("softcap") == 0.0 and "softcap" not in nodes["head"].attrs


def frequencies(graph: Graph, name: str = "rope.inv_freq") -> npt.NDArray[np.float32]:
    data = graph.weights[name].data
    assert data is not None
    return load_all(data)


def test_bases_of_gemma3(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, "gemma3-tiny")
    for name, base in (("rope.inv_freq", 1e6), ("rope.local_inv_freq", 1e4)):
        expected = base ** -(np.arange(8) / 8)
        np.testing.assert_allclose(frequencies(graph, name), expected, rtol=1e-7)
    for node in graph:
        if node.op == "rope_append":
            full = node.attr("layer") == 5
            assert node.inputs[2] == ("rope.inv_freq" if full else "rope.local_inv_freq")


def test_facts_state_the_longrope_rule(tmp_path: Path) -> None:
    given = source(tmp_path, "phi3-longrope")
    facts = model_facts(given, build_graph(given, "fp32")[0])
    assert facts["rope_short_up_to"] == 32
    given = source(tmp_path / "plain", "phi3-tiny")
    assert model_facts(given, build_graph(given, "fp32")[0])["rope_short_up_to"] is None


SCALINGS: tuple[Mapping[str, Any], ...] = (
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 4.0},
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    },
    {
        "rope_type": "longrope",
        "factor": 16.0,
        "short_factor": [1.0 + 0.05 * i for i in range(16)],
        "long_factor": [1.5 + 0.4 * i for i in range(16)],
    },
)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
def test_frequencies_are_those_of_transformers(tmp_path: Path, scaling: dict[str, Any]) -> None:
    """qwen3-tiny has heads of 32: sixteen frequencies."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = read_config("qwen3-tiny") | {"rope_scaling": dict(scaling)}
    theirs = transformers.AutoConfig.for_model(**config)
    rule = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    graph = graph_of(tmp_path, "qwen3-tiny", rope_scaling=dict(scaling))
    turns = [node for node in graph if node.op == "rope_append"]
    ours = frequencies(graph)
    sets = ours if ours.ndim == 2 else ours[None]
    for row, length in zip(sets, (1, 10_000), strict=False):
        inv, factor = rule(theirs, "cpu", seq_len=length)
        np.testing.assert_allclose(row, inv.numpy(), rtol=1e-6)
        for node in turns:
            assert node.attr("scale") == pytest.approx(factor, rel=1e-12)


YARN = (
    1,
    0.34262842,
    0.11114246,
    0.032807872,
    0.0079056947,
    0.0033338037,
    0.0014058533,
    0.00059284345,
    0.00025000001,
    0.00010542412,
    4.4456985e-05,
    1.8747356e-05,
    7.9056936e-06,
    3.3338035e-06,
    1.4058534e-06,
    5.9284343e-07,
)


def test_yarn_in_numbers(tmp_path: Path) -> None:
    """Held without transformers, too: its own values, rounded."""
    graph = graph_of(tmp_path, "qwen3-tiny", rope_scaling=dict(SCALINGS[2]))
    np.testing.assert_allclose(frequencies(graph), YARN, rtol=2e-6)
    scale = next(node.attr("scale") for node in graph if node.op == "rope_append")
    assert scale == pytest.approx(1.1386294, abs=1e-7)
