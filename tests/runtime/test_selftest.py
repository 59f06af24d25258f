"""The self-test of kernels: faults are injected into real variants, and each must be noticed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults import fail_kernel, lose, refuse_memory
from hornito.errors import DeviceLostError, SessionError, VulkanError
from hornito.ops import kernels as kernel_files
from hornito.plan import records as records_module
from hornito.plan.records import GOOD, UNSTABLE, WRONG, DeviceRecords, Verdict
from hornito.plan.selftest import RUNS, UNPROVEN, _firsts_first, difference
from hornito.plan.units import units
from hornito.runtime.engine import Engine
from hornito.runtime.proof import prove
from hornito.runtime.session import Session
from hornito.runtime.settle import KernelPolicy
from hornito.vk.device import Device, open_device
from tiny import Broken, Compiled, check_answer, kernels_of, open_engine

pytestmark = [pytest.mark.gpu, pytest.mark.software]

VARIANT = "linear/broadcast.f32"
"""What many rows take on a software device; `linear/lane_row.f32` is its plain twin."""

THOROUGH = KernelPolicy(budget_s=None, thorough=True)
ONE_CHUNK = {"context": 128, "chunk_rows": (16,)}


def verdicts(engine: Engine, kernel: str) -> set[str]:
    return {v.verdict for v in engine.trust.verdicts.values() if v.kernel == kernel}


def test_every_variant_is_proved_and_the_verdict_kept(clean: Device, compiled: Compiled) -> None:
    with open_engine(clean, compiled("llama-tiny"), policy=THOROUGH, **ONE_CHUNK) as engine:
        trust = engine.trust
        assert trust.unproven == () and trust.dropped == {} and not trust.exempt
        assert set(trust.verdicts) == {unit.title for unit in units(engine.plan)}
        assert {v.verdict for v in trust.verdicts.values()} == {GOOD}
        assert all(v.runs >= RUNS for v in trust.verdicts.values())
        taken = [site.taken for b in engine.plan.buckets.values() for site in b.sites]
        tested = {v.kernel for v in trust.verdicts.values()}
        assert tested == {variant.kernel for variant in taken if not variant.plain}
        check_answer(engine)
    kept = DeviceRecords.load(clean.info)
    assert len(kept.verdicts) == len(units(engine.plan))


@pytest.mark.parametrize(("slots", "half_values"), [(1, False), (3, False), (1, True)])
def test_the_kernels_of_gpus_prove_themselves(
    clean: Device, compiled: Compiled, slots: int, half_values: bool
) -> None:
    """Those that a discrete GPU would take and that this driver can run, caches in fp16."""
    clean.caps = replace(clean.caps, device_kind="discrete")
    package = compiled("llama-tiny", "fp16")
    small: dict[str, Any] = {**ONE_CHUNK, "slots": slots, "kv_half": True}
    small["half_values"] = half_values
    with open_engine(clean, package, policy=THOROUGH, **small) as engine:
        assert {v.verdict for v in engine.trust.verdicts.values()} == {GOOD}
        stems = {v.kernel.partition(".")[0] for v in engine.trust.verdicts.values()}
        assert {"linear/gemv", "attention/flash"} <= stems
        check_answer(engine)


def test_cached_verdicts_are_not_tested_again(
    clean: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hornito.plan.stand import Stand
    from hornito.runtime import settle

    monkeypatch.setattr(settle, "exempt", lambda caps: False)
    policy = KernelPolicy(budget_s=None)
    with open_engine(clean, compiled("llama-tiny"), policy=policy, **ONE_CHUNK) as engine:
        first = engine.trust

    def refuse(*arguments: Any) -> None:
        raise AssertionError("tested again")

    monkeypatch.setattr(Stand, "results", refuse)
    with open_engine(clean, compiled("llama-tiny"), policy=policy, **ONE_CHUNK) as engine:
        assert engine.trust == first


def test_one_shape_of_every_kernel_comes_first(clean: Device, compiled: Compiled) -> None:
    with open_engine(clean, compiled("llama-tiny"), context=256) as engine:
        found = units(engine.plan)
        ordered = _firsts_first(found)
        kernels = {unit.kernel for unit in found}
        assert {unit.kernel for unit in ordered[: len(kernels)]} == kernels
        assert sorted(map(id, ordered)) == sorted(map(id, found))
        for first in ordered[: len(kernels)]:
            assert first.rows == min(u.rows for u in found if u.kernel == first.kernel)
        rest = [unit.rows for unit in ordered[len(kernels) :] if unit.kind == "chunk"]
        assert rest == sorted(rest, reverse=True)  # large ones next


def test_d1_a_wrong_variant_is_dropped(
    clean: Device, compiled: Compiled, broken: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    broken(VARIANT, "finish(row0 + r, n, sum[r][j]);", "finish(row0 + r, n, sum[r][j] * 1.01);")
    with open_engine(clean, compiled("llama-tiny"), policy=THOROUGH, **ONE_CHUNK) as engine:
        assert WRONG in verdicts(engine, VARIANT)
        assert VARIANT in engine.trust.dropped and VARIANT in engine.trust.line
        assert VARIANT not in kernels_of(engine)
        assert "linear/lane_row.f32" in kernels_of(engine)
        check_answer(engine)
    assert any(VARIANT in message and "wrong" in message for message in caplog.messages)
    # The next load starts without it, and asks nothing again; a software device is exempt then.
    with open_engine(clean, compiled("llama-tiny"), **ONE_CHUNK) as engine:
        assert engine.trust.exempt and VARIANT in engine.trust.dropped
        assert VARIANT not in kernels_of(engine)
        check_answer(engine)


def test_a_variant_that_is_wrong_past_a_tile_is_dropped(
    clean: Device, compiled: Compiled, broken: Broken
) -> None:
    """Only rows of the last tile of a chunk are wrong."""
    broken(
        VARIANT,
        "finish(row0 + r, n, sum[r][j]);",
        "finish(row0 + r, n, row0 >= 8u ? sum[r][j] + 0.5 : sum[r][j]);",
    )
    with open_engine(clean, compiled("llama-tiny"), policy=THOROUGH, **ONE_CHUNK) as engine:
        assert WRONG in verdicts(engine, VARIANT)
        assert VARIANT not in kernels_of(engine)


def test_d2_a_variant_with_a_wrong_band_is_dropped(
    clean: Device, compiled: Compiled, broken: Broken
) -> None:
    """Eight columns of each result are wrong, in all rows, and by a tenth."""
    broken(
        VARIANT,
        "finish(row0 + r, n, sum[r][j]);",
        "finish(row0 + r, n, n >= 24u && n < 32u ? sum[r][j] * 0.9 : sum[r][j]);",
    )
    with open_engine(clean, compiled("llama-tiny"), policy=THOROUGH, **ONE_CHUNK) as engine:
        assert WRONG in verdicts(engine, VARIANT)
        assert VARIANT not in kernels_of(engine)
        check_answer(engine)


@pytest.mark.parametrize(
    ("device", "kernel", "right", "wrong"),
    [
        ("software", VARIANT, "subgroupBroadcast(x, 7u)", "subgroupBroadcast(x, 6u)"),
        ("discrete", "attention/lanes.kv32", "subgroupShuffleXor(score[i], m)", "score[i]"),
    ],
)
def test_d12_a_wrong_subgroup_operation_is_noticed(
    clean: Device,
    compiled: Compiled,
    broken: Broken,
    device: str,
    kernel: str,
    right: str,
    wrong: str,
) -> None:
    """The driver takes another lane's value than it was asked for."""
    clean.caps = replace(clean.caps, device_kind=device)
    broken(kernel, right, wrong)
    with open_engine(clean, compiled("llama-tiny"), policy=THOROUGH, **ONE_CHUNK) as engine:
        assert verdicts(engine, kernel) & {WRONG, UNSTABLE}
        assert kernel in engine.trust.dropped and kernel not in kernels_of(engine)
        check_answer(engine)


