"""Damaged and hostile packages: an error that says what is wrong, never a crash or wrong data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hornito.errors import PackageError
from hornito.package import open_package, write_package
from hornito.package.format import ZERO_HASH

WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture
def good(tmp_path: Path) -> bytes:
    path = tmp_path / "good.vxm"
    write_package(
        path,
        {"nodes": [1, 2]},
        {"layers": 2},
        [("w", "F32", (4, 6), lambda: WEIGHT), ("v", "F16", (3,), lambda: bytes(6))],
        {"tokenizer.json": b"{}"},
        {},
        {},
        {},
        {"name": "x"},
    )
    return path.read_bytes()


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: dict[str, Any] | str, body: bytes, *, pad: int = 256) -> bytes:
    """A file with this header and a right header hash, so that later checks are reached."""
    if not isinstance(header, str):
        header = json.dumps(header, separators=(",", ":"))
    header = re.sub(r'"hornito\.sha256":"\w*"', f'"hornito.sha256":"{ZERO_HASH}"', header)
    text = header.encode()
    text += b" " * (-(8 + len(text)) % pad)
    digest = hashlib.sha256(text).hexdigest().encode()
    return len(text).to_bytes(8, "little") + text.replace(ZERO_HASH.encode(), digest, 1)\
        + body  # fmt: skip


def refuse(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.vxm"
    path.write_bytes(data)
    with pytest.raises(PackageError, match=message) as caught:
        open_package(path)
    assert "bad.vxm" in str(caught.value)


def test_rebuilding_the_good_one_is_accepted(tmp_path: Path, good: bytes) -> None:
    assert join(*split(good)) == good


def test_every_truncation_is_refused(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "bad.vxm"
    for size in [*range(0, len(good), 37), len(good) - 1]:
        path.write_bytes(good[:size])
        with pytest.raises(PackageError):
            open_package(path)


def test_trailing_bytes_are_refused(tmp_path: Path, good: bytes) -> None:
    refuse(tmp_path, good + b"\0", "the tensors end at byte")


def test_other_files(tmp_path: Path) -> None:
    refuse(tmp_path, b"GGUF" + bytes(100), "not a Hornito package")
    refuse(tmp_path, b"", "too few")
    plain = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    refuse(tmp_path, len(plain).to_bytes(8, "little") + plain + b"x", "but not a Hornito package")
    with pytest.raises(PackageError, match="No such file"):
        open_package(tmp_path / "absent.vxm")
    with pytest.raises(PackageError, match="directory"):
        open_package(tmp_path)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**8 + 1, 10**7])
def test_absurd_header_length(tmp_path: Path, good: bytes, length: int) -> None:
    refuse(tmp_path, length.to_bytes(8, "little") + good[8:], "not a Hornito|truncated")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"a":NaN}', "{" * 90_000, '{"a":' * 90_000, '{"a":' + "1" * 9000 + "}", '{"\xff'],
)
def test_bad_json(tmp_path: Path, text: str) -> None:
    raw = text.encode("latin-1")
    message = "JSON|not a Hornito"
    refuse(tmp_path, len(raw).to_bytes(8, "little") + raw + bytes(256), message)


def test_duplicate_names(tmp_path: Path, good: bytes) -> None:
    header, body = split(good)
    text = json.dumps(header, separators=(",", ":"))
    text = text[:-1] + ',"w":' + json.dumps(header["w"]) + "}"
    refuse(tmp_path, join(text, body), "'w' occurs twice")


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets header[a][b]... = value for a path 'a/b'; DELETE removes it."""

    def apply(header: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for key in parents:
            header = header[key]
        if value is None:
            del header[last]
        else:
            header[last] = value

    return apply


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("w/data_offsets", [0, 95]), "95 bytes, but its dtype and shape take 96"),
        (change("w/data_offsets", [1, 97]), "leaves a hole"),
        (change("v/data_offsets", [0, 6]), "overlaps|leaves a hole"),
        (change("v/data_offsets", [2**62, 2**62 + 6]), "truncated: tensor 'v' ends at byte"),
        (change("v/data_offsets", [-6, 0]), "no range"),
        (change("v/data_offsets", [256.0, 262.0]), "no range"),
        (change("v/data_offsets", [262, 256]), "no range"),
        (change("v/data_offsets", [256]), "no pair"),
        (change("v/data_offsets", "ab"), "no pair"),
        (change("w/dtype", "F16"), "96 bytes, but its dtype and shape take 48"),
        (change("w/dtype", "F7"), "unknown dtype"),
        (change("w/dtype", ["F32"]), "unknown dtype"),
        (change("w/shape", [2**40, 2**40]), "dtype and shape take"),
        (change("w/shape", [-4, -6]), "no positive number"),
        (change("w/shape", [True, 24]), "no positive number"),
        (change("w/shape", [1] * 9), "at most 8"),
        (change("w/shape", 24), "at most 8"),
        (change("w/extra", 1), "nothing else"),
        (change("w/dtype", None), "nothing else"),
        (change("w", 3), "nothing else"),
        (change("w", None), "leaves a hole"),
        (change("pad:0", None), "leaves a hole"),
        (change("__metadata__/hornito", None), "but not a Hornito package"),
        (change("__metadata__/hornito", "[]"), "not a JSON object"),
        (change("__metadata__/hornito", "{"), "not valid JSON"),
        (change("__metadata__/hornito.sha256", None), "no valid hornito.sha256"),
        (change("__metadata__", None), "but not a Hornito package"),
    ],
)
def test_wrong_headers(
    tmp_path: Path, good: bytes, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    header, body = split(good)
    edit(header)
    refuse(tmp_path, join(header, body), message)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("format_version", 2), r"made by a newer Hornito \(9\.1\).*version 2, .* up to 1"),
        (change("format_version", 0), "no valid format_version"),
        (change("format_version", "1"), "no valid format_version"),
        (change("format_version", True), "no valid format_version"),
        (change("format_version", None), "no valid format_version"),
        (change("graph", None), "'graph' is missing"),
        (change("facts", []), "'facts' is missing or no object"),
        (change("hornito_version", 3), "'hornito_version' is missing or no text"),
        (change("sha256/w", None), "tensor 'w' has no sha256"),
        (change("sha256/w", "abc"), "'w' has no valid sha256"),
        (change("sha256/ghost", "0" * 64), "names a tensor 'ghost' that is absent"),
    ],
)
def test_wrong_manifests(
    tmp_path: Path, good: bytes, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    header, body = split(good)
    manifest = json.loads(header["__metadata__"]["hornito"])
    manifest["hornito_version"] = "9.1"
    edit(manifest)
    header["__metadata__"]["hornito"] = json.dumps(manifest, separators=(",", ":"))
    refuse(tmp_path, join(header, body), message)


def test_misaligned_data(tmp_path: Path, good: bytes) -> None:
    header, body = split(good)
    data = join(header, body, pad=1)
    if (len(data) - len(body)) % 256 == 0:
        header["__metadata__"]["x"] = ""
        data = join(header, body, pad=1)
    refuse(tmp_path, data, "not aligned")


def test_misaligned_tensor(tmp_path: Path, good: bytes) -> None:
    header, body = split(good)
    header["pad:0"]["shape"] = [160 + 2]
    header["pad:0"]["data_offsets"][1] += 2
    header["v"] = {"dtype": "F16", "shape": [2], "data_offsets": [258, 262]}
    refuse(tmp_path, join(header, body), "'v' at byte .* is not aligned")


def test_a_flip_in_the_header_is_seen_at_open(tmp_path: Path, good: bytes) -> None:
    """Also where the JSON stays valid, as in a number of the graph."""
    position = good.index(b'\\"layers\\":2') + len(b'\\"layers\\":')
    refuse(tmp_path, good[:position] + b"3" + good[position + 1 :], "header is damaged")


def test_verify_names_the_damaged_tensor(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "bad.vxm"
    start = 8 + int.from_bytes(good[:8], "little")
    header, _ = split(good)
    for name in ("w", "v", "blob:tokenizer.json", "pad:0"):
        position = start + header[name]["data_offsets"][0]
        data = bytearray(good)
        data[position] ^= 0x10
        path.write_bytes(data)
        with open_package(path) as package:
            assert package.verify() == [name]


def test_random_damage_is_never_unseen(tmp_path: Path, good: bytes) -> None:
    """200 single-byte changes, spread over length field, header and data."""
    rng = np.random.default_rng(20)
    path = tmp_path / "bad.vxm"
    body_start = 8 + int.from_bytes(good[:8], "little")
    spans = [(0, 8), (8, body_start), (body_start, len(good))]
    for i in range(200):
        position = int(rng.integers(*spans[i % 3]))
        data = bytearray(good)
        data[position] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        try:
            with open_package(path) as package:
                assert package.verify(), f"byte {position} changed unseen"
        except PackageError:
            continue
