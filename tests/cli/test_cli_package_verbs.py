"""inspect and verify on a small package; compile and devices on stand-ins."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hornito.cli.main import main
from hornito.package import write_package


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "m.vxm"
    write_package(
        path,
        {"nodes": [{"op": "linear"}, {"op": "rms_norm"}, {"op": "linear"}]},
        {"model_type": "llama", "layers": 2, "long": "x" * 300, "none": None},
        [("w", "F16", (2, 3), lambda: bytes(12)), ("n", "F32", (3,), lambda: bytes(12))],
        {"tokenizer.json": b"{}"},
        {"eos_token_id": [2]},
        {"weights": "fp16"},
        {},
        {"licence": "apache-2.0"},
    )
    return path


def test_inspect(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(package), "--tensors"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = dict(line.split(None, 1) for line in captured.out.splitlines() if line)
    assert lines["model_type"] == "llama"
    assert lines["source.licence"] == "apache-2.0"
    assert lines["generation.eos_token_id"] == "[2]"
    assert lines["long"] == "x" * 200 + "… (300 characters)"
    assert lines["weights"] == "2 tensors (1 F16, 1 F32), 0.0 kB"
    assert lines["operations"] == "3 nodes: 2 linear, 1 rms_norm"
    assert lines["w"].split()[:2] == ["F16", "2x3"]
    assert "none" not in lines


def test_inspect_json(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(package), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["bytes"] == package.stat().st_size
    assert data["facts"]["layers"] == 2 and data["operations"] == {"linear": 2, "rms_norm": 1}
    assert data["tensors"]["w"]["shape"] == [2, 3] and len(data["tensors"]["w"]["sha256"]) == 64
    assert data["blobs"] == {"tokenizer.json": 2}


def test_verify(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(package)]) == 0
    assert ": ok, 3 tensors and files" in capsys.readouterr().out
    data = bytearray(package.read_bytes())
    data[data.rindex(b"{}")] ^= 1
    package.write_bytes(data)
    assert main(["verify", str(package)]) == 1
    assert "1 damaged: blob:tokenizer.json" in capsys.readouterr().out
    assert main(["verify", str(package), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["bad"] == ["blob:tokenizer.json"]


def test_truncated_package_is_exit_2(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package.write_bytes(package.read_bytes()[:-1])
    assert main(["verify", str(package)]) == 2
    assert "truncated: tensor 'blob:tokenizer.json'" in capsys.readouterr().err


def test_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, str, str]] = []
    fields: dict[str, Any] = {
        "path": "o.vxm",
        "bytes": 270_100_000,
        "tensors_in_file": 272,
        "tensors_used": 271,
        "nodes": 99,
        "seconds": 8.26,
        "warnings": ["tensor 'x' is not used"],
        "support": {"summary": {"source_nodes": 0}},
    }

    def compile_source(
        src: str, out: str, *, weights: str, quantisation: object, progress: object
    ) -> SimpleNamespace:
        calls.append((src, out, weights))
        return SimpleNamespace(**fields, to_dict=lambda: fields)

    module = ModuleType("hornito.compiler")
    module.compile_source = compile_source  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hornito.compiler", module)
    report = tmp_path / "r.json"
    assert main(["compile", "m.gguf", "o.vxm", "--support-report", str(report)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "o.vxm: 270.1 MB in 8.3 s",
        "tensors: 271 of 272 in the file used; graph nodes: 99, all with a GPU kernel",
    ]
    assert captured.err == "hornito: warning: tensor 'x' is not used\n"
    assert json.loads(report.read_text()) == fields
    monkeypatch.setenv("HORNITO_WEIGHTS", "fp32")
    assert main(["compile", "m.gguf", "o.vxm", "--json"]) == 0
    del fields["support"]  # long: in the report's file only
    assert json.loads(capsys.readouterr().out) == fields
    assert calls == [("m.gguf", "o.vxm", None), ("m.gguf", "o.vxm", "fp32")]


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    index: int
    name: str
    usable: bool
    reason: str = ""
    kind: str = "discrete"
    driver_name: str = "drv"
    driver_info: str = "1.2"
    pci: str | None = None
    uuid: str = "00ff"


def test_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    device = pytest.importorskip("hornito.vk.device")
    found = [FakeDevice(0, "Big GPU", True), FakeDevice(1, "Old", False, "Vulkan 1.1")]
    monkeypatch.setattr(device, "list_devices", lambda: found, raising=False)
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["index", "0", "1"]
    assert lines[2].endswith("no: Vulkan 1.1")
    assert main(["devices", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["name"] == "Big GPU"
    found.pop(0)
    assert main(["devices"]) == 4
    assert "none of 1 Vulkan devices is usable" in capsys.readouterr().err
