"""Damaged ONNX files end in a HornitoError or open: never a crash, a hang or a large allocation.
And whatever still opens computes what ONNX Runtime computes for it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
from onnx import numpy_helper

from hornito.errors import HornitoError
from hornito.importers import open_source
from onnx_decoder import run_graph, run_runtime, save
from onnx_samples import unpack
from tree import ROOT

SCRIPT = Path(__file__).with_name("mutate.py")


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by RLIMIT_AS")
@pytest.mark.parametrize("copies", [160, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "seed"), [("llama3-tiny", 1), ("qwen2-tiny-dyn18", 2)])
def test_damaged_bytes(tmp_path: Path, name: str, seed: int, copies: int) -> None:
    path = unpack(name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), str(path), str(seed), str(copies)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["slowest"] < 5.0
    outcomes: dict[str, int] = result["outcomes"]
    assert sum(outcomes.values()) == copies
    assert outcomes["FormatError"] > 50 and outcomes["ok"] > 5


GROUPS = (
    ("Add", "Sub", "Mul", "Div"),
    ("LessOrEqual", "Less", "Greater", "GreaterOrEqual"),
    ("And", "Or"),
    ("Cos", "Sin"),
    ("Neg", "Identity", "Abs"),
    ("Sigmoid", "Tanh"),
)


def changed_number(tensor: Any, rng: random.Random) -> None:
    """One number of a tensor for another."""
    array = numpy_helper.to_array(tensor).copy()
    if array.size == 0:
        return
    flat = array.reshape(-1)
    at = rng.randrange(flat.size)
    if array.dtype == bool:
        flat[at] = not flat[at]
    elif array.dtype.kind == "i":
        flat[at] = max(min(int(flat[at]), 1 << 40), -(1 << 40)) + rng.choice((1, -1, 2))
    else:
        flat[at] *= rng.choice((0.5, 2.0, -1.0))
    tensor.CopyFrom(numpy_helper.from_array(flat.reshape(array.shape), tensor.name))


def altered(model: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """A well-formed copy with another op, input, attribute or constant."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes = copy.graph.node
    node = rng.choice(nodes)
    kind = rng.randrange(5)
    if kind == 0 and len(node.input) > 1:
        i, j = rng.sample(range(len(node.input)), 2)
        node.input[i], node.input[j] = node.input[j], node.input[i]
    elif kind == 1 and node.input:
        other = rng.choice([n for n in nodes if n.op_type == node.op_type and n.input])
        at = rng.randrange(min(len(node.input), len(other.input)))
        node.input[at] = other.input[at]
    elif kind == 2:
        for group in GROUPS:
            if node.op_type in group:
                node.op_type = rng.choice(group)
    elif kind == 3 and node.attribute:
        attribute = rng.choice(node.attribute)
        if attribute.type == onnx.AttributeProto.INT:
            attribute.i += rng.choice((1, -1))
        elif attribute.type == onnx.AttributeProto.INTS:
            order = list(attribute.ints)
            rng.shuffle(order)
            attribute.ints[:] = order
        elif attribute.type == onnx.AttributeProto.TENSOR:
            changed_number(attribute.t, rng)
    else:
        small = [t for t in copy.graph.initializer if int(np.prod(t.dims)) <= 64]
        if small:
            changed_number(rng.choice(small), rng)
    return copy


def check_altered(name: str, folder: Path, seed: int, count: int) -> tuple[int, int]:
    """How many altered copies were refused, and how many opened and were right."""
    model = onnx.load(str(unpack(name, folder)))
    rng = random.Random(seed)
    ids = [i * 7 % 500 for i in range(22)]  # past the window of 16
    refused = right = 0
    for i in range(count):
        copy = altered(model, rng)
        try:
            source = open_source(save(copy, folder / "altered.onnx"))
            assert source.builder is not None
            with np.errstate(all="ignore"):
                got = run_graph(source.builder("fp32"), ids)
        except HornitoError as error:
            assert str(error)
            refused += 1
            continue
        try:
            want = run_runtime(copy, ids, (14, 8))
        except Exception:  # the runtime is stricter about some types that mean nothing here
            continue
        close = np.allclose(got, want, rtol=2e-3, atol=2e-3, equal_nan=True)
        assert close, f"{name}, copy {i} of seed {seed} opens, but computes something else"
        right += 1
    return refused, right


@pytest.mark.parametrize(
    "name", ["mistral-tiny", "gemma3-tiny", "llama-tiny-old446", "qwen3-tiny-dyn23", "gpt2-tiny"]
)
def test_altered_graphs_are_refused_or_right(tmp_path: Path, name: str) -> None:
    refused, right = check_altered(name, tmp_path, seed=11, count=30)
    assert refused >= 5 and right >= 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "name",
    ["llama3-tiny", "gemma3-tiny", "phi3-tiny", "llama-tiny-old446", "qwen2-tiny-dyn18"],
)
def test_many_altered_graphs(tmp_path: Path, name: str, seed: int) -> None:
    refused, right = check_altered(name, tmp_path, seed, count=300)
    assert refused >= 50 and right >= 50
