"""Small ONNX models for the tests of tensor graphs."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tree import ROOT

DATA = ROOT / "tests" / "data" / "onnx"


def bert_tiny() -> ModelProto:
    """A BERT of two layers, exported with dynamic batch and length."""
    return ModelProto.FromString(gzip.decompress((DATA / "bert-tiny.onnx.gz").read_bytes()))


def bert_golden() -> Mapping[str, Any]:
    """Its inputs and its last hidden state."""
    return dict(np.load(DATA / "bert-tiny.npz"))


def model(
    nodes: Sequence[Any],
    inputs: Mapping[str, tuple[int, Sequence[int | str]]],
    constants: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = ("out",),
) -> ModelProto:
    """A model of some nodes; element types and dims of inputs, numbers of constants."""
    graph = helper.make_graph(
        list(nodes),
        "sample",
        [helper.make_tensor_value_info(n, t, list(d)) for n, (t, d) in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def save(proto: ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    """The model as a file."""
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path
