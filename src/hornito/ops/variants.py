"""Variants: the ways to compute an op, what each needs of a device, and which one is taken.

An op lists its variants in order of preference for the device at hand, the plain twin last, and
asks `Lowering.choose` for one. The first that the device admits is the default. Two things change
that: a kernel that failed its self-test on this device is dropped, and a variant that was measured
to be faster for these very shapes (`hornito tune`) displaces the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hornito.errors import UnsupportedError

if TYPE_CHECKING:
    from hornito.vk.caps import Caps

#: Requirement by name, and whether a device meets it.
REQUIREMENTS: Mapping[str, Callable[[Caps], bool]] = {
    "float16": lambda caps: caps.has_float16,
    "storage16": lambda caps: caps.has_storage16,
    "int8": lambda caps: caps.has_int8,
    "dot_product": lambda caps: caps.has_dot_product,
    "fast_dot_product": lambda caps: caps.has_fast_dot_product,
    "full_subgroups": lambda caps: caps.has_full_subgroups,
    "subgroup_32": lambda caps: caps.subgroup_size == 32,
    "basic": lambda caps: "basic" in caps.subgroup_ops,
    "ballot": lambda caps: "ballot" in caps.subgroup_ops,
    "shuffle": lambda caps: "shuffle" in caps.subgroup_ops,
    "arithmetic": lambda caps: "arithmetic" in caps.subgroup_ops,
    "clustered": lambda caps: "clustered" in caps.subgroup_ops,
    "coopmat_16": lambda caps: any(
        (c.m, c.n, c.k, c.a_type, c.b_type, c.c_type, c.result_type)
        == (16, 16, 16, "f16", "f16", "f32", "f32")
        for c in caps.coopmat
    ),
}


def meets(caps: Caps, requirement: str) -> bool:
    """Whether a device meets a requirement: a name of `REQUIREMENTS`; `subgroup>=N`, which every
    subgroup size that the driver may choose must be; `shared>=N`, bytes of shared memory, and
    `threads>=N`, those of a workgroup."""
    name, sign, least = requirement.partition(">=")
    if sign and name == "shared":
        return caps.shared_memory_bytes >= int(least)
    if sign and name == "threads":
        return caps.max_workgroup_invocations >= int(least)
    if sign and name == "subgroup":
        return caps.subgroup_min >= int(least)
    return REQUIREMENTS[requirement](caps)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute an op.

    Attributes:
        kernel: its SPIR-V, `op/stem.variant`.
        spec: the specialisation values that are its own.
        groups: the grid.
        requires: what a device must offer (`REQUIREMENTS`); nothing for a plain twin.
        full_subgroups: whether the kernel counts on every subgroup being full.
        optional: taken only where it was measured to be faster than the default.
        inexact: operands are rounded, to fp16 or as near, so that it differs from its twin by more
            than the order of a sum.
        plain: the plain twin, which runs everywhere and is trusted without a test.
    """

    kernel: str
    spec: Mapping[int, int] = field(default_factory=dict)
    groups: tuple[int, int, int] = (1, 1, 1)
    requires: tuple[str, ...] = ()
    full_subgroups: bool = False
    optional: bool = False
    inexact: bool = False
    plain: bool = False

    @property
    def name(self) -> str:
        """What tells it from the other variants of a list."""
        spec = ",".join(f"{key}={value}" for key, value in sorted(self.spec.items()))
        return f"{self.kernel}[{spec}]" if spec else self.kernel

    def admitted(self, caps: Caps) -> bool:
        """Whether a device offers all that it requires, full subgroups where it counts on them, and
        a grid of its size."""
        fits = all(n <= most for n, most in zip(self.groups, caps.max_workgroup_count, strict=True))
        full = caps.has_full_subgroups or not self.full_subgroups
        return (fits or self.plain) and full and all(meets(caps, word) for word in self.requires)


@dataclass(frozen=True, slots=True)
class Choices:
    """What departs from the defaults on a device.

    Attributes:
        dropped: kernels that are not used, and why.
        winners: by site, the name of the variant that was measured fastest.
        plain: take the plain twin everywhere.
    """

    dropped: Mapping[str, str] = field(default_factory=dict)
    winners: Mapping[str, str] = field(default_factory=dict)
    plain: bool = False


DEFAULTS = Choices()
"""Nothing departs."""


@dataclass(frozen=True, slots=True)
class Site:
    """One choice that a lowering made: where, what was taken, and what else was admitted.

    Attributes:
        key: op, shapes and storage type; nodes of one key have the same choice.
        node: its node.
        taken: the variant.
        admitted: all that the device offers and nobody dropped, in order of preference.
    """

    key: str
    node: str
    taken: Variant
    admitted: tuple[Variant, ...]


def pick(key: str, node: str, variants: Sequence[Variant], caps: Caps, choices: Choices) -> Site:
    """Choose among the variants of a site.

    Raises:
        UnsupportedError: none is left.
    """
    offered = [v for v in variants if v.admitted(caps)]
    left = [v for v in offered if v.kernel not in choices.dropped]
    if not left:
        why = "; ".join(f"{v.kernel}: {choices.dropped[v.kernel]}" for v in offered)
        raise UnsupportedError(
            f"node {node}: no kernel is left for {key} on this device ({why or 'none fits it'}); "
            "run `hornito doctor`, and update the GPU driver"
        )
    plain = [v for v in left if v.plain]
    usual = [v for v in left if not v.optional] or left
    taken = plain[-1] if choices.plain and plain else usual[0]
    winner = choices.winners.get(key)
    if winner is not None and not choices.plain:
        taken = next((v for v in left if v.name == winner), taken)
    return Site(key, node, taken, tuple(left))
