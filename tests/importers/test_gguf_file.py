"""The GGUF container: versions, and damaged or hostile headers."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from gguf_samples import write_checkpoint
from hornito.errors import FormatError, UnsupportedError, UsageError
from hornito.importers import open_source
from hornito.importers.gguf_file import read_gguf

U32, U64, STRING, ARRAY = 4, 10, 8, 9


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    head = text(name) + struct.pack("<I", len(dims))
    return head + b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", kind, offset)


def build(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    align: int = 32,
) -> bytes:
    keys, tensors = keys or [], tensors or []
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % align) + data


def read(tmp_path: Path, raw: bytes):  # type: ignore[no-untyped-def]
    path = tmp_path / "file.gguf"
    path.write_bytes(raw)
    return read_gguf(path)


ONE = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize("version", [2, 3])
def test_reads_both_versions(tmp_path: Path, version: int) -> None:
    keys = [
        key("a.number", U32, struct.pack("<I", 7)),
        key("a.text", STRING, text("héllo")),
        key("a.list", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("")),
        key("a.numbers", ARRAY, struct.pack("<IQ", 6, 3) + struct.pack("<3f", 1, 2, 3)),
        key("a.flags", ARRAY, struct.pack("<IQ", 7, 2) + b"\1\0"),
    ]
    file = read(tmp_path, build(keys, [tensor("t", [3, 2])], ONE.tobytes(), version=version))
    assert file.version == version
    assert file.metadata["a.number"] == 7 and file.metadata["a.text"] == "héllo"
    assert file.metadata["a.list"] == ["x", ""]
    assert file.metadata["a.numbers"].tolist() == [1.0, 2.0, 3.0]
    assert file.metadata["a.flags"].tolist() == [True, False]
    assert file.tensors["t"].shape == (2, 3)
    assert file.tensors["t"].data.view("<f4").tolist() == ONE.tolist()


def test_alignment_key(tmp_path: Path) -> None:
    keys = [key("general.alignment", U32, struct.pack("<I", 128))]
    raw = build(keys, [tensor("t", [6])], ONE.tobytes(), align=128)
    assert read(tmp_path, raw).tensors["t"].data.view("<f4").tolist() == ONE.tolist()
    for bad in (0, 24, 3):
        keys = [key("general.alignment", U32, struct.pack("<I", bad))]
        with pytest.raises(FormatError, match=f"alignment is {bad}"):
            read(tmp_path, build(keys, [tensor("t", [6])], ONE.tobytes()))


HUGE = 2**63 - 1


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "not a file with content"),
        (b"GGU", "truncated"),
        (b"GGML" + bytes(40), "does not start with 'GGUF'"),
        (build(n_tensors=HUGE), "number of tensors is 9223372036854775807"),
        (build(n_keys=HUGE), "number of metadata keys is"),
        (build([struct.pack("<Q", HUGE) + bytes(8)]), "length of a metadata key is"),
        (build([key("k", STRING, struct.pack("<Q", HUGE))]), "length of k is"),
        (build([key("k", ARRAY, struct.pack("<IQ", 4, HUGE))]), "length of k is"),
        (build([key("k", ARRAY, struct.pack("<IQ", STRING, HUGE))]), "length of k is"),
        (build([key("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "unknown element type 9"),
        (build([key("k", 99, b"")]), "k has the unknown type 99"),
        (build([key("tokenizer.x", STRING, struct.pack("<Q", 1) + b"\xff")]), "not valid UTF-8"),
        (build([key("k", U32, bytes(4))] * 2), "the key k stands there twice"),
        (build(tensors=[tensor("t", [])]), "'t' has 0 dimensions"),
        (build(tensors=[tensor("t", [1] * 5)]), "'t' has 5 dimensions"),
        (build(tensors=[tensor("t", [0])], data=bytes(64)), r"'t' has an empty shape \(0,\)"),
        (build(tensors=[tensor("t", [HUGE, HUGE])]), r"tensor 't' .* needs bytes"),
        (build(tensors=[tensor("t", [7])], data=ONE.tobytes()), r"tensor 't' \(7,\) F32 needs"),
        (build(tensors=[tensor("t", [6], 0, HUGE - 31)], data=ONE.tobytes()), "'t' .* needs bytes"),
        (build(tensors=[tensor("t", [2], 0, 4)], data=bytes(64)), "offset 4, no multiple of the"),
        (build(tensors=[tensor("t", [33], 2)], data=bytes(64)), "rows of 33 values, no multiple"),
        (build(tensors=[tensor("t", [6])] * 2, data=ONE.tobytes()), "'t' stands there twice"),
        (
            build(tensors=[tensor("a", [16]), tensor("b", [6], 0, 32)], data=bytes(96)),
            "'b' overlaps tensor 'a'",
        ),
    ],
)
def test_damaged_headers(tmp_path: Path, raw: bytes, what: str) -> None:
    with pytest.raises(FormatError, match=what) as error:
        read(tmp_path, raw)
    assert "file.gguf" in str(error.value)


def test_unsupported_versions_and_types(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="GGUF version 1 is not supported"):
        read(tmp_path, build(version=1))
    with pytest.raises(UnsupportedError, match="big-endian"):
        read(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(UnsupportedError, match=r"tensor 't' has the type IQ2_XS.*Supported types"):
        read(tmp_path, build(tensors=[tensor("t", [256], 17)], data=bytes(100)))
    with pytest.raises(UnsupportedError, match="the type number 1234"):
        read(tmp_path, build(tensors=[tensor("t", [256], 1234)], data=bytes(100)))


def test_truncation_at_every_byte(tmp_path: Path) -> None:
    """However much of a file is missing, the error says so and names the file."""
    pytest.importorskip("gguf")
    raw = write_checkpoint(tmp_path / "whole.gguf", "llama3-tiny").read_bytes()
    path = tmp_path / "cut.gguf"
    ends = [*range(0, 1600), *range(1600, len(raw) - 1, 4099), len(raw) - 1]
    for end in ends:
        path.write_bytes(raw[:end])
        with pytest.raises((FormatError, UnsupportedError)) as error:
            open_source(path, ["llama"])
        assert "cut.gguf" in str(error.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        open_source(tmp_path / "none.gguf")
    supported = r"without config\.json.*Supported: a Hornito package \(\.vxm\), a GGUF file"
    with pytest.raises(UnsupportedError, match=supported):
        open_source(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"PK\3\4 and so on")
    with pytest.raises(UnsupportedError, match="of no known format"):
        open_source(tmp_path / "x.bin")
