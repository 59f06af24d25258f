"""Rounding a whole model: calibration on the device, the error guard, target sizes, biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hornito
from gguf_samples import HF
from hornito.compiler import CompileReport
from hornito.errors import NoDeviceError, UsageError
from hornito.graph.graph import Graph
from hornito.graph.reference import ReferenceState, evaluate
from hornito.package import open_package
from hornito.package.model import model_graph
from hornito.progress import NullProgress
from hornito.quant.calibrate import calibrate, own_chats, own_text, sequences
from hornito.quant.choice import Quantisation
from hornito.quant.formats import weight_format
from hornito.quant.planes import unpack
from hornito.text.tokenizer import Tokenizer
from hornito.vk.device import Device
from text_model import write_text_directory
from tiny import Floats, open_engine, random_ids

gpu = pytest.mark.gpu

NAME = "qwen2-tiny"
"""64 and 160 wide, three layers, a tied table, biases on q, k and v."""

LAYER0 = "layer0.attention.qkv"
UNSEEN = (
    "A crab that lives under the pier came out at low tide, saw the boats, and went home again."
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer."""
    return write_text_directory(tmp_path_factory.mktemp("source") / "m", NAME)


def compiled(
    source: Path, out: Path, weights: str = "int4", **choice: Any
) -> tuple[CompileReport, dict[str, Any], dict[str, str]]:
    """The report, the manifest's record, and the type of each matrix."""
    report = hornito.compile_source(
        source, out, weights=weights, quantisation=Quantisation(**choice)
    )
    with open_package(out) as package:
        manifest = package.manifest
        found = {n: w["dtype"] for n, w in manifest.graph["weights"].items() if w["matrix"]}
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    return report, manifest.quant, found


def float_weights(path: Path) -> tuple[Graph, dict[str, Floats]]:
    """A package's graph and its weights as numbers."""
    with open_package(path) as package:
        graph = model_graph(package)
        return graph, {
            name: unpack(
                weight_format(w.dtype), np.frombuffer(package.tensor(name), np.uint8), w.shape
            )
            for name, w in graph.weights.items()
        }


