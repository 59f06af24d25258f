"""One row of x times weights of 4 or 8 bits: the geometries of kernels/linear/digits.comp and
digits_append.comp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hornito.ops.base import MOST_TILES, Lowering, ceil_div
from hornito.ops.variants import Variant
from hornito.quant.formats import OUTLIER_NUMBERS, weight_format

if TYPE_CHECKING:
    from hornito.ops.linear import LinearArgs

THREADS = 256

EXACT, HALF = 3, 2
"""Bytes of a column of x: three keep it as fp32 would, two to 2^-16 of the greatest of 32 columns,
which is more than fp16 has, and are a third faster (7B)."""

LEAST_LANES = 4
"""Threads of a subgroup that share a chunk of x while it is brought."""

DIGIT_WEIGHTS, SPLIT_WEIGHTS = 1 << 21, 1 << 23
"""Weights from which integer dot products pay, and those of products whose parts have to join."""

TALL, BUSY = 1 << 16, 4
"""Weight rows of which there are so many that a thread had better have several chunks, and how
many."""

FILL, RESIDENT = 2 * 132, 5 * 132
"""Workgroups that fill a discrete GPU, and those that it holds at a time: each brings x to its own
shared memory once, and walks over several tiles where there are more."""

LONG, VERY_LONG = 4096, 16384
"""Columns from which K is summed in three parts and in four, where tiles are few."""

MOST_SPLITS = 8
"""Most parts of K that join (digits.comp)."""

SHARED = 32768
"""Bytes of shared memory that a workgroup takes at most."""

SHARED_MORE = 80
"""Of them, those of each kernel's own few words, and of padding: variables begin at 16 bytes."""


@dataclass(frozen=True, slots=True)
class DigitGeometry:
    """How the threads of a workgroup share its weight rows.

    Attributes:
        lanes: threads of a group of two weight rows, a power of two.
        splits: parts of K, each with workgroups of its own.
        digits: bytes of a column of x.
    """

    lanes: int
    splits: int = 1
    digits: int = EXACT

    def tiles(self, products: int) -> int:
        """Tiles of weight rows."""
        return ceil_div(products, THREADS // self.lanes * 2)

    def part(self, k: int) -> int:
        """Chunks of 32 columns of a part."""
        return ceil_div(k // 32, self.splits)

    def shared(self, args: LinearArgs) -> int:
        """Bytes of shared memory (digits.glsl)."""
        of_x = self.part(args.k) * (32 * self.digits + 8)
        outliers = 4 * weight_format(args.dtype).outliers + 4
        return of_x + outliers + THREADS + 16 * (THREADS // self.lanes) + SHARED_MORE

    def fits(self, args: LinearArgs) -> bool:
        """Whether the kernels take the product in this way."""
        if self.splits > 1 and self.tiles(args.products) > MOST_TILES:
            return False
        whole = (self.splits - 1) * self.part(args.k) < args.k // 32  # no part is empty
        return whole and self.shared(args) <= SHARED

    def variant(self, args: LinearArgs, kernel: str, *, optional: bool) -> Variant:
        """A workgroup for each tile, or as many as walk over equally many."""
        tiles = self.tiles(args.products)
        walked = ceil_div(tiles * self.splits, RESIDENT)
        return Variant(
            kernel,
            {5: self.lanes, 12: self.splits, 13: args.k // 32, 14: self.digits},
            (ceil_div(tiles, walked), 1, self.splits),
            (
                "fast_dot_product",
                "shuffle",
                f"subgroup>={self.lanes}",
                f"shared>={self.shared(args)}",
                f"threads>={THREADS}",
            ),
            full_subgroups=True,
            optional=optional,
            inexact=self.digits < EXACT,
        )


def digit_variants(args: LinearArgs, low: Lowering, kernel: str, most_splits: int) -> list[Variant]:
    """The usual geometry first, the others to be measured; none where the weights are no integers,
    or x is several rows. All are to be measured where the matrix is small.

    Args:
        most_splits: parts of K that the kernel joins at most; with a norm it is one.
    """
    stored = weight_format(args.dtype)
    integers = stored.number in OUTLIER_NUMBERS  # int8, int4 and int4m, and blocks like them
    chunks = args.k % 32 == 0 and stored.group % 32 == 0
    lanes = low.caps.subgroup_min
    if args.rows != 1 or not integers or not chunks or lanes < LEAST_LANES:
        return []
    most = 1 if args.norm else most_splits
    usual = usual_geometry(args, most, lanes)
    splits = usual is not None and usual.splits > 1
    pays = args.products * args.k >= (SPLIT_WEIGHTS if splits else DIGIT_WEIGHTS)
    digits = HALF if low.half_operands else EXACT
    every = dict.fromkeys((*([usual] if usual else []), *_geometries(args, most, lanes)))
    return [
        replace(geometry, digits=digits).variant(
            args, kernel, optional=geometry != usual or not pays
        )
        for geometry in every
    ]


def usual_geometry(args: LinearArgs, most: int, subgroup: int) -> DigitGeometry | None:
    """Sixteen threads for two rows where that leaves enough workgroups, else thirty-two, and parts
    of long rows; eight where rows are many and short. As many more parts as shared memory needs."""
    tiles, splits = DigitGeometry(16).tiles(args.products), 1
    if args.k > LONG and tiles <= FILL:
        splits = min(most, 4 if args.k >= VERY_LONG else 3)
    if args.products >= TALL and args.k // 32 < BUSY * 16:
        lanes = 8
    else:
        lanes = 16 if tiles * splits >= FILL else 32
    candidates = (DigitGeometry(min(lanes, subgroup), n) for n in range(splits, most + 1))
    return next((geometry for geometry in candidates if geometry.fits(args)), None)


def _geometries(args: LinearArgs, most: int, subgroup: int) -> Iterator[DigitGeometry]:
    """All that fit the product."""
    for splits in range(1, most + 1):
        for lanes in (n for n in (8, 16, 32) if n <= subgroup):
            geometry = DigitGeometry(lanes, splits)
            # A part keeps its lanes busy, and more parts are for products that lack workgroups.
            serves = geometry.part(args.k) >= lanes and geometry.tiles(args.products) <= FILL
            if geometry.fits(args) and (splits == 1 or serves):
                yield geometry


def takes_digits(chosen: Variant) -> bool:
    """Whether it is a variant of kernels/linear/digits.comp."""
    return chosen.kernel.startswith("linear/digits.")
