"""A driver whose compiler, or whose GPU program, ends the process: the next one does without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hornito.plan.attempts import Attempts, left_behind
from hornito.plan.records import (
    DeviceRecords,
    dropped_here,
    failed_kernels,
    pipeline_mark,
    spirv_hash,
)
from hornito.runtime import settle
from hornito.runtime.engine import Engine
from hornito.runtime.settle import KernelPolicy
from hornito.vk.device import Device
from tiny import Compiled, check_answer, kernels_of, open_engine
from tree import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.software]

VARIANT = "linear/broadcast.f32"
ONE_CHUNK = {"context": 128, "chunk_rows": (16,)}

LOAD = """
import os, sys, time
import hornito
from hornito.plan import recording, stand
from hornito.runtime import settle
from hornito.runtime.settle import KernelPolicy
from hornito.vk.device import Device
from tiny import open_engine

place, package, variant = sys.argv[1:]
made, record = Device.pipeline, stand.Stand._record

def pipeline(self, spirv, *, name, **more):
    if name == variant and place == "pipeline":
        os._exit(134)  # as abort() does
    if name == variant and place == "slow":
        print("making", flush=True)
        time.sleep(60)
    return made(self, spirv, name=name, **more)

def recorded(self, layout, dispatches, *more):
    if any(d.kernel == variant for d in dispatches):
        if place == "test":
            os._exit(139)
        if place == "interrupt":
            raise KeyboardInterrupt
    return record(self, layout, dispatches, *more)

Device.pipeline, stand.Stand._record = pipeline, recorded
settle.exempt = lambda caps: place in ("pipeline", "slow")
policy = KernelPolicy(budget_s=None)
with hornito.vk.device.open_device("software") as device:
    with open_engine(device, package, policy=policy, context=128, chunk_rows=(16,)) as engine:
        print("loaded", variant in {d.kernel for d in engine.plan.distinct()})
"""


BESIDE = """
import sys, threading, time
from pathlib import Path
from hornito.cli import list, main
from hornito.plan.attempts import Attempts

def test():
    with Attempts(Path(sys.argv[1])).trying("mark"):
        print("making", flush=True)
        time.sleep(60)

def run(arguments):
    threading.Thread(target=test, daemon=True).start()
    return len(sys.stdin.read())

list.run = run
sys.exit(main.main(["list"]))
"""
"""A verb whose main thread waits for input while another one tests a kernel."""


DOCTOR = """
import os, sys
from hornito.cli.main import main
from hornito.vk.device import Device

made = Device.pipeline

def pipeline(self, spirv, *, name, **more):
    if name == sys.argv[1]:
        os._exit(134)
    return made(self, spirv, name=name, **more)

Device.pipeline = pipeline
sys.exit(main(["doctor"]))
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    paths = f"{ROOT / 'tests'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def load(place: str, package: Path) -> subprocess.CompletedProcess[str]:
    """A process that loads, with a driver that ends it at a place."""
    process = start(LOAD, place, str(package), VARIANT)
    out, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def end_amid(process: subprocess.Popen[str], *numbers: signal.Signals) -> int:
    """Signals for a process while it is busy with a kernel; its exit status."""
    assert process.stdout is not None
    assert process.stdout.readline() == "making\n"
    for number in numbers:
        process.send_signal(number)
    process.communicate()
    return process.returncode


def marks_of(engine: Engine) -> set[str]:
    """The acts of making the variant's pipelines."""
    return {pipeline_mark(d) for d in engine.plan.distinct() if d.kernel == VARIANT}


def struck() -> int:
    """The most strikes against an act with the variant, on any device."""
    (path,) = Path(os.environ["HORNITO_CACHE"]).glob("kernels-*.json")
    records = DeviceRecords(path)
    records._read()
    counts = [n for mark, n in records.strikes.items() if mark.startswith(spirv_hash(VARIANT))]
    return max(counts, default=0)


