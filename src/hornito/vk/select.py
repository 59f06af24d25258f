"""Which device to run on: order of the list and the meaning of a selector. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from hornito.errors import NoDeviceError
from hornito.vk.probe import DeviceInfo

_ORDER = {"discrete": 0, "integrated": 1, "virtual": 2, "other": 3, "software": 4}

VENDORS = {
    "amd": 0x1002,
    "imagination": 0x1010,
    "apple": 0x106B,
    "nvidia": 0x10DE,
    "arm": 0x13B5,
    "broadcom": 0x14E4,
    "qualcomm": 0x5143,
    "intel": 0x8086,
    "mesa": 0x10005,
}


def device_rank(info: DeviceInfo) -> int:
    """Sort key of the device list: discrete, integrated, virtual, other, software."""
    return _ORDER[info.kind]


def describe(info: DeviceInfo) -> str:
    """`0: NVIDIA H200 (discrete)` for messages."""
    note = "" if info.usable else f", unusable: {info.reason}"
    return f"{info.index}: {info.name} ({info.kind}{note})"


def _listing(devices: Sequence[DeviceInfo]) -> str:
    return "; ".join(describe(info) for info in devices)


def matching(devices: Sequence[DeviceInfo], selector: str) -> list[DeviceInfo]:
    """The devices that a selector names; the first rule that names any wins."""
    text = selector.strip().lower()
    if text in ("software", "cpu"):
        return [info for info in devices if info.kind == "software"]
    if text.isdecimal() and len(text) < 3:  # longer ones may be part of a name: "3090"
        return [info for info in devices if info.index == int(text)]
    if text.startswith("pci:"):
        return [info for info in devices if info.pci == text[4:]]
    plain = text.removeprefix("uuid:").replace("-", "")
    by_uuid = [info for info in devices if info.uuid == plain]
    if by_uuid:
        return by_uuid
    if text in VENDORS:
        return [info for info in devices if info.vendor_id == VENDORS[text]]
    exact = [info for info in devices if info.name.lower() == text]
    return exact or [info for info in devices if text and text in info.name.lower()]


def choose_device(devices: Sequence[DeviceInfo], selector: str | int | None) -> DeviceInfo:
    """The device to open; see `open_device` for the selectors.

    Raises:
        NoDeviceError: none matches, several match, or the one that matches can't be used.
    """
    if selector is None:
        usable = [info for info in devices if info.usable]
        if not usable:
            raise NoDeviceError(f"no Vulkan device here can run Hornito: {_listing(devices)}")
        return usable[0]
    found = matching(devices, str(selector))
    if not found:
        raise NoDeviceError(f"no device matches {selector!r}; there are: {_listing(devices)}")
    if len(found) > 1:
        usable = [info for info in found if info.usable]
        if len(usable) != 1:
            raise NoDeviceError(
                f"{selector!r} matches {len(found)} devices ({_listing(found)}); "
                "give an index, a PCI address or a UUID"
            )
        found = usable
    if not found[0].usable:
        raise NoDeviceError(f"device {found[0].name} can't be used: {found[0].reason}")
    return found[0]
