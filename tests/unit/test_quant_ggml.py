"""Block formats against the `gguf` package: equal bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from hornito.quant.ggml import GGML_TYPES, BlockFormat, dequantise_rows, format_by_name

gguf = pytest.importorskip("gguf")

# gguf can't convert Q8_1 and states ggml's old size for it; it has a test of its own.
COMPARED = [fmt for fmt in GGML_TYPES.values() if fmt.name != "Q8_1"]


def reference(raw: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.dequantize(raw, gguf.GGMLQuantizationType(fmt.type_id)))


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == np.float32 and got.shape == want.shape
    np.testing.assert_array_equal(got.view(np.uint32), want.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("fmt", COMPARED, ids=lambda fmt: fmt.name)
def test_sizes_are_ggmls(fmt: BlockFormat) -> None:
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(fmt.type_id)]
    assert (fmt.block, fmt.nbytes) == (block, nbytes)
    assert gguf.GGMLQuantizationType(fmt.type_id).name == fmt.name


@pytest.mark.parametrize("fmt", COMPARED, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 3), (33, 5)])
def test_random_bytes(fmt: BlockFormat, rows: int, blocks: int) -> None:
    rng = np.random.default_rng(fmt.type_id * 1000 + rows)
    raw = rng.integers(0, 256, (rows, blocks * fmt.nbytes), dtype=np.uint8)
    got = dequantise_rows(raw, fmt, blocks * fmt.block)
    assert_same_bits(got, reference(raw, fmt))


@pytest.mark.parametrize("fmt", COMPARED, ids=lambda fmt: fmt.name)
def test_edge_bytes(fmt: BlockFormat) -> None:
    """All zeros and ones, and fp16 words that are infinite, subnormal or negative zero."""
    words = [0x0000, 0xFFFF, 0x7C00, 0xFC00, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0x3C00]
    raw = np.stack(
        [
            np.frombuffer((word.to_bytes(2, "little") * fmt.nbytes)[: fmt.nbytes], np.uint8)
            for word in words
        ]
    )
    assert_same_bits(dequantise_rows(raw, fmt, fmt.block), reference(raw, fmt))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16"])
def test_what_ggufs_quantiser_writes(name: str) -> None:
    rng = np.random.default_rng(5)
    values = (rng.standard_normal((9, 96)) * 3).astype(np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    fmt = format_by_name(name)
    packed = np.ascontiguousarray(raw).view(np.uint8).reshape(9, -1)
    got = dequantise_rows(packed, fmt, 96)
    assert_same_bits(got, reference(raw, fmt))
    assert np.abs(got - values).max() < 0.8


def test_q8_1_by_hand() -> None:
    """ggml's block_q8_1: fp16 scale, fp16 sum, 32 signed bytes."""
    quants = np.arange(-16, 16, dtype=np.int8)
    block = np.float16(0.25).tobytes() + np.float16(-4.0).tobytes() + quants.tobytes()
    raw = np.frombuffer(block, np.uint8).reshape(1, 36)
    got = dequantise_rows(raw, format_by_name("Q8_1"), 32)
    np.testing.assert_array_equal(got[0], quants.astype(np.float32) * 0.25)


def test_partial_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"33 columns are no multiple of Q4_0's 32"):
        format_by_name("Q4_0").row_bytes(33)
    with pytest.raises(KeyError):
        format_by_name("IQ2_XS")
