"""Graphs: building, type rules, JSON, and symbolic dimensions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graph import small_llama
from hornito.errors import FormatError, UnsupportedError
from hornito.graph.graph import CACHE, FLOAT, INT, Graph, Node, Weight
from hornito.graph.passes import run_passes
from hornito.graph.reference import ReferenceState, evaluate
from hornito.graph.shapes import S, T


def tiny() -> Graph:
    graph = Graph()
    graph.add_input("x", FLOAT, (T, 8))
    graph.add_input("selection", INT, (S,))
    graph.add_weight("w", Weight((6, 8), "fp16", matrix=True))
    graph.add("linear", "y", ["x", "w", "", ""])
    graph.add("add", "z", ["y", "y"])
    graph.outputs = ["z"]
    return graph


@pytest.mark.parametrize("fused", (False, True))
def test_json_round_trip(fused: bool) -> None:
    graph = small_llama.build(attention_bias=True, tie_word_embeddings=False)
    if fused:
        run_passes(graph)
    text = json.dumps(graph.to_json())
    again = Graph.from_json(json.loads(text))
    assert json.dumps(again.to_json()) == text
    assert again.nodes == graph.nodes and again.values == graph.values
    assert again.inputs == graph.inputs and again.outputs == graph.outputs
    assert again.weights == {k: replace(w, data=None) for k, w in graph.weights.items()}
    assert graph.without_data().weights == again.weights


def test_json_keeps_tuples_and_dims() -> None:
    graph = tiny()
    graph.nodes[0] = replace(graph.nodes[0], attrs={"sizes": (1, 2), "name": "a", "flag": True})
    again = Graph.from_json(json.loads(json.dumps(graph.to_json())))
    assert again.nodes[0].attrs == {"sizes": (1, 2), "name": "a", "flag": True}
    assert again.shape("z") == (T, 6)


@pytest.mark.parametrize(
    "break_it",
    (
        lambda d: d.pop("nodes"),
        lambda d: d.pop("outputs"),
        lambda d: d["nodes"][0].pop("op"),
        lambda d: d["nodes"][0].update(inputs=3),
        lambda d: d["inputs"]["x"].update(shape=["T*"]),
        lambda d: d["inputs"]["x"].update(shape=[1.5]),
        lambda d: d["weights"]["w"].update(shape=["many"]),
        lambda d: d.update(nodes=7),
        lambda d: d["nodes"][1].update(inputs=["y", "nothing"]),
        lambda d: d["nodes"][0].update(inputs=["x"]),
        lambda d: d["nodes"][0].update(inputs=["x", "x", "", ""]),
        lambda d: d["weights"]["w"].update(shape=[6, 7]),
        lambda d: d["nodes"][1].update(outputs=["y"]),
        lambda d: d.update(outputs=["nothing"]),
    ),
)
def test_broken_json_is_a_format_error(break_it: Any) -> None:
    data = json.loads(json.dumps(tiny().to_json()))
    break_it(data)
    with pytest.raises(FormatError):
        Graph.from_json(data)


@pytest.mark.parametrize("data", (None, 3, "graph", [], {}))
def test_json_that_is_no_graph(data: Any) -> None:
    with pytest.raises(FormatError):
        Graph.from_json(data)


def test_unknown_op() -> None:
    data = tiny().to_json()
    data["nodes"][0]["op"] = "convolution"
    with pytest.raises(UnsupportedError, match="convolution"):
        Graph.from_json(data)


def test_check_names_the_node() -> None:
    graph = tiny()
    graph.check()
    graph.nodes.reverse()
    with pytest.raises(FormatError, match=r"node z .* reads unknown 'y'"):
        graph.check()
    graph = tiny()
    graph.values["y"] = replace(graph.values["y"], shape=(T, 7))
    with pytest.raises(FormatError, match="node y: y is declared"):
        graph.check()
    graph = tiny()
    graph.outputs = ["q"]
    with pytest.raises(FormatError, match="'q' is made by no node"):
        graph.check()


def test_names_are_declared_once() -> None:
    graph = tiny()
    with pytest.raises(FormatError, match="w is declared twice"):
        graph.add_weight("w", Weight((1,), "fp32"))
    with pytest.raises(FormatError, match="y has two producers"):
        graph.add("add", "y", ["x", "x"])
    with pytest.raises(FormatError, match="no value or weight named 'nothing'"):
        graph.shape("nothing")
    with pytest.raises(FormatError, match="lacks the attribute eps"):
        graph.nodes[0].attr("eps")


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "error"),
    (
        ("linear", ["x", "v", "", ""], {}, FormatError),
        ("linear", ["x", "w", "v", ""], {}, FormatError),
        ("linear", ["x", "w", "", "x"], {}, FormatError),
        ("gated_linear", ["x", "odd", ""], {"activation": "silu"}, FormatError),
        ("gated_linear", ["x", "w", ""], {"activation": "relu"}, UnsupportedError),
        ("add", ["x", "wide"], {}, FormatError),
        ("gated_activation", ["x", "wide"], {"activation": "silu"}, FormatError),
        ("rope", ["x", "selection", "v"], {"heads": 1, "head_dim": 8}, FormatError),
        ("rope", ["x", "selection", "two"], {"heads": 2, "head_dim": 8}, FormatError),
        ("kv_append", ["x", "wide"], {"layer": 0, "kv_heads": 1, "head_dim": 8}, FormatError),
        (
            "attention",
            ["x", "cache"],
            {"heads": 2, "kv_heads": 1, "head_dim": 8},
            FormatError,
        ),
        (
            "attention",
            ["six", "cache"],
            {"heads": 1, "kv_heads": 1, "head_dim": 6},
            UnsupportedError,
        ),
        (
            "attention",
            ["huge", "cache"],
            {"heads": 1, "kv_heads": 1, "head_dim": 260},
            UnsupportedError,
        ),
        ("head", ["x", "v"], {}, FormatError),
    ),
)
def test_shape_rules(op: str, inputs: list[str], attrs: dict[str, Any], error: type) -> None:
    graph = tiny()
    graph.add_weight("v", Weight((7,), "fp32"))
    graph.add_weight("two", Weight((2,), "fp32"))
    graph.add_weight("odd", Weight((5, 8), "fp32", matrix=True))
    for name, width in (("wide", 9), ("six", 6), ("huge", 260)):
        graph.add_input(name, FLOAT, (T, width))
    graph.add_input("cache", CACHE, ())
    with pytest.raises(error, match="node bad"):
        graph.append(Node(op, "bad", tuple(inputs), ("bad",), attrs))


def test_evaluator_names_missing_inputs() -> None:
    graph = tiny()
    with pytest.raises(FormatError, match="selection, x"):
        evaluate(graph, {"positions": np.zeros(1)}, {}, ReferenceState())


def test_llama_shapes() -> None:
    graph = small_llama.build()
    graph.check()
    assert graph.shape("embedding") == (T, 40)
    assert graph.shape("layer0.q") == (T, 32) and graph.shape("layer1.v") == (T, 16)
    assert graph.shape("logits") == (S, small_llama.VOCABULARY)
    assert graph.weights["rope.inv_freq"].shape == (4,)
    names = {name for node in graph for name in node.covers}
    assert names == set(small_llama.tensors(small_llama.config()))