def test_a_variant_whose_bits_change_is_dropped(
    clean: Device, compiled: Compiled, broken: Broken
) -> None:
    """Its numbers are within rounding of the twin's, but depend on how often it ran."""
    broken(
        VARIANT,
        "finish(row0 + r, n, sum[r][j]);",
        "uint seen = load_word(p.call, 3u); store_word(p.call, 3u, seen + 1u); "
        "finish(row0 + r, n, sum[r][j] * (1.0 + 1e-7 * float(1u + (seen & 7u))));",
    )
    with open_engine(clean, compiled("llama-tiny"), policy=THOROUGH, **ONE_CHUNK) as engine:
        assert UNSTABLE in verdicts(engine, VARIANT)
        assert VARIANT not in kernels_of(engine)
        check_answer(engine)


def test_d3_a_variant_whose_pipeline_fails_is_replaced(fresh: Device, compiled: Compiled) -> None:
    """The driver's call returns VK_ERROR_UNKNOWN for one kernel."""
    fail_kernel(fresh, VARIANT)
    with open_engine(fresh, compiled("llama-tiny"), **ONE_CHUNK) as engine:
        assert "could not compile" in engine.trust.dropped[VARIANT]
        assert VARIANT not in kernels_of(engine)
        check_answer(engine)


def test_d3_without_another_variant_the_error_names_the_kernel(
    fresh: Device, compiled: Compiled
) -> None:
    fail_kernel(fresh, "rms_norm/norm.default")
    with (
        pytest.raises(VulkanError, match=r"rms_norm/norm\.default.*could not compile"),
        open_engine(fresh, compiled("llama-tiny"), **ONE_CHUNK),
    ):
        pass
    assert fresh.allocated_bytes == 0


