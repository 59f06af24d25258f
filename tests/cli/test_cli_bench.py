"""`hornito bench` and `hornito profile` on the tiny model: what they measure, not how fast."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import hornito
from gguf_samples import HF
from hornito import loading
from hornito.cli.main import main
from hornito.diag import bench as bench_module
from hornito.diag.bench import Test, step_weight_bytes
from hornito.diag.bench_report import NEAR_DEPTH, BenchRow, PeerRun
from hornito.diag.profile import REPEATS, profile
from hornito.diag.random_model import write_random_model
from hornito.diag.starts import measure_starts
from hornito.errors import FormatError, HornitoError, UsageError
from hornito.runtime import settle
from hornito.runtime.engine import Engine
from hornito.vk import timing
from hornito.vk.record import Recorder
from tree import own_cache

Updates = Sequence[tuple[str, int, bytes]]

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with own_cache(tmp_path_factory):
        yield


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("package") / "tiny.vxm"
    assert main(["compile", str(HF / "llama-tiny"), str(path)]) == 0
    return str(path)


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    quick = ["--no-start"] if arguments[0] == "bench" else []
    assert main([*arguments, *quick, "--context", "256"]) == 0
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
        assert 0 < row["least_ms"] <= row["median_ms"] <= row["p90_ms"]
        if row["test"].startswith("pp"):
            assert row["least"] * 0.99 <= speed <= row["p90"] * 1.01
        assert row["host_us"] > 0 and row["peer"] is None
        moved = row["median"] * report["step_bytes"] / 1e9
        assert row["gbps"] == (pytest.approx(moved) if row["test"].startswith("tg") else None)
    assert report["weights"] == "fp16" and report["precision"] == "normal"
    assert report["kv"] == "fp16" and report["context"] == 256 and report["runs"] == 2
    assert report["device"] and report["load_seconds"] > 0 and report["device_bytes"] > 100_000
    assert 0 < report["anonymous_bytes"] < report["max_rss_bytes"] * 2
    assert report["cold_start_seconds"] is None


def test_bench_as_a_table(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    given = ["-p", "16", "-n", "4", "-r", "9", "--context", "256", "--no-start"]
    assert main(["bench", package, *given]) == 0
    text, err = capsys.readouterr()
    for test in ("pp16", "tg4"):  # on a slow machine progress stands between them
        assert re.search(rf"^{test}: [0-9.]+ tok/s$", err, re.MULTILINE)
    if "software" in text:
        assert "evaluates 200 tokens here (20 in each of 10 runs); shorter: -p 64" in err
    names = [name.strip() for name in text.splitlines()[2].split("|")]
    assert names[2:8] == ["tok/s", "slowest", "p90", "ms", "fastest", "p90 ms"]
    assert len(names) == len(text.splitlines()[4].split("|"))
    assert main(["bench", package, "-r", "1", *given[:4], *given[6:]]) == 0
    assert "software device evaluates" not in capsys.readouterr().err  # too few to speak of
    assert "| pp16 |" in text and "| tg4 |" in text
    assert "fp16 weights, normal, KV fp16, context 256" in text
    rows = out(capsys, "bench", package, "-p", "16", "-n", "0", "-r", "1", "-o", "csv")
    as_json = out(capsys, "bench", package, "-p", "16", "-n", "0", "-r", "1", "--json")
    assert [row["test"] for row in json.loads(as_json)["rows"]] == ["pp16"]
    (row,) = csv.DictReader(io.StringIO(rows))
    assert row["test"] == "pp16" and float(row["median"]) > 0


def test_cold_and_warm_starts(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    given = ["-p", "16", "-n", "0", "-r", "1", "--context", "64", "--json"]
    assert main(["bench", package, *given]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cold_start_seconds"] > 0 and report["warm_start_seconds"] > 0
    with pytest.raises(HornitoError, match=r"a start in a process of its own failed: .*no/such"):
        measure_starts("no/such.vxm", device="", context=64, precision="normal")


def test_the_usual_rows_and_what_is_left_out(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without options: pp512, tg128 and the deep prompt, of which nothing is dropped unsaid."""
    seen: list[Test] = []

    def refuse(llm: object, *, tests: list[Test], **keywords: object) -> None:
        seen.extend(tests)
        raise UsageError("measured enough")

    monkeypatch.setattr(bench_module, "bench", refuse)
    capsys.readouterr()
    assert main(["bench", package, "--context", "5000"]) == 2
    err = capsys.readouterr().err
    usual, deep = [(0, "pp", 512), (0, "tg", 128)], (4096, "pp", 512)
    if "software device" in err:
        assert "pp512@d4096 is left out on a software device; -d 0,4096 measures it" in err
        assert seen == usual
    else:
        assert seen == [*usual, deep]
    seen.clear()
    assert main(["bench", package, "--context", "256"]) == 2
    assert "pp512@d4096 is left out: the context has 256" in capsys.readouterr().err
    seen.clear()
    assert main(["bench", package, "-d", "0,4096", "-n", "0", "--context", "5000"]) == 2
    assert seen == [(0, "pp", 512), deep]
    assert main(["bench", package, "-p", "0", "--context", "256"]) == 2
    assert seen[2:] == [(0, "tg", 128)]


