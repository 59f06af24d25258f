"""Which device is chosen, on lists of devices that this machine does not have."""

from __future__ import annotations

import pytest

from hornito.errors import NoDeviceError
from hornito.vk.pipeline import valid_cache_data
from hornito.vk.probe import DeviceInfo
from hornito.vk.select import choose_device, device_rank, matching


def info(name: str, kind: str, vendor: int, index: int = 0, reason: str = "") -> DeviceInfo:
    return DeviceInfo(
        index=index, name=name, vendor_id=vendor, device_id=index, kind=kind,
        uuid=f"{index + 160:032x}", pci=f"0000:0{index}:00.0", driver_name="d", driver_info="i",
        driver_version=1, api_version=1 << 22, usable=not reason, reason=reason,
    )  # fmt: skip


FOUND = [
    info("llvmpipe (LLVM 15)", "software", 0x10005),
    info("Intel UHD 770", "integrated", 0x8086),
    info("NVIDIA GeForce RTX 3090", "discrete", 0x10DE),
    info("Venus", "virtual", 0x1AF4),
    info("AMD Radeon RX 6600", "discrete", 0x1002),
]


def sorted_list() -> list[DeviceInfo]:
    order = sorted(FOUND, key=device_rank)
    return [info(d.name, d.kind, d.vendor_id, i, d.reason) for i, d in enumerate(order)]


def test_order() -> None:
    """I1: discrete, integrated, virtual, software; the loader's order within a kind."""
    kinds = [device.kind for device in sorted_list()]
    assert kinds == ["discrete", "discrete", "integrated", "virtual", "software"]
    assert [d.name.split()[0] for d in sorted_list()[:2]] == ["NVIDIA", "AMD"]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (None, 0), (0, 0), (4, 4), ("2", 2), ("amd", 1), ("AMD", 1), ("nvidia", 0), ("intel", 2),
        ("rtx", 0), ("3090", 0), ("6600", 1), ("software", 4), ("cpu", 4), ("mesa", 4),
        ("pci:0000:01:00.0", 1), (f"{163:032x}", 3), ("uuid:" + f"{163:032x}", 3), ("Venus", 3),
    ],
)  # fmt: skip
def test_selectors(selector: str | int | None, expected: int) -> None:
    assert choose_device(sorted_list(), selector).index == expected


def test_uuid_with_dashes() -> None:
    plain = f"{161:032x}"
    dashed = "-".join((plain[:8], plain[8:12], plain[12:16], plain[16:20], plain[20:]))
    assert choose_device(sorted_list(), dashed).index == 1


@pytest.mark.parametrize("selector", ["apple", 5, "5", "pci:0000:07:00.0", "", "radeon vii"])
def test_no_match_lists_the_devices(selector: str | int) -> None:
    with pytest.raises(NoDeviceError, match="no device matches") as caught:
        choose_device(sorted_list(), selector)
    for device in FOUND:
        assert device.name in str(caught.value)


def test_ambiguous_selector() -> None:
    two = [info("NVIDIA H200", "discrete", 0x10DE, i) for i in range(2)]
    with pytest.raises(NoDeviceError, match=r"'h200' matches 2 devices.*give an index"):
        choose_device(two, "h200")
    assert choose_device(two, 1).index == 1
    assert choose_device(two, None).index == 0


def test_exact_name_beats_part_of_a_name() -> None:
    two = [
        info("Radeon RX 6600 XT", "discrete", 0x1002, 0),
        info("Radeon RX 6600", "discrete", 0x1002, 1),
    ]
    assert choose_device(two, "radeon rx 6600").index == 1


def test_unusable_devices_are_passed_over_but_never_in_silence() -> None:
    old = info("Old GPU", "discrete", 0x1002, 0, reason="Vulkan 1.1.0, Hornito needs 1.2")
    fine = info("llvmpipe", "software", 0x10005, 1)
    assert choose_device([old, fine], None).index == 1
    with pytest.raises(NoDeviceError, match=r"Old GPU can't be used: Vulkan 1\.1"):
        choose_device([old, fine], "old")
    with pytest.raises(NoDeviceError, match=r"no Vulkan device here can run Hornito: .*needs 1\.2"):
        choose_device([old], None)
    twin = info("Old GPU", "discrete", 0x1002, 1)
    assert choose_device([old, twin], "old gpu").index == 1


def test_matching_returns_every_match() -> None:
    assert [d.index for d in matching(sorted_list(), "a")] == [0, 1]  # NVIDIA, AMD Radeon


def test_cache_header() -> None:
    """I4: only a file of this very device and driver is handed to the driver."""
    uuid = bytes(range(16))

    def data(length: int, version: int, vendor: int, device: int, identity: bytes) -> bytes:
        words = (length, version, vendor, device)
        return b"".join(word.to_bytes(4, "little") for word in words) + identity

    good = data(32, 1, 7, 8, uuid)
    assert valid_cache_data(good, 7, 8, uuid)
    assert valid_cache_data(good + b"payload", 7, 8, uuid)
    for bad in (
        b"", good[:31], data(16, 1, 7, 8, uuid), data(99, 1, 7, 8, uuid), data(32, 2, 7, 8, uuid),
        data(32, 1, 6, 8, uuid), data(32, 1, 7, 9, uuid), data(32, 1, 7, 8, bytes(16)),
    ):  # fmt: skip
        assert not valid_cache_data(bad, 7, 8, uuid)
