"""What a tensor of an ONNX graph is found to be.

Lifting evaluates the graph once over these descriptions instead of numbers. Most hold a shape whose
sizes are integers or `Affine` in N (rows of the call) and P (past), and say in numpy arrays what
lies along the other axes, so that every reshape, transpose, slice, expand and concat is checked
exactly instead of matched by its spelling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.graph.shapes import Dim
from hornito.graph.weights import WeightData
from hornito.importers.onnx.affine import Dims

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

#: Elements of a constant that may be computed with; larger ones are only viewed.
MAX_COMPUTED = 1 << 22


class Unmatched(Exception):
    """An operation that no matcher explains; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """Known numbers: an initialiser (a view of its file), or integers that may depend on the call.

    `sources` names the initialisers that it was made of. bf16 data are viewed as uint16.
    """

    array: Array
    sources: tuple[str, ...] = ()
    bf16: bool = False

    @property
    def shape(self) -> Dims:
        return self.array.shape

    @property
    def size(self) -> int:
        return int(self.array.size)

    def numbers(self) -> Array:
        """The array to compute with (bf16 as float32); Unmatched when it is too large."""
        if self.array.size > MAX_COMPUTED:
            raise Unmatched(f"a constant of {self.array.size} elements is computed with")
        return widen(self.array) if self.bf16 else self.array

    def scalar(self) -> float | None:
        """Its one number, None when it has several, or one that depends on the call."""
        if self.array.size != 1 or self.array.dtype == object:
            return None
        return float(self.numbers().reshape(())[()])


