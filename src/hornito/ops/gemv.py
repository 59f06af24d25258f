"""Products of few rows on GPUs: the geometries of kernels/linear/gemv.comp and gemv_append.comp."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hornito.ops.base import MOST_TILES, ceil_div
from hornito.ops.variants import Variant
from hornito.quant.formats import OUTLIER_NUMBERS, weight_format

if TYPE_CHECKING:
    from hornito.ops.linear import LinearArgs

NORM, OUTS, DIGIT_SPLITS, DIGIT_UNITS = 10, 11, 12, 13
"""Specialisation of kernels/include/gemv.glsl: a norm comes first; weight rows of a group of
threads; parts of K, and columns of x that a thread brings (gemv_digits.glsl)."""

GEMV_ROWS = 4
"""Up to this many rows a GPU takes the kernel that streams weights once per group of rows."""

THREADS = 128

MANY_PRODUCTS = 8192
"""From this many weight rows on, a group takes four of them at a time."""

DIGIT_WEIGHTS, DIGIT_QKV_WEIGHTS = 1 << 22, 1 << 19
"""Weights from which a row of x in digits pays, and those of q, k and v together."""

HEAD_PRODUCTS = 1 << 16
"""With so many weight rows memory is the limit anyway, and each loads x from a cache."""

GROUPS, RESIDENT = 200, 3 * 132
"""Workgroups that fill a discrete GPU, and those that it holds at a time: each brings x to its own
shared memory once, and then walks over several tiles of weight rows."""

PIECE = 200
"""Most chunks of 32 columns that a workgroup has in digits (gemv_digits.glsl)."""

MOST_SPLITS = 8
"""Most parts of K that join (gemv.comp)."""

DIGITS_SHARED = PIECE * (6 * 16 + 2 * 16 + 8) + 128 * 9 * 4 + 4
"""Bytes of shared memory of kernels with digits."""

FUSED_NORM = 1 << 24
"""Quantised weights from which a norm is faster in a launch of its own than in each workgroup,
where x comes from memory (7B, 4 bits: 56 us against 42)."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the threads of a workgroup share its weight rows.

    Attributes:
        lanes: threads of a group, a power of two.
        outs: weight rows of a group: 1, 2, 4 or 8.
        digits: whether x lies in shared memory, as digits for integer dot products.
        splits: parts of K, each with workgroups of its own; only of digits.
    """

    lanes: int
    outs: int
    digits: bool = False
    splits: int = 1

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return THREADS // self.lanes * self.outs

    def spec(self, args: LinearArgs) -> dict[int, int]:
        """The specialisation values."""
        rows = power_of_two(min(args.rows, GEMV_ROWS))
        own = {3: rows, 4: wide_rows(args.k, args.dtype), 5: self.lanes, OUTS: self.outs}
        if not self.digits:
            return own
        units = ceil_div(4 * ceil_div(args.k // 32, self.splits), THREADS)
        return own | {DIGIT_SPLITS: self.splits, DIGIT_UNITS: units}

    def groups(self, args: LinearArgs) -> tuple[int, int, int]:
        """The grid for one row: a workgroup for each tile, or as many as walk over equally many."""
        tiles = self.tiles(args)
        walked = ceil_div(tiles * self.splits, RESIDENT) if self.digits else 1
        return ceil_div(tiles, walked), 1, self.splits

    def tiles(self, args: LinearArgs) -> int:
        """Tiles of weight rows."""
        return ceil_div(args.products, self.rows)

    def kernel(self, name: str) -> str:
        """The kernel of a variant's name; that of digits is `d` instead of `q`."""
        return name[:-1] + "d" if self.digits else name

    @property
    def needs(self) -> tuple[str, ...]:
        """What a device must offer (`hornito.ops.variants`)."""
        return ("fast_dot_product", f"shared>={DIGITS_SHARED}") if self.digits else ()


def gemv_variants(args: LinearArgs, name: str, most_groups: int) -> list[Variant]:
    """The usual geometries first, the others to be measured."""
    least = 2 if args.gated else 1
    usual = [gemv_geometry(args.products, args.k, least, most_groups)]
    # With very many weight rows memory is the limit anyway, and with splits it is to be measured.
    large = args.products * args.k >= DIGIT_WEIGHTS and args.products < HEAD_PRODUCTS
    if large and has_digits(args) and least_splits(args.k) == 1:
        usual.insert(0, digit_geometry(args))
    return _variants(args, f"linear/gemv.{name}", usual, lambda g: g.outs >= least)


def qkv_variants(args: LinearArgs, name: str) -> list[Variant]:
    """The same for kernels/linear/gemv_append.comp, whose groups have pairs of weight rows."""
    usual = [Geometry(64, 2)]
    whole = has_digits(args) and least_splits(args.k) == 1
    if whole and args.products * args.k >= DIGIT_QKV_WEIGHTS:
        usual.insert(0, digit_geometry(args))

    def fits(geometry: Geometry) -> bool:
        pairs = geometry.outs > 2 or (geometry.outs == 2 and geometry.lanes <= 64)
        return pairs and geometry.splits == 1

    return _variants(args, f"linear/gemv_append.{name}", usual, fits)


