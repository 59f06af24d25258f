"""Every driver fault that Hornito works around, in one table.

Ops never test for a vendor: they read `caps.quirks` and the features that are left in `caps`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hornito.vk.caps import Caps
from hornito.vk.probe import DeviceInfo


@dataclass(frozen=True, slots=True)
class Quirk:
    """One row: where it applies, what it switches, and why.

    Attributes:
        flag: what `apply_quirks` and the kernel choice act on.
        vendor_id: None for every vendor.
        driver: part of the driver's name, lower case; '' for every driver.
        versions: first and last driver version (Vulkan packing) that it applies to, None = open.
        link: public report.
        reason: the fault in one line.
    """

    flag: str
    vendor_id: int | None
    driver: str
    versions: tuple[int | None, int | None]
    link: str
    reason: str


_ALL: tuple[int | None, int | None] = (None, None)

QUIRKS: tuple[Quirk, ...] = (
    Quirk(
        "no_coopmat", 0x1010, "", _ALL,
        "https://github.com/ggml-org/llama.cpp/issues/28502",
        "PowerVR returns token 0 throughout with cooperative matrices",
    ),
    Quirk(
        "no_dot_product", 0x1010, "", _ALL,
        "https://github.com/ggml-org/llama.cpp/issues/28502",
        "PowerVR returns token 0 throughout with integer dot products",
    ),
)  # fmt: skip


def ignored_quirks() -> frozenset[str]:
    """Flags that the user overrides: $HORNITO_IGNORE_QUIRKS, names with commas between."""
    words = os.environ.get("HORNITO_IGNORE_QUIRKS", "").split(",")
    return frozenset(word.strip() for word in words if word.strip())


def quirks_for(info: DeviceInfo, table: tuple[Quirk, ...] = QUIRKS) -> tuple[Quirk, ...]:
    """The rows that apply to a device and that the user does not override."""
    driver = info.driver_name.lower()
    ignored = ignored_quirks()
    found = []
    for quirk in table:
        first, last = quirk.versions
        if quirk.flag in ignored:
            continue
        if (
            quirk.vendor_id in (None, info.vendor_id)
            and quirk.driver in driver
            and (first is None or info.driver_version >= first)
            and (last is None or info.driver_version <= last)
        ):
            found.append(quirk)
    return tuple(found)


FEATURES = ("float16", "dot_product", "cooperative_matrix", "subgroups")
"""Features that can be done without on request."""


def without_features(caps: Caps, features: Iterable[str]) -> Caps:
    """`caps` without features of `FEATURES`, each noted as `no_...` among the quirks."""
    names = {"cooperative_matrix": "coopmat"}
    flags = frozenset(f"no_{names.get(feature, feature)}" for feature in features)
    return _without(replace(caps, quirks=caps.quirks | flags)) if flags else caps


def apply_quirks(caps: Caps, quirks: tuple[Quirk, ...]) -> Caps:
    """`caps` without the features that are known to be faulty, and with the flags noted."""
    flags = frozenset(quirk.flag for quirk in quirks)
    if caps.subgroup_size < 2:
        flags |= {"no_subgroups"}
    return _without(replace(caps, quirks=flags))


def _without(caps: Caps) -> Caps:
    """`caps` without what its flags rule out."""
    flags = caps.quirks
    if "no_coopmat" in flags:
        caps = replace(caps, coopmat=())
    if "no_dot_product" in flags:
        caps = replace(caps, has_dot_product=False, has_fast_dot_product=False)
    if "no_float16" in flags:
        caps = replace(caps, has_float16=False)
    if "no_subgroups" in flags:
        caps = replace(
            caps,
            subgroup_ops=frozenset(),
            subgroup_in_compute=False,
            has_subgroup_size_control=False,
            has_full_subgroups=False,
        )
    return caps