def widen(array: Array) -> npt.NDArray[np.float32]:
    """bf16 bits as float32."""
    return (array.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A quantised matrix `[rows, columns]`, dequantised when it is read."""

    data: WeightData

    @property
    def shape(self) -> Dims:
        return self.data.shape


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """The call's token ids."""

    shape: Dims


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Integers linear in the index: `base + sum(step[a] * index[a])`. Positions are such."""

    shape: Dims
    base: Dim
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Atom:
    """A truth about an element: `ge0`, that `base + sum(step * index) >= 0`; or `valid`, that the
    attention mask is set at that slot."""

    kind: str
    base: Dim
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A tensor whose elements depend on the truth of a few atoms: `table[t0, t1, ...]`.

    Without atoms it is one number everywhere. `nodes` are ONNX nodes that made it.
    """

    shape: Dims
    atoms: tuple[Atom, ...]
    table: Array


@dataclass(frozen=True, slots=True, eq=False)
class Stacked:
    """Index grids side by side along a last axis of their own (for GatherND, ScatterND)."""

    grids: tuple[Grid, ...]

    @property
    def shape(self) -> Dims:
        return (*self.grids[0].shape, len(self.grids))


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A part of a sum over columns of a value: `coef * turn * x[row, cols]`.

    `kind` is 0 for no turn, 1 for cos and 2 for sin of position times `freq`. All four arrays have
    the shape of the tensor, with size 1 at the axis of rows.
    """

    cols: npt.NDArray[np.int64]
    coef: Floats
    kind: npt.NDArray[np.int8]
    freq: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Activations: sums of columns of a raised value `[T, width]`, rows along `axis`."""

    value: str
    axis: int
    dim: Dim
    terms: tuple[Term, ...]
    factor: float = 1.0

    @property
    def arrays(self) -> list[Array]:
        return [a for t in self.terms for a in (t.cols, t.coef, t.kind, t.freq)]

    @property
    def shape(self) -> Dims:
        return with_axis(self.terms[0].cols.shape, self.axis, self.dim)

    def with_arrays(self, arrays: list[Array], axis: int) -> Rows:
        terms = tuple(Term(*arrays[i : i + 4]) for i in range(0, len(arrays), 4))
        return replace(self, terms=terms, axis=axis)

    @property
    def plain(self) -> bool:
        """Whether it is just columns: no turn and no coefficient."""
        return len(self.terms) == 1 and not self.terms[0].kind.any() and is_one(self.terms[0].coef)


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """A layer's cached keys or values, `cols` counted over all axes but that of positions."""

    layer: int
    part: str
    axis: int
    dim: Dim
    cols: npt.NDArray[np.int64]

    @property
    def arrays(self) -> list[Array]:
        return [self.cols]

    @property
    def shape(self) -> Dims:
        return with_axis(self.cols.shape, self.axis, self.dim)

    def with_arrays(self, arrays: list[Array], axis: int) -> Past:
        return replace(self, cols=arrays[0], axis=axis)


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """Cached and new keys or values of a layer; `value` is what was appended, `root` the node."""

    layer: int
    part: str
    value: str
    root: int
    axis: int
    dim: Dim
    cols: npt.NDArray[np.int64]
    factor: float = 1.0

    @property
    def arrays(self) -> list[Array]:
        return [self.cols]

    @property
    def shape(self) -> Dims:
        return with_axis(self.cols.shape, self.axis, self.dim)

    def with_arrays(self, arrays: list[Array], axis: int) -> Keys:
        return replace(self, cols=arrays[0], axis=axis)


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """Position of the row times a frequency."""

    axis: int
    dim: Dim
    freq: Floats

    @property
    def arrays(self) -> list[Array]:
        return [self.freq]

    @property
    def shape(self) -> Dims:
        return with_axis(self.freq.shape, self.axis, self.dim)

    def with_arrays(self, arrays: list[Array], axis: int) -> Angles:
        return replace(self, freq=arrays[0], axis=axis)


@dataclass(frozen=True, slots=True, eq=False)
class Trig:
    """`coef` times cos (kind 1) or sin (kind 2) of the row's position times a frequency."""

    kind: int
    axis: int
    dim: Dim
    freq: Floats
    coef: Floats

    @property
    def arrays(self) -> list[Array]:
        return [self.freq, self.coef]

    @property
    def shape(self) -> Dims:
        return with_axis(self.freq.shape, self.axis, self.dim)

    def with_arrays(self, arrays: list[Array], axis: int) -> Trig:
        return replace(self, freq=arrays[0], coef=arrays[1], axis=axis)


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """Rows of a constant table at the rows' positions: learned positions, or cos and sin."""

    table: Const
    axis: int
    dim: Dim
    cols: npt.NDArray[np.int64]

    @property
    def arrays(self) -> list[Array]:
        return [self.cols]

    @property
    def shape(self) -> Dims:
        return with_axis(self.cols.shape, self.axis, self.dim)

    def with_arrays(self, arrays: list[Array], axis: int) -> Lookup:
        return replace(self, cols=arrays[0], axis=axis)


Tab = Rows | Past | Keys | Angles | Trig | Lookup
TABS = (Rows, Past, Keys, Angles, Trig, Lookup)


@dataclass(frozen=True, slots=True, eq=False)
class Poly:
    """A polynomial of activations: `sum(coefs[n] * x^n)`."""

    x: Rows
    coefs: dict[int, float]

    @property
    def shape(self) -> Dims:
        return self.x.shape


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """`poly(x) * (alpha + beta * function(x))`; function is sigmoid, tanh_gelu, erf or tanh:c."""

    x: Rows
    function: str
    alpha: float
    beta: float
    poly: dict[int, float] = field(default_factory=lambda: {0: 1.0})

    @property
    def shape(self) -> Dims:
        return self.x.shape


@dataclass(frozen=True, slots=True, eq=False)
class Active:
    """An activation function of x, not yet raised."""

    x: Rows
    activation: str

    @property
    def shape(self) -> Dims:
        return self.x.shape


@dataclass(frozen=True, slots=True, eq=False)
class Capped:
    """`cap * tanh(x / cap)`."""

    x: Rows
    cap: float

    @property
    def shape(self) -> Dims:
        return self.x.shape


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A step of an RMS norm (of x) or a layer norm (`centred`): `mean_square`, `stable` (plus
    eps), `root`, `inverse`, `normed`; `mean` is the plain mean of x."""

    stage: str
    x: Rows
    eps: float = 0.0
    centred: bool = False
    weight: Const | None = None

    @property
    def shape(self) -> Dims:
        whole = self.stage in ("normed", "centred", "weighted")
        return self.x.shape if whole else (*self.x.shape[:-1], 1)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Products of queries and keys: scaled, capped, masked, and with `soft` under a softmax."""

    shape: Dims
    q: str
    keys: Keys
    heads: int
    kv_heads: int
    head_dim: int
    factor: float
    cap: float = 0.0
    tanh: bool = False
    mask: Mask | None = None
    soft: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """Activations `[.., N, k, ..]` whose rows and next axis are seen as one, `[.., N * k, ..]`."""

    inner: Rows

    @property
    def shape(self) -> Dims:
        whole, axis = self.inner.shape, self.inner.axis
        return (*whole[:axis], whole[axis] * whole[axis + 1], *whole[axis + 2 :])  # type: ignore[operator]


@dataclass(frozen=True, slots=True, eq=False)
class NanFlag:
    """IsNaN of attention weights: true for rows that see nothing, which a causal row never is."""

    scores: Scores

    @property
    def shape(self) -> Dims:
        return self.scores.shape


@dataclass(frozen=True, slots=True, eq=False)
class Longer:
    """Whether the total length exceeds a limit (or, turned, does not)."""

    limit: int
    turned: bool = False

    @property
    def shape(self) -> Dims:
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A value that differs beyond a total length: constants of the two branches of an If."""

    limit: int
    short: Const
    long: Const

    @property
    def shape(self) -> Dims:
        return self.short.shape


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """A step of a product in 8-bit integers: activations as DynamicQuantizeLinear made them
    (`quantised`, their `scale` and `zero`), a `factor` (their scale times the weight's), and the
    `product` with a weight."""

    x: Rows
    part: str
    weight: Const | None = None
    zero: Const | None = None
    scale: Const | None = None

    @property
    def shape(self) -> Dims:
        if self.part == "product" and self.weight is not None:
            return (*self.x.shape[:-1], self.weight.shape[-1])
        return self.x.shape if self.part == "quantised" else ()


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A tensor that is not understood; `node` is the first node at fault."""

    node: int
    reason: str


Value = (
    Const
    | Matrix
    | Ids
    | Grid
    | Mask
    | Stacked
    | Rows
    | Past
    | Keys
    | Angles
    | Trig
    | Lookup
    | Poly
    | Curve
    | Active
    | Capped
    | Norm
    | Scores
    | Folded
    | NanFlag
    | Longer
    | Choice
    | Scaled
    | Opaque
)


def with_axis(sizes: tuple[int, ...], axis: int, dim: Dim) -> Dims:
    """The sizes of an array with the dimension of rows put in."""
    return (*sizes[:axis], dim, *sizes[axis + 1 :])


def is_one(coef: Floats) -> bool:
    """Whether all coefficients are 1."""
    return bool((coef == 1.0).all())


def columns(value: str, shape: tuple[int, ...], axis: int, dim: Dim) -> Rows:
    """A whole raised value, its columns in order over `shape` (size 1 at `axis`)."""
    cols = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    return Rows(value, axis, dim, (plain_term(cols),))


def plain_term(cols: npt.NDArray[np.int64]) -> Term:
    """Columns as they are."""
    shape = cols.shape
    return Term(
        cols,
        np.broadcast_to(np.float64(1.0), shape),
        np.broadcast_to(np.int8(0), shape),
        np.broadcast_to(np.float64(0.0), shape),
    )


def shape_of(value: Value) -> Dims:
    """The shape of any value that is understood."""
    if isinstance(value, Opaque):
        raise Unmatched(value.reason)
    return value.shape
