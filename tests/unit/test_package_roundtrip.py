"""Writing and reading packages: content, layout, atomicity, memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hornito
from hornito.errors import HornitoError, PackageError
from hornito.package import FORMAT_VERSION, Package, open_package, write_package
from hornito.package.format import ALIGNMENT

RNG = np.random.default_rng(7)
EMBED = RNG.standard_normal((33, 5)).astype(np.float16)
NORM = RNG.standard_normal(5).astype(np.float32)
CODES = RNG.integers(0, 255, (3, 7), dtype=np.uint8)
TOKENIZER = b'{"model": "caf\xc3\xa9"}'
FIELDS: dict[str, Any] = {
    "graph_json": {"nodes": [{"op": "gather"}], "eps": 1e-5},
    "facts": {"model_type": "llama", "layers": 2, "eos_ids": [2]},
    "generation": {"temperature": 0.2},
    "quant": {"weights": "fp16"},
    "support": {"nodes": 3},
    "source": {"format": "gguf", "licence": "apache-2.0", "name": 'a "name" \\ é'},
}


def write(path: Path, **changes: Any) -> int:
    arguments: dict[str, Any] = {
        "tensors": [
            ("model.embed_tokens.weight", "F16", (33, 5), lambda: EMBED),
            ("model.norm.weight", "F32", (5,), lambda: iter([NORM.tobytes()[:8], NORM[2:]])),
            ("codes", "U8", (3, 7), lambda: memoryview(CODES)),
        ],
        "blobs": {"tokenizer.json": TOKENIZER, "chat_template.jinja": b"{{ x }}"},
        **FIELDS,
    }
    return write_package(path, **{**arguments, **changes})


def test_content_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "m.vxm"
    assert write(path) == path.stat().st_size
    with open_package(path) as package:
        manifest = package.manifest
        assert manifest.format_version == FORMAT_VERSION
        assert manifest.hornito_version == hornito.__version__
        assert manifest.graph == FIELDS["graph_json"]
        for name in ("facts", "generation", "quant", "support", "source"):
            assert getattr(manifest, name) == FIELDS[name]
        assert list(package.tensors) == ["model.embed_tokens.weight", "model.norm.weight", "codes"]
        info = package.tensors["model.embed_tokens.weight"]
        assert (info.dtype, info.shape, info.nbytes) == ("F16", (33, 5), 330)
        assert info.sha256 == hashlib.sha256(EMBED.tobytes()).hexdigest()
        view = package.tensor("model.embed_tokens.weight")
        assert view.readonly
        assert np.array_equal(np.frombuffer(view, np.float16).reshape(33, 5), EMBED)
        assert package.tensor("model.norm.weight") == NORM.tobytes()
        assert package.tensor("codes") == CODES.tobytes()
        assert package.blob("tokenizer.json") == TOKENIZER
        assert list(package.blobs) == ["tokenizer.json", "chat_template.jinja"]
        assert package.verify() == []


def test_layout_is_aligned_and_without_holes(tmp_path: Path) -> None:
    path = tmp_path / "m.vxm"
    write(path)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert (8 + length) % ALIGNMENT == 0
    header = json.loads(raw[8 : 8 + length])
    position = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        assert begin == position, name
        if name.startswith("pad:"):
            assert raw[8 + length + begin : 8 + length + end] == bytes(end - begin)
        else:
            assert (8 + length + begin) % ALIGNMENT == 0, name
        position = end
    assert 8 + length + position == len(raw)


def test_the_safetensors_library_opens_it(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = tmp_path / "m.vxm"
    write(path)
    with safe_open(path, framework="numpy") as file:
        assert json.loads(file.metadata()["hornito"])["format_version"] == FORMAT_VERSION
        assert np.array_equal(file.get_tensor("model.embed_tokens.weight"), EMBED)
        assert np.array_equal(file.get_tensor("model.norm.weight"), NORM)
        assert file.get_tensor("blob:tokenizer.json").tobytes() == TOKENIZER


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a.vxm")
    write(tmp_path / "b.vxm")
    assert (tmp_path / "a.vxm").read_bytes() == (tmp_path / "b.vxm").read_bytes()


def test_package_without_tensors(tmp_path: Path) -> None:
    write(tmp_path / "m.vxm", tensors=[], blobs={})
    with open_package(tmp_path / "m.vxm") as package:
        assert package.tensors == {} and package.blobs == {} and package.verify() == []


def test_data_is_pulled_piece_by_piece(tmp_path: Path) -> None:
    """Only one piece is alive at a time, and a tensor's data is asked for when its turn comes."""
    events: list[str] = []

    class Recorder:
        def start(self, label: str, total: int) -> None:
            events.append("start")

        def advance(self, n: int = 1) -> None:
            events.append(f"written {n}")

        def finish(self) -> None:
            events.append("finish")

    def pieces(name: str) -> Iterator[bytes]:
        for i in range(2):
            events.append(f"{name}{i}")
            yield bytes(256)

    tensors = [(name, "U8", (512,), lambda name=name: pieces(name)) for name in "ab"]
    write(tmp_path / "m.vxm", tensors=tensors, blobs={}, progress=Recorder())
    step = "written 256"
    assert [e for e in events if not re.fullmatch(r"written (?!256$)\d+", e)] == [
        "start", "a0", step, "a1", step, "b0", step, "b1", step, "finish",
    ]  # fmt: skip


