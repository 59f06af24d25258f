"""Packages with edited manifests: everything that running counts on is checked at opening."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gguf_samples import HF
from hornito.cli.main import main
from hornito.compiler import compile_source
from hornito.errors import FormatError, PackageError, UnsupportedError
from hornito.graph.graph import Node
from hornito.ops import registry
from hornito.ops.attributes import INPUTS, RULES, check_attributes
from hornito.package import open_package, write_package
from hornito.package.model import model_graph

Edit = Callable[[dict[str, Any]], Any]
Spec = tuple[str, str, tuple[int, ...], bytes]
DOWN = "model.layers.0.mlp.down_proj.weight"
TABLE = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.vxm"
    compile_source(HF / "llama-tiny", path)
    return path


def edited(
    base: Path,
    out: Path,
    edit: Edit = lambda manifest: None,
    tensors: Callable[[list[Spec]], list[Spec]] = lambda specs: specs,
) -> Path:
    """A copy of a package, valid as a file, with another manifest or other tensors."""
    with open_package(base) as package:
        data = json.loads(json.dumps(package.manifest.to_json()))
        specs = [
            (name, info.dtype, info.shape, bytes(package.tensor(name)))
            for name, info in package.tensors.items()
        ]
    edit(data)
    write_package(
        out,
        data["graph"],
        data["facts"],
        [(name, dtype, shape, lambda c=c: c) for name, dtype, shape, c in tensors(specs)],  # type: ignore[misc]
        {},
        *(data[name] for name in ("generation", "quant", "support", "source")),
    )
    return out


def fact(name: str, value: object) -> Edit:
    return lambda manifest: manifest["facts"].update({name: value})


def attr(op: str, name: str, value: object, *, every: bool = True) -> Edit:
    def edit(manifest: dict[str, Any]) -> None:
        nodes = [node for node in manifest["graph"]["nodes"] if node["op"] == op]
        for node in nodes if every else nodes[:1]:
            node["attrs"][name] = value

    return edit


def node(which: str, **fields: object) -> Edit:
    """The first node of an op with other fields."""

    def edit(manifest: dict[str, Any]) -> None:
        next(n for n in manifest["graph"]["nodes"] if n["op"] == which).update(fields)

    return edit


def graph(**fields: object) -> Edit:
    return lambda manifest: manifest["graph"].update(fields)


def graph_input(name: str, **fields: object) -> Edit:
    return lambda manifest: manifest["graph"]["inputs"][name].update(fields)


def weight(name: str, **fields: object) -> Edit:
    return lambda manifest: manifest["graph"]["weights"][name].update(fields)


def test_a_compiled_package_passes(base: Path) -> None:
    with open_package(base) as package:
        assert model_graph(package).outputs == ["logits"]


IDS = "the fact eos_ids must be a list of token ids from 0 to 511, not "
CONTEXT = "the fact context_length must be a whole number from 1 to 2147483647, not "
CASES: list[tuple[Edit, str]] = [
    (fact("context_length", 2**40), CONTEXT + "1099511627776"),
    (fact("context_length", 0), CONTEXT + "0"),
    (fact("context_length", "512"), CONTEXT + "'512'"),
    (fact("context_length", True), CONTEXT + "True"),
    (lambda m: m["facts"].pop("context_length"), CONTEXT + "nothing"),
    (fact("eos_ids", [512]), IDS + r"\[512\]"),
    (fact("eos_ids", [-1]), IDS + r"\[-1\]"),
    (fact("eos_ids", [True]), IDS + r"\[True\]"),
    (fact("eos_ids", None), IDS + "None"),
    (fact("eos_ids", [0] * 513), IDS + r"\[0, 0"),
    (lambda m: m["facts"].pop("eos_ids"), IDS + "nothing"),
    (fact("bos_id", "x"), "the fact bos_id must be a token id or null, not 'x'"),
    (lambda m: m["facts"].update(bos_id=512, add_bos=True), "bos_id must be a token id from 0"),
    (fact("add_bos", 1), "the fact add_bos must be true or false, not 1"),
    (fact("token_strings", {"a": 1}), "the fact token_strings must be an object of texts"),
    (attr("attention", "layer", 0), r"both of layer 0"),
    (attr("attention", "layer", 99, every=False), "layer 0 needs both an append"),
    (attr("attention", "layer", -1), "layer must be a whole number from 0 to 2147483647, not -1"),
    (attr("qkv_append", "layer", 99, every=False), "layer 0 needs both an append"),
    (attr("attention", "kv_heads", 0), "kv_heads must be a whole number from 1"),
    (attr("attention", "kv_heads", 2), "9 heads, 2 KV heads"),
    (attr("attention", "kv_heads", 1), r"layer 0: kv_heads is 1 in layer0\.attention, but 3 in "),
    (attr("attention", "heads", 3.0), "heads must be a whole number from 1 to 2147483647, not 3.0"),
    (attr("attention", "window", -7), "window must be a whole number from 0"),
    (attr("attention", "window", "a"), "window must be a whole number from 0"),
    (attr("attention", "scale", "nan"), "scale must be a number from"),
    (attr("attention", "scale", 1e39), "scale must be a number from"),
    (attr("attention", "softcap", -1.0), "softcap must be a number from 0"),
    (attr("rms_norm", "eps", -5.0), "eps must be a number from 0"),
    (attr("rms_norm", "eps", True), "eps must be a number from 0.*not True"),
    (attr("qkv_append", "scale", [1.0]), r"scale must be a number .* not \(1\.0,\)"),
    (node("rms_norm", attrs={}), r"norm \(rms_norm\) lacks the attribute eps"),
    (node("embedding", inputs=["positions", TABLE]), "input 0 must be the graph input ids"),
    (graph(outputs=["embedding"]), r"outputs \['embedding'\] and 1 head\(s\)"),
    (graph(outputs=[]), r"one output, made by its one head; this one has the outputs \[\]"),
    (graph_input("ids", shape=["S"]), r"a model's inputs are ids \[T\].*not ids \[S\] int32"),
    (graph_input("positions", dtype="float"), r"not ids \[T\] int32, positions \[T\] float"),
    (graph_input("positions", shape=[7]), r"positions \[7\] int32"),
    (weight(TABLE, shape=[-512, 72]), r"\[-512, 72\] is no shape of positive whole numbers"),
    (weight(TABLE, shape=[512.0, 72]), r"\[512\.0, 72\] is no shape"),
    (weight(TABLE, shape=[4096, 72]), r"stored as F16 \[512, 72\].*fp16 \[4096, 72\] takes"),
    (weight("model.norm.weight", dtype="fp16"), "must be a weight in fp32"),
    (weight(DOWN, dtype="q4k"), r"down_proj\.weight: .* can't be stored as q4k"),
    (lambda m: m["graph"]["weights"].update(x=m["graph"]["weights"][TABLE]), "reads the weight x"),
]


@pytest.mark.parametrize(("edit", "message"), CASES)
def test_edited_manifests(base: Path, tmp_path: Path, edit: Edit, message: str) -> None:
    path = edited(base, tmp_path / "m.vxm", edit)
    with (
        open_package(path) as package,
        pytest.raises(PackageError, match=rf"m\.vxm: .*{message}"),
    ):
        model_graph(package)


@pytest.mark.parametrize(
    ("edit", "message"),
    (
        (weight(TABLE, dtype="fp8"), "weight format 'fp8' is unknown"),
        (node("linear", op="nope"), "no op named 'nope'"),
    ),
)
def test_unknown_formats_and_ops(base: Path, tmp_path: Path, edit: Edit, message: str) -> None:
    path = edited(base, tmp_path / "m.vxm", edit)
    with open_package(path) as package, pytest.raises(UnsupportedError, match=message):
        model_graph(package)


def changed(name: str, change: Callable[[Spec], Spec]) -> Callable[[list[Spec]], list[Spec]]:
    return lambda specs: [change(spec) if spec[0] == name else spec for spec in specs]


@pytest.mark.parametrize(
    ("tensors", "message"),
    (
        (
            changed(DOWN, lambda s: (s[0], s[1], (36, 128), s[3][: len(s[3]) // 2])),
            rf"tensor {DOWN} is stored as F16 \[36, 128\] \(9216 bytes\); the graph's fp16 "
            r"\[72, 128\] takes F16 \[72, 128\] \(18432 bytes\)",
        ),
        (changed(DOWN, lambda s: (s[0], "F32", s[2], s[3] * 2)), r"stored as F32 \[72, 128\]"),
        (changed(DOWN, lambda s: (s[0], s[1], s[2][::-1], s[3])), r"stored as F16 \[128, 72\]"),
        (changed(DOWN, lambda s: (s[0], "BF16", s[2], s[3])), r"stored as BF16 \[72, 128\]"),
        (lambda specs: [s for s in specs if s[0] != DOWN], rf"1 weight.*not stored: {DOWN}"),
        (lambda specs: [*specs, ("foo", "U8", (1,), b"x")], "1 stored tensor.*no weights: foo"),
    ),
)
def test_other_tensors(
    base: Path, tmp_path: Path, tensors: Callable[[list[Spec]], list[Spec]], message: str
) -> None:
    path = edited(base, tmp_path / "m.vxm", tensors=tensors)
    with open_package(path) as package, pytest.raises(PackageError, match=message):
        model_graph(package)


def test_check_reads_the_whole_model(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`hornito check` refuses a package that `run` would refuse."""
    assert main(["check", str(base)]) == 0
    without = edited(
        base, tmp_path / "m.vxm", tensors=lambda specs: [s for s in specs if s[0] != DOWN]
    )
    assert main(["check", str(without)]) == 2
    assert f"not stored: {DOWN}" in capsys.readouterr().err


def test_every_op_has_its_inputs_declared() -> None:
    assert tuple(sorted(INPUTS)) == registry.names()
    assert set(RULES) <= set(INPUTS)


def test_numbers_at_the_ends_of_a_range() -> None:
    good = {"layer": 0, "kv_heads": 1, "head_dim": (1 << 31) - 1}
    check_attributes(Node("kv_append", "n", (), (), good))
    for name, value in (("layer", 1 << 31), ("kv_heads", 0), ("head_dim", float("inf"))):
        with pytest.raises(FormatError, match=f"n .kv_append.: {name} must be a whole number"):
            check_attributes(Node("kv_append", "n", (), (), {**good, name: value}))
