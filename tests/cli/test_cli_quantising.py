"""The options of rounded weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from gguf_samples import HF
from hornito.cli.main import main
from hornito.cli.quantising import byte_size
from hornito.package import open_package

SOURCE = str(HF / "llama3-tiny")


def types(path: Path) -> set[str]:
    with open_package(path) as package:
        return {w["dtype"] for w in package.manifest.graph["weights"].values() if w["matrix"]}


def test_compile_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "m.vxm")
    assert main(["compile", "-Os", "--quant-samples", "0", SOURCE, out]) == 0
    assert types(Path(out)) == {"int4g64o8", "int4o8", "int8g64"}
    rest = ["--group", "32", "--table", "int4m", "--outliers", "0", "--quant-samples", "0"]
    assert main(["compile", "--weights", "int4m", *rest, SOURCE, out]) == 0
    assert types(Path(out)) == {"int4m"}
    capsys.readouterr()
    assert main(["compile", "-Os", "--quant-samples", "0", "--quant-err", "0.05", SOURCE, out]) == 0
    assert "stays int8: as int4g64o8 its outputs would be off by more than 5%" in (
        capsys.readouterr().err
    )
    rest = ["--target-size", "0.2M", "--quant-samples", "0", "--table", "int4"]
    assert main(["compile", "-Os", *rest, SOURCE, out]) == 0
    assert "int8" in types(Path(out)) and Path(out).stat().st_size < 300_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group", "48", "--weights", "int4"], "groups are 32, 64 or 128"),
        (["--outliers", "50", "--weights", "int4"], "from none to 20 %"),
        (["--group", "64", "--weights", "fp16"], "of int8, int4, int4m"),
        (["--table", "q4k", "-Os"], "tables can't be stored as 'q4k'"),
        (["-Os", "--target-size", "10k", "--quant-samples", "0"], "more than the target of"),
        (["-Os", "--target-size", "10 parsecs"], "is no size such as 300M"),
        (["-Os", "--calib", "/no/such/file"], "--calib /no/such/file"),
        (["-Os", "--quant-err", "2"], "the error limit lies between 0 and 1"),
    ],
)
def test_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.vxm"
    assert main(["compile", *options, SOURCE, str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_sizes() -> None:
    found = [byte_size(text) for text in ("300M", "0.25g", "12", "5 kB".replace(" ", ""))]
    assert found == [300_000_000, 250_000_000, 12, 5000]
