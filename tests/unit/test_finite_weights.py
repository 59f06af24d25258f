"""A NaN or an infinity in a checkpoint is an error that names the tensor, whatever the storage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from blocks import HALVES, Blocks
from hornito.cli.main import main
from hornito.errors import FormatError
from hornito.graph.finite import finite_rows
from hornito.graph.weights import (
    ArrayData,
    InterleavedData,
    ReorderedData,
    ShiftedData,
    SlicedData,
    StackedData,
    TransposedData,
    WeightData,
)
from hornito.quant.formats import weight_format
from hornito.quant.matrix import quantise_matrix
from hornito.quant.storage import pack
from tiny import write_llama

Floats = npt.NDArray[np.float32]

FORMATS = (
    *("int8", "int4", "int4m", "int8g64o8", "int4g64o8", "int4mg64o8"),
    *("fp16", "bf16", "fp32"),
)
BROKEN = "model.layers.0.self_attn.q_proj.weight"


def named(x: Floats, name: str) -> ArrayData:
    return ArrayData(x, (name,))


def random(rows: int, columns: int) -> Floats:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_every_storage_refuses_it(name: str, number: float) -> None:
    fmt = weight_format(name)
    x = random(5000, 256)  # several runs of rows, more than a sample of them
    x[4321, 7] = x[4400, 0] = number
    message = rf"tensor w\.weight holds {number} at row 4321, column 7"
    with pytest.raises(FormatError, match=message):
        list(pack(fmt, named(x, "w.weight")))
    if fmt.quantised:
        with pytest.raises(FormatError, match=message):
            quantise_matrix(fmt, named(x, "w.weight"))


@pytest.mark.parametrize("name", FORMATS)
def test_large_finite_numbers_are_taken(name: str) -> None:
    x = random(8, 256) * np.float32(1e17)
    assert sum(len(piece) for piece in pack(weight_format(name), ArrayData(x))) > 0


def test_the_place_is_that_of_the_source() -> None:
    whole, broken = random(6, 4), random(6, 4)
    broken[4, 1] = np.inf
    a, b = named(whole, "a"), named(broken, "b")
    made: list[tuple[WeightData, int]] = [
        (StackedData((a, b)), 12),
        (InterleavedData(a, b), 12),
        (SlicedData(b, 2, 6), 4),
        (ReorderedData(b, (1, 2, 0)), 6),
        (TransposedData(b), 4),
        (ShiftedData(StackedData((a, ReorderedData(b, (2, 1, 0)))), 1.0), 12),
    ]
    for data, rows in made:
        with pytest.raises(FormatError, match="tensor b holds inf at row 4, column 1"):
            finite_rows(data, 0, rows)
    vector = named(np.array([1, np.nan], np.float32), "norm")
    with pytest.raises(FormatError, match=r"tensor norm holds nan at \[1\]"):
        finite_rows(vector, 0, 2)
    with pytest.raises(FormatError, match=r"tensor of shape \[6, 4\] holds inf at row 4"):
        finite_rows(ArrayData(broken), 0, 6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["int8", "int4", "int4m", "q5", "q5m", "q4k", "q5k", "q6k"])
def test_scales_of_blocks(name: str) -> None:
    fmt = weight_format(name)
    for at in HALVES[fmt.ggml]:
        data = Blocks(fmt.ggml, (8, 512), name="blk.0.attn_q.weight")
        assert sum(len(x) for x in pack(fmt, data)) == fmt.nbytes(data.shape)
        data.spoil(5, 1, at)
        message = r"tensor blk\.0\.attn_q\.weight holds (nan|inf|-inf) at row 5, column"
        with pytest.raises(FormatError, match=message):
            list(pack(fmt, data))


@pytest.mark.parametrize("weights", ["int8", "int4", "fp16", "fp32"])
def test_compile_names_the_tensor(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = write_llama(tmp_path / "m", vocabulary=512)[BROKEN]
    matrix[3, 5] = np.nan
    write_llama(tmp_path / "m", vocabulary=512, tensors={BROKEN: matrix})
    out = tmp_path / "m.vxm"
    quick = ["--quant-samples", "0"] if weights.startswith("int") else []
    assert main(["compile", str(tmp_path / "m"), str(out), "--weights", weights, *quick]) == 2
    assert f"tensor {BROKEN} holds nan at row 3, column 5" in capsys.readouterr().err
    assert not out.exists()