@gpu
def test_inputs_are_those_of_the_reference(
    device: Device, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Second moments and means of every matrix' inputs, the head's and a chunk's tail included."""
    path = tmp_path / "m.vxm"
    hornito.compile_source(HF / NAME, path, weights="fp32")
    graph, weights = float_weights(path)
    runs = [random_ids(256, 1), random_ids(40, 2)]
    with open_package(path) as package, (tmp_path / "rows").open("w+b") as file:
        kept = calibrate(device, package, graph, runs, file, NullProgress())
        assert set(kept.of_weight) == {n for n, w in graph.weights.items() if w.matrix}
        rows: dict[str, list[Any]] = {}
        for ids in runs:
            inputs = {"ids": ids, "positions": range(len(ids)), "selection": range(len(ids))}
            values = evaluate(
                graph,
                {name: np.array(value) for name, value in inputs.items()},
                weights,
                ReferenceState(),
                keep=True,
            )
            for name, (value, scale, eps) in kept.of_weight.items():
                x = values[value]
                if scale:
                    mean = np.square(x).mean(axis=1, keepdims=True)
                    x = x / np.sqrt(mean + eps) * weights[scale]
                rows.setdefault(name, []).append(x)
        normed = {read.norm for read in kept.of_weight.values()}
        assert len(normed - {""}) == 6, "a norm before qkv and one before gate and up, each layer"
        for name, parts in rows.items():
            x = np.concatenate(parts)
            found = kept.statistics(name)
            assert found is not None
            moments = x.T @ x / len(x)
            assert np.abs(found.moments - moments).max() <= 2e-3 * np.abs(moments).max(), name
            assert np.abs(found.mean - x.mean(axis=0)).max() <= 2e-3 * np.abs(x).max(), name
    assert kept.statistics("nothing") is None


@gpu
def test_calibrated_bytes_are_reproducible_and_closer(source: Path, tmp_path: Path) -> None:
    report, record, found = compiled(source, tmp_path / "a.vxm")
    assert report.warnings == []
    _, again, _ = compiled(source, tmp_path / "b.vxm")
    assert (tmp_path / "a.vxm").read_bytes() == (tmp_path / "b.vxm").read_bytes()
    rounding = record["rounding"]
    assert again["rounding"] == rounding and rounding["samples"] == 8
    assert rounding["tokens"] == 8 * 256 and len(rounding["ids_sha256"]) == 64
    assert found["model.embed_tokens.weight"] == "int8g64"
    assert found["layer0.attention.qkv.weight"] == "int4g64o8"
    assert found["model.layers.0.mlp.down_proj.weight"] == "int4o8", "160 is no multiple of 64"
    _, blind, _ = compiled(source, tmp_path / "c.vxm", samples=0)
    assert blind["rounding"]["samples"] == 0 and "tokens" not in blind["rounding"]
    hornito.compile_source(source, tmp_path / "plain.vxm", weights="fp32")
    logits = []
    for name in ("plain", "a", "c"):
        with hornito.load(tmp_path / f"{name}.vxm", precision="high", context=128) as llm:
            session = llm.session()
            logits.append(session.prefill_logits(llm.tokenizer.encode(UNSEEN)))
            session.close()
    spread = [float(np.square(found - logits[0]).mean()) for found in logits[1:]]
    assert spread[0] < 0.9 * spread[1], "on a text that was not seen"


@gpu
def test_a_text_of_ones_own(source: Path, tmp_path: Path) -> None:
    text = "one two three four five " * 30
    _, record, _ = compiled(source, tmp_path / "m.vxm", "int8", text=text, samples=1)
    assert record["rounding"]["samples"] == 1
    with pytest.raises(UsageError, match="the calibration text has 2 tokens; it needs at least 16"):
        compiled(source, tmp_path / "n.vxm", text="ab")
    with pytest.raises(UsageError, match=r"no tokenizer.*samples 0"):
        compiled(HF / NAME, tmp_path / "n.vxm", samples=2)
    report, _, _ = compiled(HF / NAME, tmp_path / "n.vxm")
    assert report.warnings[1:] == [
        "the model has no tokenizer: matrices are rounded by their weights alone"
    ]
    with pytest.raises(NoDeviceError, match="--quant-samples 0"):
        compiled(source, tmp_path / "o.vxm", device="no such device")
    assert not (tmp_path / "o.vxm").exists()


@gpu
def test_mean_errors_are_taken_back_by_biases(device: Device, source: Path, tmp_path: Path) -> None:
    """q, k and v have one: with it, the outputs' mean over the text is what it was."""
    text = own_text()
    _, record, _ = compiled(source, tmp_path / "m.vxm", text=text)
    assert record["rounding"]["corrected_biases"] >= 3
    hornito.compile_source(source, tmp_path / "plain.vxm", weights="fp16")
    _, before = float_weights(tmp_path / "plain.vxm")
    graph, after = float_weights(tmp_path / "m.vxm")
    (node,) = [n for n in graph if n.name == LAYER0]
    weight, bias = node.inputs[1:3]
    change, shift = after[weight] - before[weight], after[bias] - before[bias]
    with open_package(tmp_path / "plain.vxm") as package, (tmp_path / "rows").open("w+b") as file:
        tokenizer = Tokenizer(package.blob("tokenizer.json"), add_bos=False, bos_id=0, eos_ids=[])
        runs = sequences(tokenizer.encode(text), 8, None)
        kept = calibrate(device, package, model_graph(package), runs, file, NullProgress())
        statistics = kept.statistics(weight)
    assert statistics is not None and np.abs(shift).max() > 1e-5
    assert np.allclose(shift, -change @ statistics.mean, atol=1e-5)


def test_what_loses_too_much_stays_at_more_bits(tmp_path: Path) -> None:
    report, record, found = compiled(HF / NAME, tmp_path / "m.vxm", samples=0, error=0.05)
    bodies = [dtype for name, dtype in found.items() if name != "model.embed_tokens.weight"]
    assert set(bodies) == {"int8"}
    assert record["rounding"]["more_bits"]["layer0.attention.qkv.weight"] == "int8"
    assert record["rounding"]["worst_error"] < 0.05
    assert (
        "layer0.attention.qkv.weight stays int8: as int4g64o8 its outputs would be off by more "
        "than 5%"
    ) in report.warnings
    _, _, found = compiled(HF / NAME, tmp_path / "m.vxm", samples=0, error=0.001)
    assert set(found.values()) == {"fp16"}


def test_a_target_size_is_met_and_spent(tmp_path: Path) -> None:
    """First the table, then the first and last layers, then what loses most."""

    def size(name: str) -> int:
        with open_package(tmp_path / name) as package:
            return sum(info.nbytes for info in package.tensors.values())

    everything = {"samples": 0, "table": "int4", "outliers": 0.0}
    _, _, found = compiled(HF / NAME, tmp_path / "least.vxm", **everything)
    assert all(dtype.startswith("int4") for dtype in found.values())
    least = size("least.vxm")
    raised: list[set[str]] = []
    for more in (20_000, 40_000, 10_000_000):
        path = tmp_path / "m.vxm"
        _, record, found = compiled(HF / NAME, path, **everything, target_bytes=least + more)
        assert least < size("m.vxm") <= least + more
        raised.append({name for name, dtype in found.items() if dtype == "int8"})
        assert set(record["rounding"]["more_bits"]) == raised[-1]
    assert raised[0] < raised[1] < raised[2] == set(found)
    assert "model.embed_tokens.weight" in raised[0]
    middle = {name for name in raised[1] if "layer1" in name or "layers.1." in name}
    assert len(raised[1] - middle) > 2 * len(middle)
    with pytest.raises(
        UsageError, match=r"take .* at the least, more than the target of .*--table"
    ):
        compiled(HF / NAME, tmp_path / "n.vxm", **everything, target_bytes=1000)


def test_choices_out_of_range() -> None:
    for wrong in (
        {"samples": -1},
        {"error": 0.0},
        {"target_bytes": 0},
        {"samples": 0, "text": "some"},
    ):
        with pytest.raises(UsageError):
            Quantisation(**wrong)


def test_sequences_of_a_text() -> None:
    ids = list(range(10, 10 + 600))
    assert [len(run) for run in sequences(ids, 8, None)] == [256, 256, 88]
    with_bos = sequences([1, *ids], 2, 1)
    assert [run[0] for run in with_bos] == [1, 1] and with_bos[1][1] == 10 + 255
    assert len(own_text().split()) > 1000
    chats = [[7] * 300, [8] * 20]
    mixed = sequences(ids, 4, 1, chats)
    assert [(run[0], len(run)) for run in mixed] == [(7, 256), (8, 20), (1, 256), (1, 256)]
    for chat in own_chats():
        roles = [message["role"] for message in chat]
        assert roles == ["user", "assistant"] * (len(roles) // 2), "what every template takes"
    with pytest.raises(UsageError, match="15 tokens"):
        sequences(ids[:15], 8, None)


@gpu
@pytest.mark.parametrize(
    ("weights", "choice"),
    [
        ("bf16", {}),
        ("int8", {"group": 128}),
        ("int8", {"outliers": 0.1}),
        ("int4", {}),
        ("int4", {"table": "int4", "group": 32, "outliers": 0.0}),
        ("int4m", {"table": "int4mg64"}),
    ],
)
def test_every_format_takes_the_memory_that_was_planned(
    device: Device, tmp_path: Path, weights: str, choice: dict[str, Any]
) -> None:
    """To the byte, and the file's tensors are what the plan counts."""
    if weights not in ("bf16",):
        choice = {"samples": 0, **choice}
    path = tmp_path / "m.vxm"
    compiled(HF / NAME, path, weights, **choice)
    with open_package(path) as package:
        stored = {name: info.nbytes for name, info in package.tensors.items()}
    with open_engine(device, path, context=64) as engine:
        assert dict(engine.plan.weight_bytes) == stored
        assert device.memory_report()["weights"] == engine.memory.weights
        assert engine.memory.weights == sum(-(-size // 256) * 256 for size in stored.values())
        assert device.allocated_bytes == engine.memory.total
