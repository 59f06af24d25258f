"""Storage types of a real model beside its fp32 tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from hornito.diag.quality_models import QualityOptions, measure_models
from hornito.package import open_package
from hornito.progress import NullProgress
from tree import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.model]


def test_kept_blocks_lose_nothing(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's own 4- and 8-bit blocks are its numbers: nothing but rounding of sums differs."""
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    text = str(ROOT / "benchmarks" / "data" / "alice.txt")
    options = QualityOptions(text=text, window=64, tokens=64)
    found, (one,), _ = measure_models([str(smollm2_gguf)], None, options, NullProgress())
    assert found.scored == 31 and one.weights == "keep" and one.bits < 6
    assert one.quality.kl_max < 1e-6 and one.quality.top1 == 1
    assert abs(one.quality.perplexity / one.quality.reference_perplexity - 1) < 1e-4
    assert 5 < one.quality.perplexity < 200
    with open_package(one.path) as package:
        assert package.manifest.quality == one.label
