"""Tensor graphs as `.vxm` packages, and what compiling one reports."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hornito.errors import PackageError, UsageError
from hornito.package import Package, open_package, write_package
from hornito.progress import NullProgress, Progress
from hornito.support import BACKEND, SUPPORTED
from hornito.tensor.graph import FLOATS, KIND, SIGNED, TensorGraph, Words

if TYPE_CHECKING:
    from hornito.importers.onnx_generic import Binding, GenericModel, Parsed


@dataclass(frozen=True, slots=True)
class TensorReport:
    """What was compiled into what.

    Attributes:
        path, bytes: the package.
        inputs, outputs: element type and shape of each.
        nodes: operations on the device.
        warnings: what the user should know.
        support: the support report, node by node.
        seconds: wall time.
    """

    path: str
    bytes: int
    inputs: dict[str, list[Any]]
    outputs: dict[str, list[Any]]
    nodes: int
    warnings: list[str]
    support: dict[str, Any]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def is_tensor_package(package: Package) -> bool:
    """Whether a package holds a tensor graph."""
    return package.manifest.graph.get("kind") == KIND


def compile_parsed(
    parsed: Parsed,
    binding: Binding,
    out: str | os.PathLike[str],
    progress: Progress | None = None,
) -> TensorReport:
    """Bind a parsed ONNX model's dims and write its package.

    Raises:
        UsageError, UnsupportedError: it can't be compiled, and why; names every node at fault.
    """
    from hornito.importers.onnx_generic import import_generic

    began = time.monotonic()
    model = import_generic(parsed, binding)
    report = support(model)
    size = write_tensor_package(out, model.graph, report, parsed.path, progress)
    facts = _facts(model.graph, parsed.path)
    return TensorReport(
        str(out),
        size,
        facts["inputs"],
        facts["outputs"],
        len(model.graph.nodes),
        report["warnings"],
        report,
        time.monotonic() - began,
    )


def support(model: GenericModel) -> dict[str, Any]:
    """The support report of a tensor graph: what runs every node of the source."""
    graph = model.graph
    into: dict[str, list[str]] = {}
    ops: dict[str, str] = {}
    for node in graph.nodes:
        into.setdefault(node.source, []).append(node.name)
        ops[node.name] = node.op
    rows = [
        {
            "name": source.name,
            "op": source.op,
            "raised_into": into.get(source.name, []),
            "kernels": list(dict.fromkeys(f"tensor/{ops[n]}" for n in into.get(source.name, []))),
            "backend": BACKEND if source.name in into else "none",
            "reason": "" if source.name in into else f"folded at import: {source.folded}",
        }
        for source in model.nodes
    ]
    raised = sum(bool(row["raised_into"]) for row in rows)
    return {
        "verdict": SUPPORTED,
        "backend": BACKEND,
        "summary": {
            "source_nodes": len(rows),
            "raised": raised,
            "folded": len(rows) - raised,
            "unsupported": 0,
            "coverage": 1.0,
            "graph_nodes_before_passes": len(graph.nodes),
            "graph_nodes": len(graph.nodes),
        },
        "patterns": {},
        "passes": {},
        "nodes": [
            {"name": n.name, "op": f"tensor.{n.op}", "backend": BACKEND, "covers": [n.source]}
            for n in graph.nodes
        ],
        "source_nodes": rows,
        "warnings": _warnings(graph),
    }


def _warnings(graph: TensorGraph) -> list[str]:
    doubles = sum(value.dtype == "float64" for value in graph.values.values())
    if not doubles:
        return []
    return [f"{doubles} float64 values are computed in fp32"]


def _facts(graph: TensorGraph, path: Path) -> dict[str, Any]:
    def described(names: Mapping[str, str]) -> dict[str, list[Any]]:
        values = {label: graph.values[name] for label, name in names.items()}
        return {label: [v.dtype, list(v.shape)] for label, v in values.items()}

    return {
        "model_type": KIND,
        "name": path.stem,
        "inputs": described({name: name for name in graph.inputs}),
        "outputs": described(graph.outputs),
    }


def write_tensor_package(
    out: str | os.PathLike[str],
    graph: TensorGraph,
    report: dict[str, Any],
    source: Path,
    progress: Progress | None = None,
) -> int:
    """Write a graph and its constants; returns the package's bytes."""
    tensors = []
    for name, words in graph.constants.items():
        value = graph.values[name]
        if value.size:
            dtype = {0: "F32", 1: "I32", 2: "U32"}[value.kind]
            tensors.append((name, dtype, value.shape, _bytes(words)))
    return write_package(
        out,
        graph.to_json(),
        _facts(graph, source),
        tensors,
        {},
        {},
        {"weights": "fp32"},
        report,
        {"format": "onnx", "file": source.name, "name": source.stem, "licence": None},
        progress or NullProgress(),
    )


def _bytes(words: Words) -> Any:
    return lambda: words.astype("<u4", copy=False)


def read_tensor_graph(package: Package) -> TensorGraph:
    """The graph of a package, with its constants as views of the file.

    Raises:
        UsageError: the package holds a text model.
        PackageError, FormatError: the graph is damaged.
    """
    if not is_tensor_package(package):
        raise UsageError(f"{package.path} is a text model: give it a prompt, not --input")
    data = package.manifest.graph
    constants: dict[str, Words] = {}
    for name in data.get("constants", []):
        info = package.tensors.get(name)
        dtype, shape = data.get("values", {}).get(name, ("", []))
        if info is None:
            if 0 not in shape:
                raise PackageError(f"{package.path}: no tensor {name!r}")
            constants[name] = np.zeros(0, np.uint32)
            continue
        expected = "F32" if dtype in FLOATS else "I32" if dtype in SIGNED else "U32"
        if info.dtype != expected:
            raise PackageError(f"{package.path}: tensor {name!r} is {info.dtype}, not {expected}")
        constants[name] = np.frombuffer(package.tensor(name), np.uint32)
    return TensorGraph.from_json(data, constants)


def load_tensor_graph(path: str | os.PathLike[str]) -> TensorGraph:
    """The graph of a package file; the constants keep the file's map alive."""
    with open_package(path) as package:
        return read_tensor_graph(package)
