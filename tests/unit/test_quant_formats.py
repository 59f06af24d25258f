"""Storage types: sizes, exact repacks of GGUF blocks, and which type a weight gets."""

from __future__ import annotations

import math

import numpy as np
import pytest

from blocks import Blocks
from hornito.compiler import build_graph
from hornito.diag.random_model import random_source
from hornito.errors import FormatError, UnsupportedError, UsageError
from hornito.graph.graph import INT, Graph, Weight
from hornito.graph.shapes import T
from hornito.graph.storage import Storage, assign_formats, format_counts
from hornito.graph.weights import (
    ArrayData,
    InterleavedData,
    SlicedData,
    stack,
    stored_as,
)
from hornito.plan.plan import weight_sizes
from hornito.quant.formats import FORMATS, WeightFormat, format_of_blocks, weight_format
from hornito.quant.ggml import format_by_name
from hornito.quant.planes import from_blocks
from hornito.quant.storage import pack, plain, unpack

BLOCKED = [f for f in FORMATS.values() if f.ggml and f.quantised]


def packed(fmt: WeightFormat, data: ArrayData | Blocks) -> np.ndarray:
    return np.concatenate([np.frombuffer(piece, np.uint8) for piece in pack(fmt, data)])


def test_sizes() -> None:
    """Bytes of a matrix; only what aligns planes to 16 bytes comes on top of a file's blocks."""
    assert weight_format("fp16").nbytes((3, 5)) == 30
    assert weight_format("bf16").nbytes((3, 5)) == 30
    assert weight_format("int8").nbytes((3, 32)) == 96 + 16
    assert weight_format("int4").nbytes((8, 64)) == 256 + 32
    for fmt in BLOCKED:
        rows = format_by_name(fmt.ggml).row_bytes(512) * 16
        assert fmt.nbytes((16, 512)) == rows, fmt.name
        assert fmt.bits == 8 * format_by_name(fmt.ggml).nbytes / fmt.block
    assert weight_format("int4g128").bits == 4.125 and weight_format("int8g64").bits == 8.25


def test_groups_that_do_not_divide_a_row_are_refused() -> None:
    for name, k in (("int8", 40), ("int4", 48), ("int4g64", 96), ("q4k", 896)):
        with pytest.raises(FormatError, match=rf"\(2, {k}\).*{name}.*multiple"):
            weight_format(name).nbytes((2, k))
    with pytest.raises(UnsupportedError, match="'int3' is unknown; known: fp32, fp16"):
        weight_format("int3")
    assert format_of_blocks("Q2_K") is None


@pytest.mark.parametrize("fmt", BLOCKED, ids=lambda fmt: fmt.name)
def test_a11_blocks_and_planes_are_the_same_numbers(fmt: WeightFormat) -> None:
    """A11: every block type of "Q4_K_M" files, to the bit; `dequantise_rows`
    is held to the gguf package's own conversion in test_quant_ggml."""
    source = Blocks(fmt.ggml, (33, 512))
    stored = packed(fmt, source)
    assert len(stored) == fmt.nbytes(source.shape)
    expected = source.rows(0, 33)
    assert np.array_equal(unpack(fmt, stored, source.shape).view(np.uint32), _bits(expected))
    some = unpack(fmt, stored, source.shape, 7, 20)
    assert np.array_equal(some.view(np.uint32), _bits(expected[7:20]))


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


def test_joined_tensors_keep_their_blocks() -> None:
    a, b = Blocks("Q4_1", (6, 64), seed=1), Blocks("Q4_1", (6, 64), seed=2)
    fmt = weight_format("int4m")
    for joined in (stack([a, b]), InterleavedData(a, b), SlicedData(stack([a, b]), 3, 9)):
        assert stored_as(joined) == "Q4_1"
        found = unpack(fmt, packed(fmt, joined), joined.shape)  # type: ignore[arg-type]
        assert np.array_equal(_bits(found), _bits(joined.rows(0, joined.shape[0])))
    odd = InterleavedData(a, b)
    assert np.array_equal(odd.stored_rows(3, 8), np.stack([a.raw, b.raw], 1).reshape(12, -1)[3:8])
    assert stored_as(stack([a, Blocks("Q8_0", (6, 64))])) == ""
    assert stored_as(ArrayData(np.zeros((2, 64), np.float32))) == ""


def test_plain_numbers() -> None:
    x = np.array([[1.0, -2.5, 1e6, 1e-7], [1.00390625, 3.0e38, -0.0, 0.1]], np.float32)
    assert np.array_equal(unpack(weight_format("fp32"), packed_of("fp32", x), x.shape), x)
    half = unpack(weight_format("fp16"), packed_of("fp16", x), x.shape)
    assert half[0, 2] == 65504 and half[1, 0] == np.float32(1.00390625)
    brain = unpack(weight_format("bf16"), packed_of("bf16", x), x.shape)
    assert np.array_equal(brain, unpack(weight_format("bf16"), packed_of("bf16", brain), x.shape))
    assert brain[1, 0] == 1.0  # halfway, to even
    assert np.all(np.abs(brain - x) <= np.abs(x) / 256)
    rows = plain(weight_format("bf16"), np.full((1, 2), np.nan, np.float32)).view(np.uint8)
    assert np.isnan(unpack(weight_format("bf16"), rows.reshape(-1), (1, 2))).all()


def packed_of(name: str, x: np.ndarray) -> np.ndarray:
    return packed(weight_format(name), ArrayData(x))


