"""`hornito doctor --full`: the conformance report, of a device that is well and of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from faults import lose
from hornito.cli.main import main
from hornito.diag import conformance, random_model
from hornito.diag.conformance import examine_device
from hornito.plan.records import WRONG, DeviceRecords, Verdict, spirv_hash, verdict_key
from hornito.plan.selftest import RUNS
from hornito.progress import NullProgress
from hornito.vk.device import open_device
from tiny import Compiled

pytestmark = [pytest.mark.gpu, pytest.mark.software]

KERNEL = "linear/broadcast.f32"


@pytest.fixture(autouse=True)
def small(kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and one small model instead of four."""
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conformance, "TINY", ("fp32",))
    monkeypatch.setitem(random_model.SHAPES, "tiny", (64, 96, 1, 4, 2, 300, False))


def test_a_report_to_attach(
    tmp_path: Path, compiled: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    """D13: every kernel at all shapes of the generated model and of the user's own."""
    file = tmp_path / "report.json"
    package = str(compiled("llama-tiny"))
    command = ["doctor", "--full", package, "--context", "128", "-o", str(file)]
    assert main([*command, "--device", "software"]) == 0
    assert "conformance: pass" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["verdict"] == "pass" and report["problem"] == ""
    assert report["device"]["uuid"] and report["device"]["driver"]
    assert report["copy_gbps"] > 0
    tiny, own = report["models"]
    assert tiny["tokens_equal"] is True and own["tokens_equal"] is None
    for model in (tiny, own):
        assert model["repeatable"] and model["dropped"] == {}
        for row in model["kernels"]:
            assert row["verdict"] == "good" and row["runs"] >= RUNS
            assert row["microseconds"] > 0 and row["gbps"] > 0
            assert (row["tflops"] is not None) == row["kernel"].startswith("linear/")
    # What was proved here is on record for later loads.
    with open_device("software") as device:
        assert len(DeviceRecords.load(device.info).verdicts) >= len(tiny["kernels"])


def test_a_lost_device_ends_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_device("software") as device:
        lose(device, after=30)
        report = examine_device(device, NullProgress())
    assert "was lost" in report.problem and not report.usable
    assert report.to_dict()["verdict"] == "fail"
    assert "ended early" in report.to_text() and "FAIL" in report.to_text()


def test_dropped_kernels_are_named_everywhere(
    compiled: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_device("software") as device:
        records = DeviceRecords.load(device.info)
        records.verdicts[verdict_key(KERNEL, "s")] = Verdict(KERNEL, "s", WRONG, "by far", 20, 9.0)
        records.save()
    package = str(compiled("llama-tiny"))
    for command in (["inspect", package], ["check", package], ["doctor"]):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert KERNEL in out and "wrong: by far" in out, command


def test_dropped_kernels_get_another_chance() -> None:
    """What failed or has strikes at shapes of other models is tested again, and used when well."""
    other, ended = f"{spirv_hash(KERNEL)}:a", f"{spirv_hash('linear/gemv.f32')}:b"
    with open_device("software") as device:
        records = DeviceRecords.load(device.info)
        records.verdicts[verdict_key(KERNEL, "s")] = Verdict(KERNEL, "s", WRONG, "by far", 20, 9.0)
        records.strikes = {other: 2, ended: 2}
        records.save()
        report = examine_device(device, NullProgress())
        assert report.good and KERNEL in {row.kernel for row in report.models[0].kernels}
        after = DeviceRecords.load(device.info)
        assert verdict_key(KERNEL, "s") not in after.verdicts
        # No model of the doctor's has this one.
        assert after.strikes == {ended: 2}
        # One that ends the doctor too is not tried again: there would never be a report.
        after.strikes = {other: 3}
        after.save()
        report = examine_device(device, NullProgress())
        assert report.usable and KERNEL in report.models[0].dropped
        # The report after that tries again.
        after = DeviceRecords.load(device.info)
        assert after.strikes == {other: 2}
        # A report that ends early clears nothing.
        lose(device, after=30)
        assert examine_device(device, NullProgress()).problem
        assert DeviceRecords.load(device.info).strikes[other] == 2


def test_usage() -> None:
    assert main(["doctor", "some.vxm"]) == 2
    assert main(["doctor", "-o", "x.json"]) == 2