def test_a_peer_stands_beside(
    package: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    peer = tmp_path / "peer.json"
    rows = [
        {"test": "pp16", "tokens": 16, "depth": 0, "median": 200.0, "median_ms": 80.0},
        {"test": "tg32@d32", "tokens": 32, "depth": 32, "median": 50.0, "median_ms": 20.0},
    ]
    peer.write_text(json.dumps({"label": "the peer", "rows": rows}))
    command = ["bench", package, "-p", "16,8", "-n", "4", "-d", "0,100", "-r", "1"]
    report = json.loads(out(capsys, *command, "--compare", str(peer), "--json"))
    found = {row["test"]: (row["peer"], row["ratio"], row["median"]) for row in report["rows"]}
    assert report["peer"] == "the peer"
    assert found["pp16"][:2] == (200.0, found["pp16"][2] / 200)
    assert found["tg4"][:2] == (50.0, found["tg4"][2] / 50)  # 32 tokens deeper counts
    assert found["pp8"][:2] == found["pp16@d100"][:2] == (None, None)
    assert found["tg4@d100"][0] is None or NEAR_DEPTH >= 68
    table = out(capsys, *command, "--compare", str(peer))
    assert "| the peer | ratio |" in table and "| 200.0 |" in table
    # A report of our own is a peer as well.
    peer.write_text(json.dumps(report))
    assert PeerRun.read(peer).find(BenchRow("pp16", 16, 0, *[0.0] * 9)) == found["pp16"][2]
    for damage in ("{", "[]", '{"rows": []}', '{"rows": [{"test": "pp1"}]}', '{"rows": [3]}'):
        peer.write_text(damage)
        with pytest.raises(FormatError, match=r"peer\.json: "):
            PeerRun.read(peer)


def test_a_picture(package: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    text = out(capsys, "bench", package, "-n", "4", "-r", "1", "--plot", str(picture), "--json")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [row["test"] for row in json.loads(text)["rows"]] == ["pp32", "pp128", "tg4"]


def test_a_picture_without_matplotlib(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", package, "--plot", "x.png"]) == 2
    assert "pip install 'hornito[plot]'" in capsys.readouterr().err


def test_host_cost_of_decoding(package: str) -> None:
    """No device memory and next to no Python objects for a token, several steps a submission."""
    with hornito.load(package, context=256) as llm:
        llm.steps_per_submission = 16
        device = llm.engine.device
        first = bench_module._once(llm, 1, "tg", 64)
        held = device.allocated_bytes
        again = [bench_module._once(llm, 1, "tg", 64) for _ in range(3)]
        assert device.allocated_bytes == held
    assert len(first.tokens) == 64 and first.wall > first.thread > 0
    # The ids of the session are objects of their own, above 256; nothing else may grow with them.
    assert min(run.kept for run in again) / 64 < 4


def test_bench_beyond_the_context(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", package, "-d", "4096", "--context", "256"]) == 2
    assert "needs 4608 positions; the context has 256" in capsys.readouterr().err
    small = ["-p", "1", "-n", "1", "-r", "1", "--context", "1"]
    assert main(["bench", package, *small]) == 2
    said = capsys.readouterr().err
    assert "tg1 behind 1 token needs 2 positions; the context has 1. Load with --context 2" in said
    assert "pp1: " not in said, "nothing was measured"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["-p", "0", "-n", "0"], "-p 0 -n 0 leaves nothing to measure"),
        (["-p", "0,0", "-n", "0", "-d", "0,64"], "-p 0 -n 0 leaves nothing to measure"),
        (["--steps", "10000"], "--steps takes 1 to 128, not 10000"),
        (["--steps", "129"], "--steps takes 1 to 128, not 129"),
    ],
)
def test_what_can_not_be_measured_is_refused_before_a_model_is_loaded(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "no/such.vxm", *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("verb", ("bench", "profile"))
def test_kernels_are_proved_before_they_are_timed(
    package: str,
    verb: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that the load had no time for is not used until then: its twin would be timed."""
    done = []

    def prove(llm: hornito.LLM) -> str:
        assert llm.engine.trust.waiting
        done.append("proved")
        return "all proved"

    def measure(*arguments: object, **keywords: object) -> None:
        done.append("measured")
        raise UsageError("enough")

    monkeypatch.setattr(settle, "exempt", lambda caps: False)
    monkeypatch.setattr(loading, "KernelPolicy", partial(settle.KernelPolicy, budget_s=0.0))
    monkeypatch.setattr(hornito.LLM, "prove", prove)
    monkeypatch.setattr(f"hornito.diag.{verb}.{verb}", measure)
    assert main([verb, package, "--context", "256"]) == 2
    assert done == ["proved", "measured"]
    assert "had no time for\nhornito: all proved\n" in capsys.readouterr().err


def test_profile_covers_every_dispatch(
    package: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    report = json.loads(out(capsys, "profile", package, "--json", "--trace", str(trace)))
    assert report["copy_gbps"] > 0.1
    calls = {call["call"]: call for call in report["calls"]}
    assert set(calls) == {"chunk 64", "batch 1"}  # a chunk of 256 leaves no room for a step
    step = calls["batch 1"]
    assert step["depth"] == 193  # 512 do not fit: three chunks and the step
    for row in step["kernels"]:
        assert row["of_copy"] == pytest.approx(row["gbps"] / report["copy_gbps"])
    launches = sum(row["launches"] for row in step["kernels"])
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["tid"] == "batch 1"]
    assert launches == len(events) > 20
    total = sum(row["milliseconds"] for row in step["kernels"])
    assert total == pytest.approx(step["milliseconds"]) and total > 0
    for before, after in pairwise(events):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1e-3)


def test_a_profile_keeps_a_gpu_busy_with_one_and_the_same_step(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that raise the clock don't count, and no run goes on behind the last position."""
    monkeypatch.setattr(timing, "BUSY_SECONDS", 0.1)
    steps: list[bytes] = []
    submit = Engine.submit

    def seen(engine: Engine, updates: Updates, recordings: Sequence[Recorder]) -> int:
        if recordings and recordings[0].label == "timed":
            steps.extend(data for name, _, data in updates if name == "batch.rows")
        return submit(engine, updates, recordings)

    monkeypatch.setattr(Engine, "submit", seen)
    with hornito.load(package, context=129) as llm:
        device = llm.engine.device
        for kind in ("software", "discrete"):
            monkeypatch.setattr(device, "caps", replace(device.caps, device_kind=kind))
            steps.clear()
            call = profile(llm, 128)[-1]
            assert call.call == "batch 1" and call.depth == 129 and call.milliseconds > 0
            assert len(set(steps)) == 1
            assert np.frombuffer(steps[0], np.uint32)[1] == 128  # the position
            assert (len(steps) == REPEATS) == (kind == "software")


def test_bench_help_explains_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "beside the slowest run and the p90" in text
        and "host share this process's processor time" in text
    )


@pytest.mark.parametrize("weights", ["fp16", "int4"])
def test_a_step_reads_every_weight_but_the_table(tmp_path: Path, weights: str) -> None:
    path = tmp_path / "tiny.vxm"
    write_random_model("tiny", path, weights=weights, context=64)
    with hornito.load(path, context=64) as llm:
        plan = llm.engine.plan
        table = plan.weight_bytes["model.embed_tokens.weight"]
        assert step_weight_bytes(plan) == pytest.approx(sum(plan.weight_bytes.values()) - table)