def test_repacked_bytes_do_not_depend_on_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = ArrayData(np.random.default_rng(2).standard_normal((33, 96)).astype(np.float32))
    for name in ("int8", "int4m", "bf16"):
        whole = packed(weight_format(name), x)
        monkeypatch.setattr("hornito.graph.weights.BLOCK_ELEMENTS", 960)
        assert np.array_equal(packed(weight_format(name), x), whole)
        monkeypatch.undo()


def test_planes_of_a_known_block() -> None:
    """Q4_1: weight i of the first half in low nibbles; here two neighbours share a byte."""
    block = np.zeros((1, 20), np.uint8)
    block[0, 4:] = (np.arange(16) % 16) | ((15 - np.arange(16)) << 4)
    body, scales = from_blocks(weight_format("int4m"), block)
    assert body[0, :3].tolist() == [0x10, 0x32, 0x54] and body[0, 8:10].tolist() == [0xEF, 0xCD]
    assert scales.shape == (1, 4)


def test_blocks_that_no_kernel_reads_become_fp16() -> None:
    """`keep` says so; learned positions are never cut into blocks."""
    graph = Graph()
    graph.add_input("ids", INT, (T,))
    graph.add_input("positions", INT, (T,))
    for name, kind in (("table", "Q8_0"), ("learned", "Q8_0"), ("w", "Q3_K"), ("v", "Q6_K")):
        data = Blocks(kind, (256, 256))
        graph.add_weight(name, Weight(data.shape, "fp32", data, matrix=True))
    x = graph.add("embedding", "x", ["ids", "table"])
    y = graph.add("position_embedding", "y", [x, "positions", "learned"])
    z = graph.add("linear", "z", [y, "w", "", ""])
    graph.add("linear", "out", [z, "v", "", ""])
    warnings = assign_formats(graph, Storage("keep"))
    chosen = {name: weight.dtype for name, weight in graph.weights.items()}
    assert chosen == {"table": "int8", "learned": "fp16", "w": "fp16", "v": "q6k"}
    assert warnings == ["stored as fp16 instead of Q3_K, 1 in all: w"]
    assert format_counts(graph)["q6k"] == {"matrices": 1, "bytes": 53760, "bits": 6.5625}
    assert assign_formats(graph, Storage("int4")) == []
    chosen = {name: weight.dtype for name, weight in graph.weights.items()}
    assert chosen == {"table": "int8g64", "learned": "fp16", "w": "int4g64o8", "v": "int4g64o8"}
    assert assign_formats(graph, Storage("int4", group=32, table="int4", outliers=0.05)) == []
    chosen = {name: weight.dtype for name, weight in graph.weights.items()}
    assert chosen == {"table": "int4o16", "learned": "fp16", "w": "int4o16", "v": "int4o16"}
    assert assign_formats(graph, Storage("int8", outliers=0.0)) == []
    assert {weight.dtype for name, weight in graph.weights.items() if name != "learned"} == {"int8"}


def test_groups_shrink_where_they_do_not_divide_a_row() -> None:
    """By rule: smaller groups, then the next larger type; outliers stay while there are groups."""
    graph = Graph()
    for k in (48, 64, 96, 192, 256):
        data = ArrayData(np.zeros((2, k), np.float32))
        graph.add_weight(str(k), Weight(data.shape, "fp32", data, matrix=True))
    warnings = assign_formats(graph, Storage("int4m", group=128))
    chosen = {name: weight.dtype for name, weight in graph.weights.items()}
    assert chosen == {
        "48": "fp16",
        "64": "int4mg64o8",
        "96": "int4mo8",
        "192": "int4mg64o8",
        "256": "int4mg128o8",
    }
    assert warnings == ["stored as fp16 instead of int4mg128, 1 in all: 48"]


def test_choices_that_do_not_go_together() -> None:
    for wrong in (
        {"weights": "int3"},
        {"weights": "fp16", "group": 64},
        {"weights": "int4", "group": 16},
        {"weights": "int4", "outliers": 0.5},
        {"weights": "keep", "outliers": 0.01},
        {"weights": "int4", "table": "q6k"},
    ):
        with pytest.raises(UsageError):
            Storage(**wrong)


def test_outliers_are_planes_of_a_format() -> None:
    """Numbers of some columns as fp16, and which columns those are, behind the scales."""
    fmt = weight_format("int4g64o16")
    assert fmt.with_outliers(0) == FORMATS["int4g64"] and fmt.with_outliers(16) == fmt
    assert fmt.plane_sizes((24, 576)) == [6912, 432, 24 * 16 * 2, 64]
    assert weight_format("int4o8").with_outliers(0).ggml == "Q4_0"
    for name in ("int4o7", "q5o8", "int4o0", "int4o08", "o8"):
        with pytest.raises((FormatError, UnsupportedError)):
            weight_format(name)
    assert not weight_format("int8o64").fits((2, 32))


@pytest.mark.parametrize(
    ("storage", "most"),
    [
        (Storage("fp16"), 0.99e9),
        (Storage("int8"), 0.53e9),
        (Storage("int4"), 0.345e9),
        (Storage("int4m"), 0.36e9),
        (Storage("int4", table="int4"), 0.29e9),
        (Storage("int4", group=32, table="int4"), 0.29e9),
    ],
)
def test_sizes_of_a_half_billion_weights(storage: Storage, most: float) -> None:
    """Bytes of the tensors of a model of Qwen2.5-0.5B's shape, outliers and alignment included; the
    tied table is there once."""
    graph, _, _ = build_graph(random_source("0.5b", 8192, 0.02), storage)
    total = sum(-(-size // 256) * 256 for size in weight_sizes(graph).values())
    weights = sum(math.prod(w.shape) for w in graph.weights.values())
    assert 490e6 < weights < 500e6
    assert total <= most
