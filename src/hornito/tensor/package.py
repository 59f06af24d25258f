"""Tensor graphs as `.vxm` packages, and what compiling one reports."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hornito.errors import FormatError, PackageError, UsageError
from hornito.package import Package, check_target, open_package, write_package
from hornito.progress import NullProgress, Progress
from hornito.support import BACKEND, SUPPORTED
from hornito.tensor.buckets import Bucket
from hornito.tensor.graph import FLOATS, KIND, SIGNED, TensorGraph, Words
from hornito.tensor.plan import memory_facts
from hornito.tensor.stored import store_matrices

if TYPE_CHECKING:
    from hornito.importers.onnx_generic import Binding, GenericModel, Parsed


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One graph to compile: a file, the numbers of its dims, and a name (made of them if `""`)."""

    parsed: Parsed
    binding: Binding
    name: str = ""


@dataclass(frozen=True, slots=True)
class TensorReport:
    """What was compiled into what.

    Attributes:
        path, bytes: the package.
        buckets: of each its name, dims, and the element type and shape of every input and output.
        nodes: operations on the device, of all buckets.
        warnings: what the user should know.
        support: the support report, bucket by bucket and node by node.
        seconds: wall time.
    """

    path: str
    bytes: int
    buckets: list[dict[str, Any]]
    nodes: int
    warnings: list[str]
    support: dict[str, Any]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def is_tensor_package(package: Package) -> bool:
    """Whether a package holds tensor graphs."""
    return package.manifest.graph.get("kind") == KIND


def compile_graphs(
    specs: Sequence[GraphSpec],
    out: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    weights: str = "fp32",
) -> TensorReport:
    """Bind the dims of parsed ONNX models and write them as the buckets of one package.

    Constants that hold the same numbers are stored once.

    Args:
        weights: how constant matrices of products are stored (`hornito.tensor.stored`); other
            constants are fp32.

    Raises:
        UsageError, UnsupportedError: they can't be compiled, and why; names every node at fault.
    """
    from hornito.importers.onnx_generic import import_generic

    check_target(out)
    began = time.monotonic()
    files = len({spec.parsed.path for spec in specs})
    pool = _Pool()
    buckets: list[Bucket] = []
    reports: dict[str, dict[str, Any]] = {}
    formats: dict[str, dict[str, float]] = {}
    notes: list[str] = []
    for spec in specs:
        name = spec.name or _name(spec, files)
        if name in reports:
            raise UsageError(f"two buckets are named {name!r}: give each other shapes, or a name")
        model = import_generic(spec.parsed, spec.binding)
        found, note = store_matrices(model.graph, weights)
        formats = formats or found
        if note:
            notes.append(f"{name}: {note}")
        pooled = pool.add(model.graph, "" if not buckets else f"{len(buckets)}:")
        buckets.append(Bucket(name, dict(spec.binding.dims), model.graph, pooled))
        reports[name] = support(model)
    report = _joined(reports, buckets)
    report["warnings"] += notes
    quant: dict[str, Any] = {"weights": weights}
    if formats:
        quant["formats"] = formats
    source = specs[0].parsed.path
    size = _write(out, buckets, pool, report, source, quant, progress or NullProgress())
    return TensorReport(
        str(out),
        size,
        [_described(bucket) for bucket in buckets],
        sum(len(bucket.graph.nodes) for bucket in buckets),
        report["warnings"],
        report,
        time.monotonic() - began,
    )


def _name(spec: GraphSpec, files: int) -> str:
    """A bucket's name, of its file (where there are several) and its shapes."""
    binding = spec.binding
    facts = [f"{dim}={number}" for dim, number in binding.dims.items()]
    facts += [f"{name}={'x'.join(map(str, shape))}" for name, shape in binding.shapes.items()]
    stem = spec.parsed.path.stem
    parts = ([stem] if files > 1 or not facts else []) + ([",".join(facts)] if facts else [])
    return ":".join(parts)


class _Pool:
    """Constants of all buckets, each content once."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[str, tuple[int, ...], Words]] = {}
        self._known: dict[tuple[str, bytes], str] = {}

    def add(self, graph: TensorGraph, prefix: str) -> dict[str, str]:
        """Take in a graph's constants; the array of the package that holds each, by name."""
        places = {}
        for name, words in graph.constants.items():
            value = graph.values[name]
            if not value.size:
                continue
            dtype = {0: "F32", 1: "I32", 2: "U32"}[value.kind]
            key = dtype, hashlib.sha256(np.ascontiguousarray(words).data).digest()
            place = self._known.setdefault(key, prefix + name)
            if place not in self.tensors:
                self.tensors[place] = dtype, value.shape, words
            graph.constants[name] = self.tensors[place][2]
            places[name] = place
        return places


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
        "memory": memory_facts(graph),
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


