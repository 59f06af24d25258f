"""Caps and quirks from synthetic devices."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from hornito.vk import api
from hornito.vk.caps import Caps, CoopMat
from hornito.vk.device import unwrap_timestamps
from hornito.vk.probe import DeviceInfo
from hornito.vk.quirks import QUIRKS, Quirk, apply_quirks, quirks_for

RECORD: dict[str, Any] = {
    "vendorID": 0x10DE,
    "deviceType": 2,
    "apiVersion": api.make_version(1, 3),
    "subgroupSize": 32,
    "minSubgroupSize": 32,
    "maxSubgroupSize": 32,
    "subgroupSupportedStages": api.VK_SHADER_STAGE_COMPUTE_BIT,
    "subgroupSupportedOperations": 0xFF,
    "subgroupSizeControl": 1,
    "computeFullSubgroups": 1,
    "maxComputeWorkGroupInvocations": 1024,
    "maxComputeWorkGroupSize": [1024, 1024, 64],
    "maxComputeWorkGroupCount": [2**31 - 1, 65535, 65535],
    "maxComputeSharedMemorySize": 49152,
    "maxPushConstantsSize": 256,
    "maxMemoryAllocationSize": 0xFFE00000,
    "maxBufferSize": 1 << 40,
    "minStorageBufferOffsetAlignment": 16,
    "nonCoherentAtomSize": 64,
    "timestampPeriod": 1.0,
    "timestampValidBits": 64,
    "shaderFloat16": 1,
    "storageBuffer16BitAccess": 1,
    "shaderIntegerDotProduct": 1,
    "extensions": {"VK_EXT_memory_budget"},
    "cooperativeMatrix": 1,
    "cooperativeMatrices": [
        (16, 16, 16, 0, 0, 1, 1, 0, 3),
        (16, 16, 32, 3, 3, 5, 5, 1, 3),
        (8, 8, 8, 0, 0, 1, 1, 0, 2),  # workgroup scope: not for us
    ],
    "deviceLocalBytes": 80 << 30,
}
ALL_OPS = {
    "basic", "vote", "arithmetic", "ballot", "shuffle", "shuffle_relative", "clustered", "quad",
}  # fmt: skip
INFO = DeviceInfo(
    index=0, name="Some GPU", vendor_id=0x10DE, device_id=1, kind="discrete", uuid="0" * 32,
    pci=None, driver_name="NVIDIA", driver_info="570", driver_version=100,
    api_version=api.make_version(1, 3), usable=True, reason="",
)  # fmt: skip


def test_full_record() -> None:
    caps = Caps.parse(RECORD)
    assert (caps.device_kind, caps.unified_memory) == ("discrete", False)
    assert caps.max_allocation_bytes == 0xFFE00000
    assert caps.max_workgroup_count == (2**31 - 1, 65535, 65535)
    assert caps.subgroup_ops == ALL_OPS and caps.subgroup_in_compute
    assert caps.has_memory_budget and caps.has_full_subgroups and caps.has_dot_product
    assert caps.coopmat == (
        CoopMat(16, 16, 16, "f16", "f16", "f32", "f32", saturating=False),
        CoopMat(16, 16, 32, "s8", "s8", "s32", "s32", saturating=True),
    )
    assert not caps.has_int64 and not caps.has_storage8


@pytest.mark.parametrize("size", [0, 1, 3, 48])
def test_broken_subgroup_size_means_no_subgroups(size: int) -> None:
    """D8, D20: a driver that reports 0 or 1 (or nonsense) leads to shared-memory kernels."""
    caps = Caps.parse({**RECORD, "subgroupSize": size, "minSubgroupSize": 0})
    assert (caps.subgroup_size, caps.subgroup_min, caps.subgroup_max) == (1, 1, 1)
    assert caps.subgroup_ops == frozenset() and not caps.subgroup_in_compute
    assert not caps.has_subgroup_size_control and not caps.has_full_subgroups
    assert "no_subgroups" in apply_quirks(caps, ()).quirks


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128])
def test_every_real_subgroup_size(size: int) -> None:
    caps = Caps.parse(
        {**RECORD, "subgroupSize": size, "minSubgroupSize": 2, "maxSubgroupSize": 128}
    )
    assert (caps.subgroup_size, caps.subgroup_min, caps.subgroup_max) == (size, 2, 128)
    assert caps.subgroup_ops == ALL_OPS
    fixed = Caps.parse({**RECORD, "subgroupSize": size, "subgroupSizeControl": 0})
    assert (fixed.subgroup_min, fixed.subgroup_max) == (size, size)
    assert not fixed.has_subgroup_size_control


def test_subgroups_outside_compute_do_not_count() -> None:
    caps = Caps.parse({**RECORD, "subgroupSupportedStages": 0x10})
    assert caps.subgroup_size == 32 and not caps.subgroup_in_compute
    assert caps.subgroup_ops == frozenset()


def test_empty_record_is_the_guaranteed_minimum() -> None:
    caps = Caps.parse({})
    assert caps.max_allocation_bytes == 1 << 30
    assert caps.max_push_constants == 128 and caps.max_workgroup_invocations == 128
    assert caps.coopmat == () and caps.subgroup_size == 1
    assert not any(getattr(caps, f.name) for f in fields(caps) if f.name.startswith("has_"))


@pytest.mark.parametrize("limit", [2 << 30, 1 << 30, 256 << 20, 128 << 20])
def test_allocation_limit_is_the_smaller_one(limit: int) -> None:
    assert Caps.parse({**RECORD, "maxBufferSize": limit}).max_allocation_bytes == limit
    small = {**RECORD, "maxMemoryAllocationSize": limit}
    assert Caps.parse(small).max_allocation_bytes == limit


def test_unknown_matrix_type_is_named_not_dropped() -> None:
    rows = [(16, 16, 16, 1000141000, 1000141000, 1, 1, 0, 3)]
    caps = Caps.parse({**RECORD, "cooperativeMatrices": rows})
    assert caps.coopmat[0].a_type == "vk1000141000"


def test_no_quirk_for_an_ordinary_device() -> None:
    assert quirks_for(INFO) == ()
    caps = Caps.parse(RECORD)
    assert apply_quirks(caps, ()) == caps


def test_powervr_loses_matrices_and_dot_products() -> None:
    """D5."""
    quirks = quirks_for(replace(INFO, vendor_id=0x1010))
    caps = apply_quirks(Caps.parse(RECORD), quirks)
    assert caps.coopmat == () and not caps.has_dot_product
    assert caps.quirks == {"no_coopmat", "no_dot_product"}


def test_d19_known_faults_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    powervr = replace(INFO, vendor_id=0x1010)
    monkeypatch.setenv("HORNITO_IGNORE_QUIRKS", "no_coopmat, something_else")
    caps = apply_quirks(Caps.parse(RECORD), quirks_for(powervr))
    assert caps.coopmat and caps.quirks == {"no_dot_product"}


def test_driver_and_version_ranges() -> None:
    table = (Quirk("no_float16", None, "llvmpipe", (10, 20), "https://example.org", "a test"),)
    device = replace(INFO, driver_name="LLVMpipe", driver_version=10)
    assert quirks_for(device, table) == table
    assert quirks_for(replace(device, driver_version=20), table) == table
    assert quirks_for(replace(device, driver_version=9), table) == ()
    assert quirks_for(replace(device, driver_version=21), table) == ()
    assert quirks_for(replace(device, driver_name="radv"), table) == ()
    assert not apply_quirks(Caps.parse(RECORD), table).has_float16


def test_every_quirk_is_explained() -> None:
    for quirk in QUIRKS:
        assert quirk.link.startswith("https://") and quirk.reason and quirk.flag


def test_timestamps_wrap() -> None:
    assert unwrap_timestamps([5, 10], 64, 2.0) == [10, 20]
    assert unwrap_timestamps([250, 3, 4, 1], 8, 1.0) == [250, 259, 260, 513]
    assert unwrap_timestamps([0x1F0, 0x2F1], 8, 1.0) == [0xF0, 0xF1]  # undefined high bits
    assert unwrap_timestamps([], 64, 1.0) == []