@pytest.mark.parametrize("size", [0, 9, 11, 4096])
def test_wrong_amount_of_data_leaves_nothing(tmp_path: Path, size: int) -> None:
    tensors = [("w", "U8", (10,), lambda: bytes(size))]
    with pytest.raises(PackageError, match=r"'w'.* takes 10"):
        write(tmp_path / "m.vxm", tensors=tensors)
    assert list(tmp_path.iterdir()) == []


def test_failure_keeps_the_package_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "m.vxm"
    write(path)
    before = path.read_bytes()

    def broken() -> Iterator[bytes]:
        yield bytes(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, tensors=[("w", "U8", (10,), broken)])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.vxm"]


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("", "U8", (1,)),
        ("__metadata__", "U8", (1,)),
        ("pad:0", "U8", (1,)),
        ("blob:tokenizer.json", "U8", (1,)),
        ("w", "F64", (1,)),
        ("w", "U8", (1, 0)),
        ("w", "U8", (1,) * 9),
    ],
)
def test_bad_tensors_are_refused(
    tmp_path: Path, name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(PackageError):
        write(tmp_path / "m.vxm", tensors=[(name, dtype, shape, lambda: b"x")])
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_is_an_error_with_the_name(tmp_path: Path) -> None:
    with pytest.raises(HornitoError, match=r"no/m\.vxm"):
        write(tmp_path / "no" / "m.vxm")


def test_full_disk_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr("hornito.package.writer.shutil.disk_usage", lambda _: usage)
    with pytest.raises(
        HornitoError, match=r"m\.vxm: it takes [\d,]+ bytes and .* has 1,000 bytes free"
    ):
        write(tmp_path / "m.vxm")
    assert list(tmp_path.iterdir()) == []


def test_views_outlive_close(tmp_path: Path) -> None:
    write(tmp_path / "m.vxm")
    package: Package = open_package(tmp_path / "m.vxm")
    view = package.tensor("codes")
    package.close()
    package.close()
    assert view == CODES.tobytes()
    with pytest.raises(PackageError, match="closed"):
        package.tensor("codes")


def test_unknown_names(tmp_path: Path) -> None:
    write(tmp_path / "m.vxm")
    with open_package(tmp_path / "m.vxm") as package:
        with pytest.raises(PackageError, match=r"no tensor 'blob:tokenizer\.json'"):
            package.tensor("blob:tokenizer.json")
        with pytest.raises(PackageError, match="no blob 'vocab'"):
            package.blob("vocab")
