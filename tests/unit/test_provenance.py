"""The source of a package is found again where it was, or beside it, and only if it is the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hornito.compiler import compile_source
from hornito.package import open_package
from hornito.provenance import find_source, source_hash
from tiny import write_llama


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_source_is_found_while_it_is_the_same(tmp_path: Path, cache: Path) -> None:
    write_llama(tmp_path / "m", vocabulary=64)
    compile_source(tmp_path / "m", tmp_path / "m.vxm", weights="fp16")
    compile_source(tmp_path / "m.vxm", tmp_path / "again.vxm", weights="int8")
    for name in ("m", "again"):
        with open_package(tmp_path / f"{name}.vxm") as package:
            source = package.manifest.source
        assert source["file"] == "m" and source["sha256"] == source_hash(tmp_path / "m")
        assert str(tmp_path) not in str(source)
        assert find_source(source, []) == tmp_path / "m"
    # Moved, with an empty cache: beside the package.
    shutil.rmtree(cache)
    assert find_source(source, [tmp_path / "other"]) is None
    assert find_source(source, [tmp_path]) == tmp_path / "m"
    with (tmp_path / "m" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    assert find_source(source, [tmp_path]) is None


def test_a_source_is_the_same_in_every_folder(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        write_llama(tmp_path / name / "m", vocabulary=64)
        compile_source(tmp_path / name / "m", tmp_path / f"{name}.vxm", weights="fp16")
        with open_package(tmp_path / f"{name}.vxm") as package:
            found.append(package.manifest.source)
    assert found[0] == found[1]


@pytest.mark.parametrize("note", ["", "{}", '{"source": 5}', "[]"])
def test_damaged_notes_and_fields(tmp_path: Path, cache: Path, note: str) -> None:
    write_llama(tmp_path / "m", vocabulary=64)
    compile_source(tmp_path / "m", tmp_path / "m.vxm", weights="fp16")
    with open_package(tmp_path / "m.vxm") as package:
        source = package.manifest.source
    (path,) = (cache / "sources").iterdir()
    path.write_text(note)
    assert find_source(source, []) is None
    assert find_source({}, [tmp_path]) is None
    assert find_source({**source, "sha256": "../" * 9}, [tmp_path]) is None
    assert find_source({**source, "sha256": 5}, [tmp_path]) is None
