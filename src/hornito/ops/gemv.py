"""Products of few rows on GPUs: the geometries of kernels/linear/gemv.comp and gemv_append.comp."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hornito.ops.base import ceil_div
from hornito.ops.variants import Variant
from hornito.quant.formats import OUTLIER_NUMBERS, weight_format

if TYPE_CHECKING:
    from hornito.ops.linear import LinearArgs

NORM, OUTS, X_WAY = 10, 11, 12
"""Specialisation of kernels/include/gemv.glsl: a norm comes first; weight rows of a group of
threads; how x is laid out in shared memory (gemv_floats.glsl, gemv_digits.glsl)."""

GEMV_ROWS = 4
"""Up to this many rows a GPU takes the kernel that streams weights once per group of rows."""

THREADS = 128

MANY_PRODUCTS = 8192
"""From this many weight rows on, a group takes four of them at a time."""

MOST_STAGED = 5120
"""Longest row of x that goes through shared memory as it is: several workgroups have room."""

STAGED_WEIGHTS, DIGIT_WEIGHTS = 1 << 21, 1 << 22
"""Weights from which a row of x through shared memory pays, as floats and as digits."""

HEAD_PRODUCTS = 1 << 16
"""With so many weight rows memory is the limit anyway, and each loads x from a cache."""

GROUPS = 200
"""Workgroups that fill a discrete GPU, where each brings x to its own shared memory."""

PIECE = 128
"""Chunks of 32 columns that a workgroup has in digits at a time, more or less."""

SUMS_BYTES = THREADS * 9 * 4
"""Shared memory for sums, and of a chunk's digits and scales."""

DIGIT_BYTES = 6 * 16 + 2 * 16 + 8

