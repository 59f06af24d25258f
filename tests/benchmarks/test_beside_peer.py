"""`benchmarks/beside_peer.py` from end to end, with a peer of made-up timings."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from hornito.diag.random_model import write_random_model

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["-p", "8,16", "-n", "4", "-d", "8,40", "-r", "1", "--context", "128"]


def beside(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    """Run the driver on the tiny shape, with a cache of its own."""
    command = [sys.executable, str(ROOT / "benchmarks" / "beside_peer.py"), "tiny", "int4"]
    return subprocess.run(
        [*command, str(folder), *given],
        env={**os.environ, "HORNITO_CACHE": str(folder / "cache"), "HORNITO_DEVICE": "software"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """A folder with a stub of llama-server."""
    folder = tmp_path / "peer"
    folder.mkdir()
    stub = folder / "llama-server"
    stub.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("stub_peer.py")}" "$@"\n'
    )
    stub.chmod(0o755)
    return folder


@pytest.mark.gpu
@pytest.mark.software
def test_rounds_side_by_side(tmp_path: Path, peer: Path, kernels: None) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    options = ["--peer", str(peer), "--gguf", str(gguf), "--rounds", "2", "--no-prove"]
    more = ["--disable-feature", "subgroups"]
    run = beside(tmp_path, *options, *SHORT, *more, "--plot", str(tmp_path / "speed.png"))
    assert run.returncode == 0, run.stderr

    # The server was started once, and each case completed once before it counted twice.
    started, *calls = [json.loads(x) for x in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert started[started.index("-c") + 1] == "128"
    cases = [[8, 4], [16, 1], [40, 4]]
    assert calls == [case for _ in range(2) for case in cases for _ in range(3)]

    results = tmp_path / "tiny-int4"
    tests = ["pp8", "pp16", "tg4@d8", "tg4@d40"]
    reports = [json.loads((results / f"hornito-{i}.json").read_text()) for i in (1, 2)]
    for report in reports:
        assert [row["test"] for row in report["rows"]] == tests
        assert report["context"] == 128 and report["step_bytes"] > 1_000_000
    peers = [json.loads((results / f"peer-{i}.json").read_text()) for i in (1, 2)]
    assert peers[0] == peers[1] and peers[0]["label"] == "llama.cpp Vulkan"
    found = {row["test"]: row for row in peers[0]["rows"]}
    assert found["pp16"]["median_ms"] == 8.0 and found["tg4@d40"]["median"] == 200.0

    summary = json.loads((results / "summary.json").read_text())
    works: dict[str, Any] = {work["test"]: work for work in summary["works"]}
    assert list(works) == tests and summary["rounds"] == 2
    prompt, decode = works["pp16"], works["tg4@d40"]
    assert prompt["hornito"] == [report["rows"][1]["median_ms"] for report in reports]
    assert prompt["ratios"] == [8.0 / ms for ms in prompt["hornito"]]
    assert decode["ratios"] == [speed / 200 for speed in decode["hornito"]]
    assert decode["ratios_median"] == median(decode["ratios"]) and "gbps" not in prompt
    for work, report in zip(decode["gbps"], reports, strict=True):
        speed = report["rows"][3]["median"]
        assert work == pytest.approx(speed * report["step_bytes"] / 1e9)
    assert "| decode behind 40 tokens |" in run.stdout and "| 200.0 tok/s (200.0, 200.0) |" in (
        run.stdout
    )
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / "speed.png").exists() == drawn
    assert drawn or "speed.png is not drawn: --plot needs matplotlib" in run.stderr

    # Summary, table and picture again, from the rows alone.
    (results / "summary.json").unlink()
    again = beside(tmp_path, "--draw")
    assert again.returncode == 0 and again.stdout == run.stdout
    assert json.loads((results / "summary.json").read_text()) == summary
    assert (results / "speed.png").exists() == drawn


@pytest.mark.gpu
@pytest.mark.software
def test_without_a_peer(tmp_path: Path, kernels: None) -> None:
    run = beside(tmp_path, "--rounds", "1", "-p", "8", "-n", "2", "-d", "0", "-r", "1")
    assert run.returncode == 0, run.stderr
    summary = json.loads((tmp_path / "tiny-int4" / "summary.json").read_text())
    assert summary["peer"] is None and "peer" not in summary["works"][0]
    assert summary["proof_seconds"] > 0 and "proved in" in run.stderr
    assert "| work | Hornito | GB/s |" in run.stdout


@pytest.mark.gpu
@pytest.mark.software
def test_storage_types_in_turn(tmp_path: Path, kernels: None) -> None:
    for weights in ("fp16", "int4"):
        write_random_model("tiny", tmp_path / f"{weights}.vxm", weights=weights, context=128)
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "storage_types.py")]
        + [str(tmp_path / f"{weights}.vxm") for weights in ("fp16", "int4")]
        + ["--rounds", "2", "-n", "2", "-d", "3", "-r", "1", "--context", "128"]
        + ["-o", str(tmp_path / "types.json")],
        env={**os.environ, "HORNITO_CACHE": str(tmp_path), "HORNITO_DEVICE": "software"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    first, second = json.loads((tmp_path / "types.json").read_text())["packages"].values()
    assert first["ratio"] == 1.0 and first["step_bytes"] > 2 * second["step_bytes"]
    a, b = first["tokens_per_second"], second["tokens_per_second"]
    assert second["ratio"] == median(y / x for x, y in zip(a, b, strict=True)) and len(a) == 2
    assert f"| int4.vxm | {median(b):.1f} (" in run.stdout


@pytest.mark.gpu
@pytest.mark.software
def test_what_can_not_be_measured_leaves_earlier_rows(tmp_path: Path) -> None:
    results = tmp_path / "tiny-int4"
    results.mkdir()
    rows = [results / "hornito-1.json", results / "peer-1.json"]
    for path in rows:
        path.write_text("{}")
    model, program = tmp_path / "model.gguf", tmp_path / "llama-server"

    def refused(code: int, message: str, *given: str) -> None:
        wrong = beside(tmp_path, *given)
        assert wrong.returncode == code and message in wrong.stderr, wrong.stderr
        assert "Traceback" not in wrong.stderr and all(path.exists() for path in rows)

    refused(2, "no prompt of 0 tokens", "--peer", "nowhere", "-d", "0")
    refused(2, "-p: a prompt has at least 1 token", "-p", "0")
    with_peer = ["--peer", str(tmp_path), "--gguf", str(model), *SHORT]
    refused(2, f"--peer {tmp_path}: no program llama-server there", *with_peer)
    program.write_text("#!/bin/sh\necho no such device; exit 3\n")
    refused(2, f"--peer {tmp_path}: no program llama-server there", *with_peer)
    program.chmod(0o755)
    refused(2, "model.gguf: no such file", *with_peer)
    model.touch()
    refused(1, "beside_peer.py: llama-server ended with 3: no such device", *with_peer)
    program.write_text("no program\n")
    refused(1, "llama-server does not start: [Errno 8] Exec format error", *with_peer)
    refused(4, "'nosuch'", "--device", "nosuch", *SHORT)
    refused(2, "the longest row needs 4160 positions", "--context", "4000")