def _joined(reports: Mapping[str, dict[str, Any]], buckets: Sequence[Bucket]) -> dict[str, Any]:
    """One report of all buckets; rows say whose they are."""
    parts = list(reports.values())
    counts = [part["summary"] for part in parts]

    def rows(key: str) -> list[dict[str, Any]]:
        return [{"bucket": n, **row} for n, part in reports.items() for row in part[key]]

    return {
        **{key: value for key, value in parts[0].items() if key != "memory"},
        "summary": {
            **{key: sum(c[key] for c in counts) for key in counts[0] if key != "coverage"},
            "coverage": min(c["coverage"] for c in counts),
        },
        "buckets": [
            {**_described(bucket), "summary": part["summary"], "memory": part["memory"]}
            for bucket, part in zip(buckets, parts, strict=True)
        ],
        "nodes": rows("nodes"),
        "source_nodes": rows("source_nodes"),
        "warnings": list(dict.fromkeys(text for part in parts for text in part["warnings"])),
    }


def _described(bucket: Bucket) -> dict[str, Any]:
    graph = bucket.graph

    def typed(names: Mapping[str, str]) -> dict[str, list[Any]]:
        values = {label: graph.values[name] for label, name in names.items()}
        return {label: [v.dtype, list(v.shape)] for label, v in values.items()}

    return {
        "name": bucket.name,
        "dims": dict(bucket.dims),
        "inputs": typed({name: name for name in graph.inputs}),
        "outputs": typed(graph.outputs),
    }


def _write(
    out: str | os.PathLike[str],
    buckets: Sequence[Bucket],
    pool: _Pool,
    report: dict[str, Any],
    source: Path,
    quant: dict[str, Any],
    progress: Progress,
) -> int:
    facts = {
        "model_type": KIND,
        "name": source.stem,
        "buckets": [_described(bucket) for bucket in buckets],
    }
    graph = {
        "kind": KIND,
        "buckets": [
            {"name": b.name, "dims": dict(b.dims), "tensors": dict(b.pooled), **b.graph.to_json()}
            for b in buckets
        ],
    }
    tensors = [
        (name, dtype, shape, _bytes(words)) for name, (dtype, shape, words) in pool.tensors.items()
    ]
    return write_package(
        out,
        graph,
        facts,
        tensors,
        _tokenizer(source),
        {},
        quant,
        report,
        {"format": "onnx", "file": source.name, "name": source.stem, "licence": None},
        progress,
    )


def _tokenizer(source: Path) -> dict[str, bytes]:
    """The tokenizer beside an encoder's file, so that its package is all that it needs."""
    path = source.parent / "tokenizer.json"
    return {path.name: path.read_bytes()} if path.is_file() else {}


def _bytes(words: Words) -> Any:
    return lambda: words.astype("<u4", copy=False)


def read_buckets(package: Package) -> list[Bucket]:
    """The graphs of a package, with their constants as views of the file.

    Raises:
        UsageError: the package holds a text model.
        PackageError, FormatError: a graph is damaged.
    """
    if not is_tensor_package(package):
        raise UsageError(f"{package.path} is a text model: give it a prompt, not --input")
    views: dict[str, Words] = {}
    buckets = [_bucket(package, data, views) for data in _listed(package)]
    if not buckets:
        raise PackageError(f"{package.path}: it has no bucket")
    if len({bucket.name for bucket in buckets}) != len(buckets):
        raise PackageError(f"{package.path}: two buckets have one name")
    return buckets


def _listed(package: Package) -> Iterator[Mapping[str, Any]]:
    listed = package.manifest.graph.get("buckets")
    if not isinstance(listed, list) or not all(isinstance(data, dict) for data in listed):
        raise PackageError(
            f"{package.path}: its graph has no list of buckets: compile the model again"
        )
    yield from listed


def _bucket(package: Package, data: Mapping[str, Any], views: dict[str, Words]) -> Bucket:
    try:
        name, dims = str(data["name"]), {str(k): int(v) for k, v in data["dims"].items()}
        places = {str(k): str(v) for k, v in data["tensors"].items()}
        typed = {str(c): data["values"][c] for c in data["constants"]}
        shapes = {c: (str(dtype), list(shape)) for c, (dtype, shape) in typed.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{package.path}: not a bucket: {error!r}") from error
    constants: dict[str, Words] = {}
    for constant, (dtype, shape) in shapes.items():
        place = places.get(constant, constant)
        info = package.tensors.get(place)
        if info is None:
            if 0 not in shape:
                raise PackageError(f"{package.path}: no tensor {place!r}")
            constants[constant] = np.zeros(0, np.uint32)
            continue
        expected = "F32" if dtype in FLOATS else "I32" if dtype in SIGNED else "U32"
        if info.dtype != expected:
            raise PackageError(f"{package.path}: tensor {place!r} is {info.dtype}, not {expected}")
        if place not in views:
            views[place] = np.frombuffer(package.tensor(place), np.uint32)
        constants[constant] = views[place]
    return Bucket(name, dims, TensorGraph.from_json(data, constants), places)


def load_buckets(path: str | os.PathLike[str]) -> list[Bucket]:
    """The graphs of a package file; their constants keep the file's map alive."""
    with open_package(path) as package:
        return read_buckets(package)
