"""Lowering of tensor ops: indices are checked, numbers agree with the shaders."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from hornito.errors import FormatError
from hornito.tensor.graph import TensorGraph
from hornito.tensor.kernels import (
    FUNCTIONS,
    GATHERS,
    REDUCTIONS,
    ROWS,
    SCATTERS,
    TYPES,
    TensorLowering,
)
from hornito.vk.caps import Caps
from tensor.cases import everything, stored
from tree import ROOT

KERNELS = ROOT / "src" / "hornito" / "kernels"


def numbers(file: str, prefix: str = "") -> dict[str, int]:
    """Constants of a shader by lower-case name."""
    text = (KERNELS / file).read_text()
    found = re.findall(rf"const uint {prefix}([A-Z0-9_]+) = (\d+)u;", text)
    return {name.lower(): int(number) for name, number in found}


def test_functions_have_the_numbers_of_the_shader() -> None:
    assert numbers("tensor/map.comp", "F_") == FUNCTIONS


def test_types_have_the_numbers_of_the_shader() -> None:
    assert numbers("include/tensor.glsl", "T_") == {name: i for i, name in enumerate(TYPES)}


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("tensor/reduce.comp", REDUCTIONS),
        ("tensor/rows.comp", ROWS),
        ("tensor/gather.comp", GATHERS),
        ("tensor/scatter.comp", SCATTERS),
    ],
)
def test_choices_have_the_numbers_of_the_shader(file: str, names: tuple[str, ...]) -> None:
    found = numbers(file)
    own = [name for name in names if name != "none"]
    assert {name: found[name] for name in own} == {name: names.index(name) for name in own}


def lowered(graph: TensorGraph) -> TensorLowering:
    return TensorLowering(graph, Caps.parse({})).run()


def changed(op: str, **attrs: Any) -> TensorGraph:
    """The graph of every op with other attributes in one."""
    graph = everything()
    graph.nodes = [
        replace(node, attrs={**node.attrs, **attrs}) if node.op == op else node
        for node in graph.nodes
    ]
    return graph


def test_every_op_lowers() -> None:
    graphs = (everything(), stored("int8"))
    kernels = {d.kernel.split(".")[0] for graph in graphs for d in lowered(graph).dispatches}
    assert {name for name in kernels if name.startswith("tensor/")} == {
        f"tensor/{path.stem}" for path in (KERNELS / "tensor").glob("*.comp")
    }


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("map", {"dims": [12], "strides": [1, 4]}),
        ("map", {"fn": "system"}),
        ("map", {"dims": [13]}),
        ("view", {"map0": [0, 1, 5]}),
        ("view", {"map0": [0, 100, 4]}),
        ("view", {"map0": [-5, 1, 4]}),
        ("concat", {"axis": 1}),
        ("concat", {"axis": 7}),
        ("reduce", {"width": 5}),
        ("reduce", {"width": 0}),
        ("rows", {"width": 24}),
        ("matmul", {"sizes": [3, 3, 400]}),
        ("matmul", {"strides": [4, 1, 1, 400, 0, 0]}),
        ("matmul", {"batch": [2, 12, 12]}),
        ("gather", {"p": [30, 4, 12, 0]}),
        ("gather", {"p": [3, 4, 13, 0]}),
        ("scatter", {"p": [2, 1, 2, 0]}),
        ("scatter", {"dims": [3]}),
        ("scan", {"length": 5}),
        ("topk", {"k": 9}),
    ],
)
def test_what_reaches_beyond_a_value_is_refused(op: str, attrs: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        lowered(changed(op, **attrs))