def _variants(
    args: LinearArgs,
    kernel: str,
    usual: Sequence[Geometry],
    fits: Callable[[Geometry], bool],
) -> list[Variant]:
    """The usual geometries of a kernel, and as optional variants all others that fit it."""
    return [
        Variant(
            geometry.kernel(kernel),
            geometry.spec(args),
            geometry.groups(args),
            geometry.needs,
            optional=geometry not in usual,
        )
        for geometry in dict.fromkeys((*usual, *_geometries(args)))
        if fits(geometry)
    ]


def _geometries(args: LinearArgs) -> Iterable[Geometry]:
    """All that fit the product."""
    outs = (1, 2, 4, 8) if args.rows == 1 and quantised(args.dtype) else (1, 2, 4)
    for n in outs:
        for lanes in (8, 16, 32, 64, 128):
            if lanes >= n:
                yield Geometry(lanes, n)
    if not has_digits(args):
        return
    least = least_splits(args.k)
    most = 1 if args.norm else min(MOST_SPLITS, 4 * least)
    for splits in range(least, most + 1):
        for lanes, n in ((16, 2), (64, 2), (16, 4), (32, 4), (64, 4), (16, 8), (32, 8), (64, 8)):
            geometry = Geometry(lanes, n, digits=True, splits=splits)
            tiles = geometry.tiles(args)
            # More parts are for products that lack workgroups, and a part keeps its lanes busy.
            serves = tiles * splits <= RESIDENT and args.k // 32 >= lanes * splits
            if splits == 1 or (tiles <= MOST_TILES and (serves or splits == least)):
                yield geometry


def digit_geometry(args: LinearArgs) -> Geometry:
    """As many weight rows a tile as leave enough workgroups, at most 32; many bytes on their way
    for each thread: a chunk of 4-bit weights has 16, one of 8 bits 32."""
    rows = 32
    while rows > 4 and ceil_div(args.products, rows) < GROUPS:
        rows //= 2
    most = 4 if weight_format(args.dtype).bits > 6 else 8
    outs = min(most, rows // 2 if rows < 16 else most)
    lanes = THREADS * outs // rows
    while lanes > 8 and lanes // 2 >= args.k // 32:
        lanes //= 2
    return Geometry(lanes, outs, digits=True)


def least_splits(k: int) -> int:
    """Parts of K, each of which fits the shared memory of kernels with digits."""
    return ceil_div(k, 32 * PIECE)


def has_digits(args: LinearArgs) -> bool:
    """Whether integer dot products serve: one row, integers of 8 or 4 bits in groups of whole
    chunks of 32."""
    stored = weight_format(args.dtype)
    integers = stored.number in OUTLIER_NUMBERS  # int8, int4 and int4m, and blocks like them
    whole = args.k % 32 == 0 and stored.group % 32 == 0
    parts = least_splits(args.k)
    return args.rows == 1 and integers and whole and parts <= (1 if args.norm else MOST_SPLITS)


def gemv_geometry(products: int, k: int, least_outs: int, most_groups: int) -> Geometry:
    """Threads of a group and its weight rows where x comes from memory: many threads where rows are
    few and long, so that the GPU fills; four rows where there are enough, so that x is loaded less
    often."""
    if products >= MANY_PRODUCTS:
        lanes, outs = (16 if products >= 8 * MANY_PRODUCTS else 32), 4
    else:
        lanes, outs = (128 if products < 2048 and k >= 4096 else 64), max(least_outs, 2)
    while lanes > 8 and (lanes > k // 8 or ceil_div(products, 128 // lanes * outs) > most_groups):
        lanes //= 2
    return Geometry(lanes, outs)


def batch_variant(args: LinearArgs, name: str, most_groups: int, *, optional: bool) -> Variant:
    """GEMV over groups of rows, whose weights the later groups find in a cache."""
    geometry = gemv_geometry(args.products, args.k, 2 if args.gated else 1, most_groups)
    return Variant(
        f"linear/gemv.{name}",
        geometry.spec(args),
        (ceil_div(args.products, geometry.rows), ceil_div(args.rows, GEMV_ROWS), 1),
        optional=optional,
    )


def is_gemv(chosen: Variant) -> bool:
    """Whether it is a variant of kernels/linear/gemv.comp."""
    return chosen.kernel.startswith("linear/gemv.")


def takes_digits(chosen: Variant) -> bool:
    """Whether it is one of those with integer dot products."""
    return is_gemv(chosen) and chosen.kernel.endswith("d")


def norm_apart(args: LinearArgs, chosen: Variant) -> bool:
    """Whether a norm of x is faster in a launch of its own, before this GEMV."""
    large = quantised(args.dtype) and args.products * args.k >= FUSED_NORM
    return large and not takes_digits(chosen)


def quantised(dtype: str) -> bool:
    """Whether weights of that type have scales."""
    return weight_format(dtype).quantised


def wide_rows(k: int, dtype: str) -> int:
    """Whether rows of K weights are whole chunks of gemv_floats.glsl: 1 or 0."""
    return int(k % (16 if weight_format(dtype).variant == "q" else 8) == 0)


def power_of_two(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()
