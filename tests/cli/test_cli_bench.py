"""`hornito bench` and `hornito profile` on the tiny model: what they measure, not how fast."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from gguf_samples import HF
from hornito.cli.main import main

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("HORNITO_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("package") / "tiny.vxm"
    assert main(["compile", str(HF / "llama-tiny"), str(path)]) == 0
    return str(path)


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main([*arguments, "--context", "256"]) == 0
    return capsys.readouterr().out


def test_i8_bench_says_what_its_figures_depend_on(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = out(
        capsys, "bench", package, "-p", "32", "-n", "8", "-d", "0,100", "-r", "2", "-o", "json"
    )
    report = json.loads(text)
    assert [row["test"] for row in report["rows"]] == ["pp32", "tg8", "pp32@d100", "tg8@d100"]
    for row in report["rows"]:
        assert 0 < row["least"] <= row["median"] <= row["p90"]
        per = 1 if row["test"].startswith("pp") else row["tokens"]
        speed = row["tokens"] / (row["median_ms"] * per / 1e3)
        assert row["least"] * 0.99 <= speed <= row["p90"] * 1.01
    assert report["weights"] == "fp16" and report["precision"] == "normal"
    assert report["kv"] == "fp16" and report["context"] == 256 and report["runs"] == 2
    assert report["device"] and report["load_seconds"] > 0 and report["device_bytes"] > 100_000


def test_bench_as_a_table(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    given = ["-p", "16", "-n", "4", "-r", "1", "--context", "256"]
    assert main(["bench", package, *given]) == 0
    text, err = capsys.readouterr()
    assert re.search(r"^pp16: [0-9.]+ tok/s\ntg4: [0-9.]+ tok/s$", err, re.MULTILINE)
    if "software" in text:
        assert "evaluates 40 tokens here (20 in each of 2 runs)" in err and "-p 64 -n 16" in err
    assert "| pp16 |" in text and "| tg4 |" in text
    assert "fp16 weights, normal, KV fp16, context 256" in text
    rows = out(capsys, "bench", package, "-p", "16", "-n", "0", "-r", "1", "-o", "csv")
    as_json = out(capsys, "bench", package, "-p", "16", "-n", "0", "-r", "1", "--json")
    assert [row["test"] for row in json.loads(as_json)["rows"]] == ["pp16"]
    (row,) = csv.DictReader(io.StringIO(rows))
    assert row["test"] == "pp16" and float(row["median"]) > 0


def test_bench_beyond_the_context(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", package, "-d", "4096", "--context", "256"]) == 2
    assert "needs 4608 positions; the context has 256" in capsys.readouterr().err


def test_profile_covers_every_dispatch(
    package: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    text = out(capsys, "profile", package, "--depth", "100", "--json", "--trace", str(trace))
    report = json.loads(text)
    assert report["copy_gbps"] > 0.1
    calls = {call["call"]: call for call in report["calls"]}
    assert set(calls) == {"chunk 64", "batch 1"}  # a chunk of 256 leaves no room for a step
    step = calls["batch 1"]
    launches = sum(row["launches"] for row in step["kernels"])
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["tid"] == "batch 1"]
    assert launches == len(events) > 20
    total = sum(row["milliseconds"] for row in step["kernels"])
    assert total == pytest.approx(step["milliseconds"]) and total > 0
    for before, after in pairwise(events):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1e-3)


def test_bench_help_explains_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "least the slowest run" in text and "host share this process's processor time" in text