def test_d8_d20_a_subgroup_size_of_zero_takes_plain_kernels(
    cache: Path, compiled: Compiled, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reports size 0, as broken ones do; no kernel with subgroups is made."""
    from hornito.vk import probe

    real = probe._members

    def members(struct: Any) -> dict[str, Any]:
        found = real(struct)
        return {**found, "subgroupSize": 0} if "subgroupSize" in found else found

    monkeypatch.setattr(probe, "_members", members)
    with open_device("software") as device:
        assert device.caps.subgroup_size == 1 and not device.caps.subgroup_ops
        with open_engine(device, compiled("llama-tiny"), **ONE_CHUNK) as engine:
            for name in kernels_of(engine):
                assert not capabilities(kernel_files.load_spirv(name)) & SUBGROUP_CAPABILITIES
            check_answer(engine)


SUBGROUP_CAPABILITIES = set(range(61, 69))  # GroupNonUniform and its kinds


def capabilities(spirv: bytes) -> set[int]:
    """Operands of the OpCapability instructions of a module."""
    words = np.frombuffer(spirv, np.uint32).tolist()
    found, at = set(), 5
    while at < len(words):
        count, opcode = words[at] >> 16, words[at] & 0xFFFF
        if opcode == 17:
            found.add(words[at + 1])
        at += count
    return found


def test_a_kernel_that_keeps_taking_the_device_with_it_is_not_used_again(
    cache: Path, compiled: Compiled, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver says that the device is lost while a variant is tested."""
    from hornito.plan.stand import Stand
    from hornito.runtime import settle

    real = Stand._record

    def record(self: Stand, *arguments: Any) -> Any:
        recorder = real(self, *arguments)
        if any(d.kernel == VARIANT for d in arguments[1]):
            lose(self.device, after=1)
        return recorder

    monkeypatch.setattr(settle, "exempt", lambda caps: False)
    everything = KernelPolicy(budget_s=None)
    package = compiled("llama-tiny")

    def loses() -> None:
        with (
            open_device("software") as device,
            pytest.raises(DeviceLostError, match=rf"while {VARIANT} was tested.*load again"),
            open_engine(device, package, policy=everything, **ONE_CHUNK),
        ):
            pass

    def uses() -> bool:
        with (
            open_device("software") as device,
            open_engine(device, package, policy=everything, **ONE_CHUNK) as engine,
        ):
            check_answer(engine)
            used = VARIANT in kernels_of(engine)
            assert used != (VARIANT in engine.trust.dropped)
            return used

    for _ in range(2):  # once is no proof: another program may have hung the device
        monkeypatch.setattr(Stand, "_record", record)
        loses()
        monkeypatch.setattr(Stand, "_record", real)
        assert uses()
        shutil.rmtree(cache)
    monkeypatch.setattr(Stand, "_record", record)
    loses()
    loses()
    assert not uses()
    monkeypatch.setattr(Stand, "_record", real)
    assert not uses()


def test_what_no_time_is_left_for_is_unproven_and_not_used(
    cache: Path, clean: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hornito.runtime import settle

    monkeypatch.setattr(settle, "exempt", lambda caps: False)
    none = KernelPolicy(budget_s=0.0)
    with open_engine(clean, compiled("llama-tiny"), policy=none, **ONE_CHUNK) as engine:
        assert "no time" in engine.trust.dropped[VARIANT]
        assert VARIANT not in kernels_of(engine)
        check_answer(engine)
        with Session(engine), pytest.raises(SessionError, match="no session"):
            prove(engine, None)
        # At an idle moment it is tested, and used from then on.
        trust = prove(engine, None)
        assert trust.unproven == () and trust.dropped == {} and engine.trust is trust
        assert VARIANT in kernels_of(engine)
        check_answer(engine)
    shutil.rmtree(cache)
    # It was no verdict: a later load with time tests it.
    policy = KernelPolicy(budget_s=None)
    with open_engine(clean, compiled("llama-tiny"), policy=policy, **ONE_CHUNK) as engine:
        assert VARIANT in kernels_of(engine) and engine.trust.dropped == {}


def test_without_memory_for_a_test_the_load_goes_on(
    clean: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be tested for lack of memory is unproven, and not used."""
    refuse_memory(monkeypatch, "self-test")
    with open_engine(clean, compiled("llama-tiny"), policy=THOROUGH, **ONE_CHUNK) as engine:
        assert engine.trust.unproven and not engine.trust.verdicts
        assert engine.trust.dropped[VARIANT] == UNPROVEN
        assert all(site.taken.plain for b in engine.plan.buckets.values() for site in b.sites)
        check_answer(engine)


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": 1}', '{"format": 99}', "\x00\xff"])
def test_damaged_records_are_ignored(cache: Path, clean: Device, damage: str) -> None:
    kept = DeviceRecords.load(clean.info)
    kept.verdicts["key"] = Verdict("a/b.c", "shape", GOOD, "", 20, 0.0)
    kept.save()
    assert DeviceRecords.load(clean.info).verdicts == kept.verdicts
    assert [path.name for path in kept.path.parent.glob("kernels-*")] == [kept.path.name]
    kept.path.write_text(damage, encoding="utf-8")
    assert DeviceRecords.load(clean.info).verdicts == {}
    kept.save()  # and replaced in one step
    assert json.loads(kept.path.read_text())["format"] == 1


def test_records_are_of_one_driver_and_one_spirv(clean: Device, broken: Broken) -> None:
    good = records_module.verdict_key(VARIANT, "shape")
    kept = DeviceRecords.load(clean.info)
    kept.verdicts[good] = Verdict(VARIANT, "shape", WRONG, "by a mile", 20, 9.0)
    kept.save()
    assert DeviceRecords.load(clean.info).dropped([VARIANT]) == {VARIANT: "wrong: by a mile"}
    newer = replace(clean.info, driver_version=clean.info.driver_version + 1)
    assert DeviceRecords.load(newer).verdicts == {}
    broken(VARIANT, "sum[r][j] = 0.0;", "sum[r][j] = 1.0;")
    assert records_module.verdict_key(VARIANT, "shape") != good
    assert DeviceRecords.load(clean.info).dropped([VARIANT]) == {}


def test_difference() -> None:
    one = np.array([3.0, 4.0, np.nan, np.inf], np.float32)
    two = np.array([3.0, 4.5, np.nan, np.inf], np.float32)
    assert difference(one.tobytes(), one.tobytes()) == 0.0
    got = difference(two.tobytes(), one.tobytes())
    assert got == pytest.approx(0.5 / (4 + np.sqrt(12.5)))
    two[0] = np.nan
    assert difference(two.tobytes(), one.tobytes()) == np.inf
    halves = np.array([1.0, 2.0], np.float16)
    assert difference(halves.tobytes(), (2 * halves).tobytes(), half=True) > 0.2
