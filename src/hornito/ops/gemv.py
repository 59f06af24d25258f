"""Products of few rows on GPUs: the geometries of kernels/linear/gemv.comp and gemv_append.comp."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hornito.ops.base import Lowering, ceil_div
from hornito.ops.digits import MOST_SPLITS, digit_variants
from hornito.ops.variants import Variant, meets
from hornito.quant.formats import weight_format

if TYPE_CHECKING:
    from hornito.ops.linear import LinearArgs

NORM, OUTS = 10, 11
"""Specialisation of kernels/include/gemv.glsl: a norm comes first; weight rows of a group of
threads."""

GEMV_ROWS = 4
"""Up to this many rows a GPU takes the kernel that streams weights once per group of rows."""

THREADS = 128

NEEDS = ("shuffle", "subgroup>=4")
"""What joining sums by shuffles asks of a device, besides full subgroups; elsewhere they join in
shared memory (`tree_`)."""

MANY_PRODUCTS = 8192
"""From this many weight rows on, a group takes four of them at a time."""

FUSED_NORM = 1 << 24
"""Quantised weights from which a norm is faster in a launch of its own than in each workgroup,
where x comes from memory (7B, 4 bits: 56 us against 42)."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the threads of a workgroup share its weight rows.

    Attributes:
        lanes: threads of a group, a power of two.
        outs: weight rows of a group: 1, 2, 4 or 8.
    """

    lanes: int
    outs: int

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return THREADS // self.lanes * self.outs

    def spec(self, args: LinearArgs) -> dict[int, int]:
        """The specialisation values."""
        rows = power_of_two(min(args.rows, GEMV_ROWS))
        return {3: rows, 4: wide_rows(args.k, args.dtype), 5: self.lanes, OUTS: self.outs}

    def groups(self, args: LinearArgs) -> tuple[int, int, int]:
        """The grid: `GEMV_ROWS` rows of x a workgroup."""
        return ceil_div(args.products, self.rows), ceil_div(args.rows, GEMV_ROWS), 1


def gemv_variants(args: LinearArgs, low: Lowering, name: str) -> list[Variant]:
    """The usual geometry first, the others to be measured; integer dot products where they pay."""
    least = 2 if args.gated else 1
    usual = gemv_geometry(args, low.caps.max_workgroup_count[0])
    floats = _variants(args, low, f"linear/gemv.{name}", usual, lambda g: g.outs >= least)
    kernel = "linear/digits." + ("gated" if args.gated else "default")
    return [*digit_variants(args, low, kernel, MOST_SPLITS), *floats]


def qkv_variants(args: LinearArgs, low: Lowering, cache: str) -> list[Variant]:
    """The same for kernels/linear/gemv_append.comp, whose groups have pairs of weight rows, and
    digits_append.comp."""

    def fits(geometry: Geometry) -> bool:
        return geometry.outs > 2 or (geometry.outs == 2 and geometry.lanes <= 64)

    kernel = f"linear/gemv_append.{cache}_{weight_format(args.dtype).variant}"
    usual = Geometry(64, 2) if quantised(args.dtype) else Geometry(128, 4)
    floats = _variants(args, low, kernel, usual, fits)
    digits = digit_variants(args, low, f"linear/digits_append.{cache}", 1)
    return [*digits, *floats]


def _variants(
    args: LinearArgs,
    low: Lowering,
    kernel: str,
    usual: Geometry,
    fits: Callable[[Geometry], bool],
) -> list[Variant]:
    """The usual geometry of a kernel, and as optional variants all others that fit it."""
    return [
        _variant(args, low, kernel, geometry, optional=geometry != usual)
        for geometry in dict.fromkeys((usual, *_geometries(args)))
        if fits(geometry)
    ]


def _variant(
    args: LinearArgs, low: Lowering, kernel: str, geometry: Geometry, *, optional: bool
) -> Variant:
    """The kernel that joins its sums in the way that the device offers."""
    caps, spec, groups = low.caps, geometry.spec(args), geometry.groups(args)
    if caps.has_full_subgroups and all(meets(caps, need) for need in NEEDS):
        return Variant(kernel, spec, groups, NEEDS, full_subgroups=True, optional=optional)
    return Variant(kernel.replace(".", ".tree_"), spec, groups, optional=optional)


def _geometries(args: LinearArgs) -> Iterable[Geometry]:
    """All that fit the product."""
    outs = (1, 2, 4, 8) if args.rows == 1 and quantised(args.dtype) else (1, 2, 4)
    for n in outs:
        for lanes in (8, 16, 32, 64, 128):
            if lanes >= n:
                yield Geometry(lanes, n)


def gemv_geometry(args: LinearArgs, most_groups: int) -> Geometry:
    """Threads of a group and its weight rows: many threads where rows are few or long, so that the
    GPU fills; four rows where there are enough, so that x is loaded less often."""
    products, k = args.products, args.k
    if products >= 8 * MANY_PRODUCTS:
        lanes, outs = 16, 4
    elif products >= MANY_PRODUCTS:
        lanes, outs = 32 if quantised(args.dtype) else 64, 4
    else:
        few = products < 2048 or (products < 4096 and k >= 4096)
        lanes, outs = 128 if few else 64, 2
    while lanes > 8 and (lanes > k // 8 or ceil_div(products, 128 // lanes * outs) > most_groups):
        lanes //= 2
    return Geometry(lanes, outs)


def batch_variant(args: LinearArgs, low: Lowering, name: str, *, optional: bool) -> Variant:
    """GEMV over groups of rows, whose weights the later groups find in a cache."""
    geometry = gemv_geometry(args, low.caps.max_workgroup_count[0])
    return _variant(args, low, f"linear/gemv.{name}", geometry, optional=optional)


def is_gemv(chosen: Variant) -> bool:
    """Whether it is a variant of kernels/linear/gemv.comp."""
    return chosen.kernel.startswith("linear/gemv.")


def norm_apart(args: LinearArgs) -> bool:
    """Whether a norm of x is faster in a launch of its own, before this GEMV."""
    return quantised(args.dtype) and args.products * args.k >= FUSED_NORM


def quantised(dtype: str) -> bool:
    """Whether weights of that type have scales."""
    return weight_format(dtype).quantised


def wide_rows(k: int, dtype: str) -> int:
    """Whether rows of K weights are whole chunks of gemv_floats.glsl: 1 or 0."""
    return int(k % (16 if weight_format(dtype).variant == "q" else 8) == 0)


def power_of_two(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()