@pytest.mark.parametrize(("place", "code"), [("pipeline", 134), ("test", 139)])
def test_d18_a_kernel_that_ends_the_process_is_not_tried_for_ever(
    cache: Path, fresh: Device, compiled: Compiled, place: str, code: int
) -> None:
    package = compiled("llama-tiny")
    for _ in range(2):
        ended = load(place, package)
        assert ended.returncode == code, ended.stderr
    later = load(place, package)
    assert (later.returncode, later.stdout) == (0, "loaded False\n"), later.stderr
    # It stays so.
    with open_engine(fresh, package, **ONE_CHUNK) as engine:
        assert "2 processes ended" in engine.trust.dropped[VARIANT]
        assert VARIANT in engine.trust.line and VARIANT not in kernels_of(engine)
        check_answer(engine)
    assert VARIANT in dropped_here() and VARIANT in failed_kernels(DeviceRecords.load(fresh.info))


def test_one_end_is_no_proof(cache: Path, fresh: Device, compiled: Compiled) -> None:
    """The process may have been killed: the kernel is used, and being well clears it."""
    package = compiled("llama-tiny")
    for _ in range(2):
        assert load("pipeline", package).returncode == 134
        assert list(DeviceRecords.load(fresh.info).strikes.values()) == [1] and struck() == 1
        with open_engine(fresh, package, **ONE_CHUNK) as engine:
            assert VARIANT in kernels_of(engine) and engine.trust.dropped == {}
        assert DeviceRecords.load(fresh.info).strikes == {}


def test_a_kernel_that_is_tested_well_is_cleared(
    cache: Path, fresh: Device, compiled: Compiled
) -> None:
    assert load("test", compiled("llama-tiny")).returncode == 139
    assert list(DeviceRecords.load(fresh.info).strikes.values()) == [1]
    everything = KernelPolicy(budget_s=None, thorough=True)
    with open_engine(fresh, compiled("llama-tiny"), policy=everything, **ONE_CHUNK) as engine:
        assert VARIANT in kernels_of(engine)
    assert DeviceRecords.load(fresh.info).strikes == {}


