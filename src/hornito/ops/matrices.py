"""Cooperative matrices in products: tiles and splits of kernels/linear/coopmat.comp."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hornito.ops.variants import Variant

if TYPE_CHECKING:
    from hornito.ops.linear import LinearArgs

X_HALF, SPLITS = 3, 5
"""Specialisation constants of coopmat.comp; join.comp has the second, too."""

MATRIX_NEEDS = ("coopmat_16", "float16", "full_subgroups", "subgroup_32")

UNITS = 132
"""Compute units that the usual choice counts on: those of the device that was measured."""

JOIN_US, JOIN_BYTES_US = 3.0, 3e6
"""What joining splits costs: a launch, and bytes a microsecond for writing and reading raw sums."""

MOST_OFFERED = 6
"""Variants of a product that are offered to be measured."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a workgroup computes: rows of x by weight rows, `step` of K at a time.

    `step_us` is the time of one step as it was measured with x in fp16, which a norm
    leaves (and every op at precision `low`), and
    `floats_us` what x in fp32 adds; `alone` says that a compute unit holds one such workgroup at a
    time.
    """

    stem: str
    rows: int
    weights: int
    step: int
    threads: int
    step_us: float
    floats_us: float = 0.0
    alone: bool = False

    @property
    def shared(self) -> int:
        """Bytes of shared memory: two steps of both operands, rows eight halves apart."""
        return 2 * (self.rows + self.weights) * (self.step + 8) * 2

    def microseconds(self, args: LinearArgs, splits: int, half_x: bool) -> float:
        """Estimated time, launches left out."""
        across, down = self.groups(args.rows, args.products)
        waves = across * down * splits / UNITS
        waves = math.ceil(waves) if self.alone else max(1.0, waves)
        steps = math.ceil(math.ceil(args.k / self.step) / splits)
        joined = 8 * splits * args.rows * args.products
        join = JOIN_US + joined / JOIN_BYTES_US if splits > 1 else 0.0
        step = self.step_us + (0.0 if half_x else self.floats_us)
        return steps * step * waves + join

    def groups(self, rows: int, products: int) -> tuple[int, int]:
        """Tiles across the weight rows and down the rows of x."""
        return -(-products // self.weights), -(-rows // self.rows)


TILES = (
    Tile("m32", 32, 64, 64, 128, 0.7),
    Tile("m64", 64, 64, 64, 128, 0.75),
    Tile("m128", 128, 128, 32, 256, 0.8, 0.05, alone=True),
    Tile("m256", 256, 128, 16, 256, 0.71, 0.2, alone=True),
)
"""The variants of coopmat.comp."""


def tile_of(kernel: str) -> Tile:
    """The tile of a variant's kernel."""
    return next(tile for tile in TILES if f".{tile.stem}_" in kernel)


def matrix_variants(args: LinearArgs, name: str, half_values: bool) -> list[Variant]:
    """Tiles and splits, those that should be fastest first, the others to be measured."""
    if args.k % 8 or args.dtype == "fp32":
        return []
    half_x = half_values or args.norm is not None
    pairs = sorted(_pairs(args), key=lambda pair: pair[0].microseconds(args, pair[1], half_x))
    # The best of every tile comes before more of one: a tile may not fit the device.
    firsts = {tile.stem: (tile, splits) for tile, splits in reversed(pairs)}
    usual = [pair for pair in pairs if pair in firsts.values()]
    others = [pair for pair in pairs if pair not in usual]
    return [
        Variant(
            f"linear/coopmat.{tile.stem}_{name}",
            {X_HALF: 0, SPLITS: splits},
            (*tile.groups(args.rows, args.products), splits),
            (*MATRIX_NEEDS, f"shared>={tile.shared}", f"threads>={tile.threads}"),
            full_subgroups=True,
            inexact=True,
            optional=(tile, splits) not in usual,
        )
        for tile, splits in [*usual, *others][:MOST_OFFERED]
    ]


def _pairs(args: LinearArgs) -> Iterator[tuple[Tile, int]]:
    """Tiles that are not mostly empty, with splits of at least three steps, none of them empty."""
    for tile in TILES:
        if tile.rows > 32 and tile.rows >= 2 * args.rows:
            continue
        steps = -(-args.k // tile.step)
        for splits in (1, 2, 3, 4, 6, 8, 12, 16):
            even = -(-steps // -(-steps // splits)) == splits
            if even and (splits == 1 or steps >= 3 * splits):
                yield tile, splits
