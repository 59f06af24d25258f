"""Storage types: sizes, exact repacks of GGUF blocks, and rounding to 8 and 4 bits."""

from __future__ import annotations

import numpy as np
import pytest

from hornito.errors import FormatError, UnsupportedError
from hornito.graph.graph import INT, Graph, Weight
from hornito.graph.shapes import T
from hornito.graph.storage import assign_formats, format_counts
from hornito.graph.weights import (
    ArrayData,
    ByteArray,
    FloatArray,
    InterleavedData,
    SlicedData,
    stack,
    stored_as,
)
from hornito.quant.formats import FORMATS, WeightFormat, format_of_blocks, weight_format
from hornito.quant.ggml import dequantise_rows, format_by_name
from hornito.quant.planes import from_blocks, to_floats
from hornito.quant.rounding import quantise
from hornito.quant.storage import pack, unpack

BLOCKED = [f for f in FORMATS.values() if f.ggml and f.quantised]


def packed(fmt: WeightFormat, data: ArrayData | Blocks) -> np.ndarray:
    return np.concatenate([np.frombuffer(piece, np.uint8) for piece in pack(fmt, data)])


class Blocks:
    """A matrix that a source holds as random blocks."""

    source_names = ("w",)

    def __init__(self, ggml: str, n: int, k: int, seed: int = 0) -> None:
        self.stored = ggml
        self.shape = (n, k)
        fmt = format_by_name(ggml)
        rng = np.random.default_rng(seed)
        self.raw = rng.integers(0, 256, (n, fmt.row_bytes(k)), np.uint8)

    def rows(self, start: int, stop: int) -> FloatArray:
        return dequantise_rows(self.raw[start:stop], format_by_name(self.stored), self.shape[1])

    def stored_rows(self, start: int, stop: int) -> ByteArray:
        return self.raw[start:stop]


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
    """A11: every block type of "Q4_K_M" files, to the bit, whatever its bytes; `dequantise_rows`
    is held to the gguf package's own conversion in test_quant_ggml."""
    source = Blocks(fmt.ggml, 33, 512)
    stored = packed(fmt, source)
    assert len(stored) == fmt.nbytes(source.shape)
    expected = source.rows(0, 33)
    assert np.array_equal(unpack(fmt, stored, source.shape).view(np.uint32), _bits(expected))
    some = unpack(fmt, stored, source.shape, 7, 20)
    assert np.array_equal(some.view(np.uint32), _bits(expected[7:20]))


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


def test_joined_tensors_keep_their_blocks() -> None:
    a, b = Blocks("Q4_1", 6, 64, 1), Blocks("Q4_1", 6, 64, 2)
    fmt = weight_format("int4m")
    for joined in (stack([a, b]), InterleavedData(a, b), SlicedData(stack([a, b]), 3, 9)):
        assert stored_as(joined) == "Q4_1"
        found = unpack(fmt, packed(fmt, joined), joined.shape)  # type: ignore[arg-type]
        assert np.array_equal(_bits(found), _bits(joined.rows(0, joined.shape[0])))
    odd = InterleavedData(a, b)
    assert np.array_equal(odd.stored_rows(3, 8), np.stack([a.raw, b.raw], 1).reshape(12, -1)[3:8])
    assert stored_as(stack([a, Blocks("Q8_0", 6, 64)])) == ""
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
    rows = packed_of("bf16", np.full((1, 2), np.nan, np.float32))
    assert np.isnan(unpack(weight_format("bf16"), rows, (1, 2))).all()


def packed_of(name: str, x: np.ndarray) -> np.ndarray:
    return packed(weight_format(name), ArrayData(x))


def error_of(name: str, x: np.ndarray) -> float:
    """Relative root-mean-square error of rounding."""
    fmt = weight_format(name)
    found = to_floats(fmt, quantise(fmt, x)).reshape(x.shape)
    return float(np.sqrt(np.square(found - x).sum() / np.square(x).sum()))


def blocks_error(ggml: str, x: np.ndarray) -> float:
    """The same of the gguf package's rounding."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[ggml]
    found = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    return float(np.sqrt(np.square(found - x).sum() / np.square(x).sum()))


@pytest.mark.parametrize("shape", ["normal", "heavy tails"])
def test_rounding_loses_less_than_ggufs(shape: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((128, 512)).astype(np.float32)
    if shape != "normal":
        x = rng.standard_t(4, (128, 512)).astype(np.float32)
    x *= np.float32(0.02)
    assert error_of("int8", x) <= blocks_error("Q8_0", x)
    assert error_of("int4", x) <= 0.97 * blocks_error("Q4_0", x)
    assert error_of("int4m", x) <= 0.97 * blocks_error("Q4_1", x)
    assert error_of("int8", x) < error_of("int8g64", x) < error_of("int8g128", x) < 0.012
    assert error_of("int4", x) < error_of("int4g64", x) < error_of("int4g128", x) < 0.2


def test_rounding_of_special_groups() -> None:
    x = np.zeros((4, 32), np.float32)
    x[1] = 3.5
    x[2, 5] = -1e-9  # the scale is below the least fp16
    x[3] = 6e4
    for name in ("int8", "int4", "int4m"):
        fmt = weight_format(name)
        found = to_floats(fmt, quantise(fmt, x))
        assert np.isfinite(found).all()
        assert np.all(found[0] == 0) and np.abs(found[2]).max() < 1e-7
        assert np.allclose(found[[1, 3]], x[[1, 3]], rtol=4e-3), name
    with pytest.raises(UnsupportedError, match="q6k"):
        quantise(weight_format("q6k"), np.zeros((1, 256), np.float32))


def test_numbers_on_the_grid_come_back() -> None:
    """Integers times an fp16 scale, as in a package that is stored anew."""
    rng = np.random.default_rng(1)
    scales = rng.uniform(0.01, 0.02, (64, 1)).astype(np.float16).astype(np.float32)
    for name, low, high in (("int8", -127, 127), ("int4", -8, 7)):
        q = rng.integers(low, high + 1, (64, 32)).astype(np.float32)
        q[:, 3] = low
        fmt = weight_format(name)
        assert np.array_equal(to_floats(fmt, quantise(fmt, q * scales)), q * scales)


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
        data = Blocks(kind, 256, 256)
        graph.add_weight(name, Weight(data.shape, "fp32", data, matrix=True))
    x = graph.add("embedding", "x", ["ids", "table"])
    y = graph.add("position_embedding", "y", [x, "positions", "learned"])
    z = graph.add("linear", "z", [y, "w", "", ""])
    graph.add("linear", "out", [z, "v", "", ""])
    warnings = assign_formats(graph, "keep")
    chosen = {name: weight.dtype for name, weight in graph.weights.items()}
    assert chosen == {"table": "int8", "learned": "fp16", "w": "fp16", "v": "q6k"}
    assert warnings == ["stored as fp16 instead of Q3_K, 1 in all: w"]
    assert format_counts(graph)["q6k"] == {"matrices": 1, "bytes": 53760, "bits": 6.5625}
    assert assign_formats(graph, "int4") == []
    chosen = {name: weight.dtype for name, weight in graph.weights.items()}
    assert chosen == {"table": "int8g64", "learned": "fp16", "w": "int4", "v": "int4"}
