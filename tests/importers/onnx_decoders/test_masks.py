"""What mask chains mean, against the masks themselves computed for small calls."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx
from onnx import numpy_helper

from hornito.errors import UnsupportedError
from hornito.importers import open_source
from hornito.importers.onnx.affine import N, P
from hornito.importers.onnx.match.masks import combine, meaning
from hornito.importers.onnx.values import Atom, Mask, Unmatched
from onnx_decoder import DIM, HEADS, KV_HEADS, Decoder, random_ids, run_graph, run_runtime, save
from onnx_samples import unpack

TRUE = np.array([False, True])
CAUSAL = Atom("ge0", P, (1, -1))  # row + P - slot >= 0
VALID = Atom("valid", 0, (0, 1))
SHAPE = (N, P + N)


def near(window: int) -> Atom:
    """slot > position - window."""
    return Atom("ge0", P * -1 + (window - 1), (-1, 1))


def truth(*atoms: Atom) -> Mask:
    result = Mask(SHAPE, (), np.array(True))
    for atom in atoms:
        result = combine(np.logical_and, [result, Mask(SHAPE, (atom,), TRUE)])
    return result


def computed(mask: Mask, rows: int, past: int) -> np.ndarray[Any, Any]:
    """The mask for one call, every slot valid."""
    out = np.empty((rows, past + rows), mask.table.dtype)
    for i, j in itertools.product(range(rows), range(past + rows)):
        index = []
        for atom in mask.atoms:
            base = atom.base if isinstance(atom.base, int) else None
            if base is None:
                named = dict(atom.base.terms)  # type: ignore[union-attr]
                base = atom.base.const + named.get("P", 0) * past + named.get("N", 0) * rows  # type: ignore[union-attr]
            value = base + atom.steps[-2] * i + atom.steps[-1] * j
            index.append(int(atom.kind == "valid" or value >= 0))
        out[i, j] = mask.table[tuple(index)]
    return out


@pytest.mark.parametrize("window", [0, 1, 2, 5])
@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_the_meaning_is_the_mask(window: int, valid: bool, additive: bool) -> None:
    atoms = [CAUSAL] + ([near(window)] if window else []) + ([VALID] if valid else [])
    mask = truth(*atoms)
    if additive:
        low = Mask((), (), np.array(-np.inf))
        mask = combine(np.where, [mask, Mask((), (), np.array(0.0)), low])
    found = meaning(mask, P)
    assert (found.window, found.key_valid) == (window, valid)
    for rows, past in ((1, 0), (4, 0), (1, 6), (3, 5)):
        seen = computed(mask, rows, past)
        position, slot = np.arange(past, past + rows)[:, None], np.arange(past + rows)[None]
        want = (slot <= position) & ((position - slot < window) | (window == 0))
        assert ((seen == 0) if additive else seen).tolist() == want.tolist()


def test_the_triangle_of_old_exports() -> None:
    """min above the diagonal of rows and slots, times slot > position."""
    upper = Mask(SHAPE, (Atom("ge0", -1, (-1, 1)),), np.array([0.0, -3.4e38]))
    beyond = Mask(SHAPE, (Atom("ge0", P * -1 + -1, (-1, 1)),), np.array([0.0, 1.0]))
    assert meaning(combine(np.multiply, [upper, beyond]), P).window == 0
    with pytest.raises(Unmatched, match="compares slots with rows"):
        meaning(upper, P)


def test_what_is_not_explained_is_refused() -> None:
    with pytest.raises(Unmatched, match="without a causal mask"):
        meaning(None, P)
    with pytest.raises(Unmatched, match="without a causal mask"):
        meaning(truth(VALID), P)
    with pytest.raises(Unmatched, match="without a causal mask"):
        meaning(truth(near(4)), P)
    ahead = Atom("ge0", P + 2, (1, -1))  # two keys ahead of the row
    with pytest.raises(Unmatched, match="without a causal mask"):
        meaning(truth(ahead), P)
    strict = Atom("ge0", P + -1, (1, -1))  # not even itself
    with pytest.raises(Unmatched, match="hides near keys"):
        meaning(truth(strict), P)
    with pytest.raises(Unmatched, match="a condition that is not explained"):
        meaning(truth(CAUSAL, Atom("ge0", 3, (0, -1))), P)  # only the first four slots
    with pytest.raises(Unmatched, match="a condition that is not explained"):
        meaning(truth(CAUSAL, Atom("ge0", -2, (1, 0))), P)
    slope = Mask(SHAPE, (CAUSAL,), np.array([-1e9, -0.25]))
    with pytest.raises(Unmatched, match=r"a mask that adds -0\.25 to scores"):
        meaning(slope, P)
    ignored = combine(
        np.logical_or, [truth(CAUSAL, VALID), truth(CAUSAL, near(2))]
    )  # near keys even where the attention mask hides them
    with pytest.raises(Unmatched, match="shows some keys that the attention mask hides"):
        meaning(ignored, P)


def changed(folder: Path, name: str, value: Any) -> Path:
    """mistral-tiny with another constant in its mask chain."""
    model = onnx.load(str(unpack("mistral-tiny", folder)))
    (node,) = (n for n in model.graph.node if n.op_type == "Constant" and n.output[0] == name)
    node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array(value, np.int64)))
    return save(model, folder / "changed.onnx")


def window_constant(folder: Path) -> str:
    model = onnx.load(str(unpack("mistral-tiny", folder)))
    (sub,) = (n for n in model.graph.node if n.op_type == "Sub" and n.name.startswith("/model/"))
    return str(sub.input[1])


def test_the_window_is_read_from_the_chain(tmp_path: Path) -> None:
    source = open_source(changed(tmp_path, window_constant(tmp_path), 11))
    assert source.builder is not None
    assert {n.attr("window") for n in source.builder("fp32") if n.op == "attention"} == {11}


def test_a_mask_node_that_is_not_explained_is_refused_by_name(tmp_path: Path) -> None:
    """`slot > position - W` turned round: only far keys are seen."""
    model = onnx.load(str(unpack("mistral-tiny", tmp_path)))
    for node in model.graph.node:
        if node.op_type == "Greater":
            node.op_type = "Less"
    with pytest.raises(UnsupportedError) as caught:
        open_source(save(model, tmp_path / "changed.onnx"))
    assert "/self_attn/MatMul_1 (MatMul): a mask that hides near keys" in str(caught.value)


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
def test_a_triangle_that_is_stored(tmp_path: Path, dtype: Any) -> None:
    """Eager exports of GPT-2 (here of opset 13): the causal mask of all positions is a constant,
    of which rows P to N + P are taken; its size is the model's context."""
    pytest.importorskip("onnxruntime")
    d = Decoder(opset=13, seed=40)
    x, _, q, k, v = d.start()
    parts = [
        d.op("Transpose", [d.op("Reshape", [p, d.ints(0, 0, n, DIM)])], perm=[0, 2, 1, 3])
        for p, n in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS))
    ]
    group = HEADS // KV_HEADS
    cached = [
        d.op("Concat", [old, new], axis=2, outputs=[f"present.0.{name}"])
        for old, new, name in zip(d.past(), parts[1:], ("key", "value"), strict=True)
    ]
    keys, values = (
        d.op("Gather", [c, d.ints(*(h // group for h in range(HEADS)))], axis=1) for c in cached
    )
    turned = d.op("Transpose", [keys], perm=[0, 1, 3, 2])
    scores = d.op("Mul", [d.op("MatMul", [parts[0], turned]), d.const("s", 0.25, np.float32)])
    new = d.op("Gather", [d.op("Shape", ["input_ids"]), d.ints(1)], axis=0)
    total = d.op("Gather", [d.op("Shape", ["attention_mask"]), d.ints(1)], axis=0)
    triangle = d.const("triangle", np.tri(48)[None, None], dtype)
    rows = d.op("Slice", [triangle, d.op("Sub", [total, new]), total, d.ints(2)])
    seen = d.op("Cast", [d.op("Slice", [rows, d.ints(0), total, d.ints(3)])], to=9)
    masked = d.op("Where", [seen, scores, d.const("low", -1e9, np.float32)])
    y = d.op("MatMul", [d.op("Softmax", [masked], axis=-1), values])
    y = d.op("Reshape", [d.op("Transpose", [y], perm=[0, 2, 1, 3]), d.ints(0, 0, HEADS * DIM)])
    d.finish(x, y)
    model = d.build()
    source = open_source(save(model, tmp_path / "model.onnx"))
    assert source.config["max_position_embeddings"] == 48
    assert source.builder is not None
    ids = random_ids(12)
    want = run_runtime(model, ids, [7, 1, 4])
    got = run_graph(source.builder("fp32"), ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
