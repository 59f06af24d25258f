"""A driver whose compiler, or whose GPU program, ends the process: the next one does without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hornito.plan.attempts import Attempts, left_behind
from hornito.plan.records import DeviceRecords, dropped_here, failed_kernels, spirv_hash
from hornito.runtime.settle import KernelPolicy
from hornito.vk.device import Device
from tiny import Compiled, check_answer, kernels_of, open_engine
from tree import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.software]

VARIANT = "linear/broadcast.f32"
ONE_CHUNK = {"context": 128, "chunk_rows": (16,)}

LOAD = """
import os, sys
import hornito
from hornito.plan import recording, stand
from hornito.runtime.settle import KernelPolicy
from hornito.vk.device import Device
from tiny import open_engine

place, package, variant = sys.argv[1:]
made, record = Device.pipeline, stand.Stand._record

def pipeline(self, spirv, *, name, **more):
    if name == variant and place == "pipeline":
        os._exit(134)  # as abort() does
    return made(self, spirv, name=name, **more)

def recorded(self, layout, dispatches, *more):
    if any(d.kernel == variant for d in dispatches):
        if place == "test":
            os._exit(139)
        if place == "interrupt":
            raise KeyboardInterrupt
    return record(self, layout, dispatches, *more)

Device.pipeline, stand.Stand._record = pipeline, recorded
policy = KernelPolicy(budget_s=None, thorough=place != "pipeline")
with hornito.vk.device.open_device("software") as device:
    with open_engine(device, package, policy=policy, context=128, chunk_rows=(16,)) as engine:
        print("loaded", variant in {d.kernel for d in engine.plan.distinct()})
"""


def load(place: str, package: Path) -> subprocess.CompletedProcess[str]:
    """A process that loads, with a driver that ends it at a place."""
    paths = f"{ROOT / 'tests'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, "-c", LOAD, place, str(package), VARIANT],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("place", "code"), [("pipeline", 134), ("test", 139)])
def test_d18_a_kernel_that_ends_the_process_is_not_tried_for_ever(
    cache: Path, fresh: Device, compiled: Compiled, place: str, code: int
) -> None:
    package = compiled("llama-tiny")
    for _ in range(2):
        ended = load(place, package)
        assert ended.returncode == code, ended.stderr
    third = load(place, package)
    assert (third.returncode, third.stdout) == (0, "loaded False\n"), third.stderr
    with open_engine(fresh, package, **ONE_CHUNK) as engine:
        assert "2 processes ended" in engine.trust.dropped[VARIANT]
        assert VARIANT in engine.trust.line and VARIANT not in kernels_of(engine)
        check_answer(engine)
    assert VARIANT in dropped_here() and VARIANT in failed_kernels(DeviceRecords.load(fresh.info))


def test_one_end_is_no_proof(cache: Path, fresh: Device, compiled: Compiled) -> None:
    """The process may have been killed: the kernel is used, and being well clears it."""
    package = compiled("llama-tiny")
    assert load("pipeline", package).returncode == 134
    assert DeviceRecords.load(fresh.info).strikes == {spirv_hash(VARIANT): 1}
    with open_engine(fresh, package, **ONE_CHUNK) as engine:
        assert VARIANT in kernels_of(engine) and engine.trust.dropped == {}
    assert DeviceRecords.load(fresh.info).strikes == {}
    assert load("pipeline", package).returncode == 134
    assert DeviceRecords.load(fresh.info).strikes == {spirv_hash(VARIANT): 1}


def test_a_kernel_that_is_tested_well_is_cleared(
    cache: Path, fresh: Device, compiled: Compiled
) -> None:
    assert load("test", compiled("llama-tiny")).returncode == 139
    everything = KernelPolicy(budget_s=None, thorough=True)
    with open_engine(fresh, compiled("llama-tiny"), policy=everything, **ONE_CHUNK) as engine:
        assert VARIANT in kernels_of(engine)
    assert DeviceRecords.load(fresh.info).strikes == {}


def test_ctrl_c_is_no_strike(cache: Path, fresh: Device, compiled: Compiled) -> None:
    ended = load("interrupt", compiled("llama-tiny"))
    assert ended.returncode != 0 and "KeyboardInterrupt" in ended.stderr
    assert DeviceRecords.load(fresh.info).strikes == {}
    assert not list(cache.glob("*.trying"))


def test_a_plain_twin_is_used_whatever_it_did(
    cache: Path, fresh: Device, compiled: Compiled
) -> None:
    """Without it there would be no kernel at all."""
    kept = DeviceRecords.load(fresh.info)
    kept.strikes = {spirv_hash("linear/lane_row.f32"): 5, spirv_hash(VARIANT): 2}
    kept.save()
    with open_engine(fresh, compiled("llama-tiny"), **ONE_CHUNK) as engine:
        assert "linear/lane_row.f32" in kernels_of(engine) and VARIANT not in kernels_of(engine)
        check_answer(engine)


def test_notes_of_processes_that_run_or_are_elsewhere_stay(tmp_path: Path) -> None:
    records = tmp_path / "kernels-a-b.json"
    with Attempts(records).trying("mine"):
        assert left_behind(records) == []
        (mine,) = tmp_path.glob("*.trying")
        gone = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpid())"],
            capture_output=True,
            text=True,
            check=True,
        )
        dead = mine.with_name(mine.name.replace(f"-{os.getpid()}.", f"-{gone.stdout.strip()}."))
        dead.write_text("theirs")
        elsewhere = tmp_path / "kernels-a-b-00000000-1.trying"
        elsewhere.write_text("other host")
        odd = mine.with_name(mine.name.replace(f"-{os.getpid()}.", "-x."))
        odd.write_text("odd")
        assert left_behind(records) == ["theirs"]
        assert sorted(tmp_path.glob("*.trying")) == sorted([mine, elsewhere, odd])
    assert not mine.exists()


def test_without_a_writable_cache_nothing_is_noted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Attempts(tmp_path / "file" / "kernels.json").trying("mark"):
        pass
    assert left_behind(tmp_path / "file" / "kernels.json") == []


@pytest.mark.parametrize("strikes", ["[]", '{"a": "x"}', "5"])
def test_damaged_strikes(cache: Path, fresh: Device, strikes: str) -> None:
    kept = DeviceRecords.load(fresh.info)
    kept.save()
    data = json.loads(kept.path.read_text())
    data["strikes"] = json.loads(strikes)
    kept.path.write_text(json.dumps(data))
    assert DeviceRecords.load(fresh.info).strikes == {}