def test_a_load_that_tests_nothing_clears_too(
    cache: Path, fresh: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts are known from earlier, and the pipelines were made well."""
    monkeypatch.setattr(settle, "exempt", lambda caps: False)
    everything = KernelPolicy(budget_s=None)
    with open_engine(fresh, compiled("llama-tiny"), policy=everything, **ONE_CHUNK) as engine:
        marks = marks_of(engine)
    records = DeviceRecords.load(fresh.info)
    for mark in marks:
        records.strike(mark)
    # What no load does is cleared by none: this shape is no part of the plan.
    records.strike(f"{spirv_hash(VARIANT)}:other")
    records.save()
    with open_engine(fresh, compiled("llama-tiny"), policy=everything, **ONE_CHUNK) as engine:
        assert VARIANT in kernels_of(engine)
    assert DeviceRecords.load(fresh.info).strikes == {f"{spirv_hash(VARIANT)}:other": 1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_ordinary_end_is_no_strike(
    cache: Path, fresh: Device, compiled: Compiled, number: signal.Signals
) -> None:
    """While a pipeline takes long in the main thread, or a test in another one."""
    for _ in range(2):
        assert end_amid(start(LOAD, "slow", str(compiled("llama-tiny")), VARIANT), number) < 0
        assert end_amid(start(BESIDE, str(cache / "kernels-a-b.json")), number) == -number
    assert not list(cache.glob("*.trying"))
    assert DeviceRecords.load(fresh.info).strikes == {}


def test_sigkill_is_a_strike(cache: Path, fresh: Device, compiled: Compiled) -> None:
    slow = start(LOAD, "slow", str(compiled("llama-tiny")), VARIANT)
    assert end_amid(slow, signal.SIGKILL) == -signal.SIGKILL
    assert list(DeviceRecords.load(fresh.info).strikes.values()) == [1] and struck() == 1


def test_ctrl_c_is_no_strike(cache: Path, fresh: Device, compiled: Compiled) -> None:
    ended = load("interrupt", compiled("llama-tiny"))
    assert ended.returncode != 0 and "KeyboardInterrupt" in ended.stderr
    beside = start(BESIDE, str(cache / "kernels-a-b.json"))
    assert end_amid(beside, signal.SIGINT, signal.SIGINT) != 0
    assert not list(cache.glob("*.trying"))
    assert DeviceRecords.load(fresh.info).strikes == {}


def test_the_end_of_a_process_amid_a_test_is_no_strike(cache: Path) -> None:
    """Of a thread that nobody waits for."""
    beside = start(BESIDE, str(cache / "kernels-a-b.json"))
    assert end_amid(beside) == 0  # its input ends
    assert not list(cache.glob("*.trying"))


def test_signals_that_others_handle_are_theirs(tmp_path: Path) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        with Attempts(tmp_path / "kernels.json").trying("mark"):
            signal.raise_signal(signal.SIGTERM)
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_doctor_does_without_as_well(cache: Path, kernels: None) -> None:
    """Its own check of a device must not end it for ever."""
    for code in (134, 134, 0):
        doctor = start(DOCTOR, VARIANT)
        out, errors = doctor.communicate()
        assert doctor.returncode == code, errors
    assert f"not used: kernel {VARIANT} (failed: 2 processes ended" in out
    assert "linear/lane_row.f32, 64 rows" in out


def test_a_plain_twin_is_used_whatever_it_did(
    cache: Path, fresh: Device, compiled: Compiled
) -> None:
    """Without it there would be no kernel at all."""
    kept = DeviceRecords.load(fresh.info)
    kept.strikes = {f"{spirv_hash('linear/lane_row.f32')}:a": 5, f"{spirv_hash(VARIANT)}:a": 2}
    kept.save()
    with open_engine(fresh, compiled("llama-tiny"), **ONE_CHUNK) as engine:
        assert "linear/lane_row.f32" in kernels_of(engine) and VARIANT not in kernels_of(engine)
        check_answer(engine)


def test_notes_of_processes_that_live_or_are_elsewhere_stay(tmp_path: Path) -> None:
    records = tmp_path / "kernels-a-b.json"
    with Attempts(records).trying("mine"), Attempts(records).trying("mine too"):
        mine = list(tmp_path.glob("*.trying"))
        assert left_behind(records) == [] and len(mine) == 2
        elsewhere = tmp_path / "kernels-a-b-00000000-1.trying"
        elsewhere.write_text("other host")
        folder = mine[0].with_name(f"{mine[0].stem}0.trying")
        folder.mkdir()
        odd = mine[0].with_name(f"{mine[0].stem}1.trying")
        odd.write_bytes(b"\xff")
        assert left_behind(records) == []
        assert sorted(tmp_path.glob("*.trying")) == sorted([*mine, elsewhere, folder, odd])
    assert not any(path.exists() for path in mine)


def test_a_note_with_the_own_number_that_another_process_left(tmp_path: Path) -> None:
    """Every process of a container that is started again is number 1."""
    records = tmp_path / "kernels-a-b.json"
    with Attempts(records).trying("mine"):
        (mine,) = tmp_path.glob("*.trying")
        left = mine.with_name(f"{mine.stem.rpartition('-')[0]}-0123abcd.trying")
        assert f"-{os.getpid()}-" in left.name
        left.write_text("theirs")
        assert left_behind(records) == ["theirs"] and left_behind(records) == []
        assert list(tmp_path.glob("*.trying")) == [mine]


def test_without_a_writable_cache_nothing_is_noted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Attempts(tmp_path / "file" / "kernels.json").trying("mark"):
        pass
    assert left_behind(tmp_path / "file" / "kernels.json") == []
