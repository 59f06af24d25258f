"""The quality of a package: written into its manifest, and nothing else of it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from hornito.errors import HornitoError, PackageError
from hornito.package import open_package, store_quality, write_package, writer

QUALITY: dict[str, Any] = {"perplexity": 12.5, "text": "t.txt", "reference": {"weights": "fp32"}}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "m.vxm"
    data = np.arange(165, dtype=np.float16)
    write_package(
        path,
        {"nodes": []},
        {"model_type": "llama"},
        [("a", "F16", (33, 5), lambda: data), ("b", "F16", (5, 33), lambda: data[::-1].copy())],
        {"tokenizer.json": b"{}"},
        {},
        {"weights": "fp16"},
        {},
        {"name": "m"},
    )
    return path


def test_it_is_stored_and_everything_else_stays(package: Path) -> None:
    before = package.read_bytes()
    with open_package(package) as old:
        identity, start = old.manifest.identity(), old.data_start
        assert old.manifest.quality == {} and "quality" not in old.manifest.to_json()
        store_quality(package, {**QUALITY, "note": "x" * 5000})
        assert old.verify() == []  # whoever has it open keeps what they opened
    with open_package(package) as new:
        assert new.manifest.quality == {**QUALITY, "note": "x" * 5000}
        assert new.manifest.identity() == identity
        assert new.data_start > start and new.verify() == []
        data = package.read_bytes()
        assert data[new.data_start :] == before[start:]
        with safe_open(package, "np") as opened:  # type: ignore[no-untyped-call]
            assert opened.get_tensor("b")[0, 0] == 164
    store_quality(package, {})
    assert package.read_bytes() == before
    assert [path.name for path in package.parent.iterdir()] == ["m.vxm"]


def test_the_same_figures_give_the_same_bytes(package: Path) -> None:
    store_quality(package, QUALITY)
    first = package.read_bytes()
    store_quality(package, {"perplexity": 1.0})
    store_quality(package, QUALITY)
    assert package.read_bytes() == first


def test_a_link_leads_to_the_package(package: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.vxm"
    link.symlink_to(package)
    store_quality(link, QUALITY)
    assert link.is_symlink()
    with open_package(package) as opened:
        assert opened.manifest.quality == QUALITY


def test_a_full_disk_leaves_the_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = package.read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.shutil, "copyfileobj", full)
    with pytest.raises(
        HornitoError, match=r"can't write .*m\.vxm \([\d,]+ bytes\): No space left on device"
    ):
        store_quality(package, QUALITY)
    assert package.read_bytes() == before
    assert [path.name for path in package.parent.iterdir()] == ["m.vxm"]


def test_what_is_no_object_is_refused(package: Path) -> None:
    store_quality(package, {"perplexity": 1.0})
    # A NaN is no JSON, and a list no object.
    with pytest.raises(ValueError):
        store_quality(package, {"perplexity": float("nan")})
    store_quality(package, [1])  # type: ignore[arg-type]
    with pytest.raises(PackageError, match="'quality' is no object"):
        open_package(package)