FUSED_NORM = 1 << 24
"""Quantised weights from which a norm is faster in a launch of its own than in each workgroup,
where x comes from memory (7B, 4 bits: 56 us against 42)."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the threads of a workgroup share its weight rows.

    Attributes:
        lanes: threads of a group, a power of two.
        outs: weight rows of a group: 1, 2, 4 or 8.
        way: how x comes to the threads: from `memory`, `staged` in shared memory, or there as
            `digits` for integer dot products.
    """

    lanes: int
    outs: int
    way: str = "memory"

    @property
    def rows(self) -> int:
        """Weight rows of a workgroup."""
        return THREADS // self.lanes * self.outs

    def spec(self, args: LinearArgs) -> dict[int, int]:
        """The specialisation values."""
        rows = power_of_two(min(args.rows, GEMV_ROWS))
        own = {3: rows, 4: wide_rows(args.k, args.dtype), 5: self.lanes, OUTS: self.outs}
        if weight_format(args.dtype).variant == "q":
            own[X_WAY] = {"memory": 0, "staged": _pitch(args.k), "digits": self._piece(args.k)}[
                self.way
            ]
        return own

    def kernel(self, name: str) -> str:
        """The kernel of a variant's name; that of digits is `d` instead of `q`."""
        return name[:-1] + "d" if self.way == "digits" else name

    def needs(self, k: int) -> tuple[str, ...]:
        """What a device must offer (`hornito.ops.variants`)."""
        if self.way == "staged":
            return (f"shared>={64 * _pitch(k) + SUMS_BYTES}",)
        if self.way == "digits":
            return ("fast_dot_product", f"shared>={DIGIT_BYTES * self._piece(k) + SUMS_BYTES}")
        return ()

    def _piece(self, k: int) -> int:
        """Chunks in shared memory at a time: whole turns of the lanes."""
        turn = self.lanes * (1 if self.outs == 8 else 2)
        whole = ceil_div(k // 32, turn) * turn
        return whole if whole <= PIECE + PIECE // 4 else max(turn, PIECE // turn * turn)


def gemv_variants(args: LinearArgs, name: str, most_groups: int) -> list[Variant]:
    """The usual geometries first, the others to be measured."""
    least = 2 if args.gated else 1
    usual = usual_geometries(args, least, most_groups)
    return [
        Variant(
            geometry.kernel(f"linear/gemv.{name}"),
            geometry.spec(args),
            (ceil_div(args.products, geometry.rows), 1, 1),
            geometry.needs(args.k),
            optional=geometry not in usual,
        )
        for geometry in dict.fromkeys((*usual, *all_geometries(args)))
        if geometry.outs >= least
    ]


def usual_geometries(args: LinearArgs, least_outs: int, most_groups: int) -> list[Geometry]:
    """What is taken without a measurement, best first: the last one runs on every GPU."""
    plain = gemv_geometry(args.products, args.k, least_outs, most_groups)
    weights = args.products * args.k
    if args.products >= HEAD_PRODUCTS:
        return [plain]
    filled = _filling(args.products, args.k)
    usual = []
    if has_digits(args) and weights >= DIGIT_WEIGHTS:
        usual.append(Geometry(filled.lanes, filled.outs, "digits"))
    if _stages(args) and weights >= STAGED_WEIGHTS:
        usual.append(Geometry(filled.lanes, filled.outs, "staged"))
    return [*usual, plain]


def all_geometries(args: LinearArgs) -> Iterable[Geometry]:
    """All that fit the product."""
    outs = (1, 2, 4, 8) if args.rows == 1 and quantised(args.dtype) else (1, 2, 4)
    for n in outs:
        for lanes in (8, 16, 32, 64, 128):
            if lanes >= n:
                yield Geometry(lanes, n)
    for way, fits in (("staged", _stages(args)), ("digits", has_digits(args))):
        if fits:
            for lanes, n in (
                (16, 2),
                (32, 2),
                (64, 2),
                (16, 4),
                (32, 4),
                (64, 4),
                (16, 8),
                (32, 8),
            ):
                yield Geometry(lanes, n, way)


def _filling(products: int, k: int) -> Geometry:
    """As many weight rows a workgroup as leave enough workgroups, at most 32."""
    rows = 32
    while rows > 4 and ceil_div(products, rows) < GROUPS:
        rows //= 2
    outs = 4 if rows >= 16 else 2
    lanes = THREADS * outs // rows
    while lanes > 8 and lanes > k // 32:
        lanes //= 2
    return Geometry(lanes, outs)


def _stages(args: LinearArgs) -> bool:
    """Whether x may go through shared memory: one row that fits, of weights small beside it."""
    wide = bool(wide_rows(args.k, args.dtype)) and quantised(args.dtype)
    return args.rows == 1 and wide and args.k <= MOST_STAGED


def has_digits(args: LinearArgs) -> bool:
    """Whether integer dot products serve: one row, integers of 8 or 4 bits in groups of whole
    chunks of 32."""
    stored = weight_format(args.dtype)
    integers = stored.number in OUTLIER_NUMBERS  # int8, int4 and int4m, and blocks like them
    return args.rows == 1 and integers and args.k % 32 == 0 and stored.group % 32 == 0


def _pitch(k: int) -> int:
    """Vectors between the four parts of a staged row of K."""
    return k // 16 + (2 - k // 16) % 8


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


def norm_apart(args: LinearArgs, chosen: Variant) -> bool:
    """Whether a norm of x is faster in a launch of its own, before this GEMV."""
    large = quantised(args.dtype) and args.products * args.k >= FUSED_NORM
    return large and not chosen.spec.get(X_WAY, 0)


def quantised(dtype: str) -> bool:
    """Whether weights of that type have scales."""
    return weight_format(dtype).quantised


def wide_rows(k: int, dtype: str) -> int:
    """Whether rows of K weights are whole chunks of gemv_floats.glsl: 1 or 0."""
    return int(k % (16 if weight_format(dtype).variant == "q" else 8) == 0)


def power_of_two(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()
