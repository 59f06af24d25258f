"""ONNX Einsum: operands are summed, transposed and multiplied two by two, as matrices."""

from __future__ import annotations

import math
import string

from hornito.errors import UnsupportedError
from hornito.importers.onnx.reader import OpNode
from hornito.importers.onnx_generic.builder import Builder, Ref
from hornito.importers.onnx_generic.elementwise import NUMBERS
from hornito.importers.onnx_generic.table import handles, inputs, of_type
from hornito.tensor.kernels import strides_of


@handles("Einsum")
def _einsum(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    operands = [of_type(a, NUMBERS) for a in inputs(x, len(x))]
    terms, result = _parsed(str(node.attrs["equation"]), operands)
    parts = [_diagonal(b, a, term) for a, term in zip(operands, terms, strict=True)]
    for i in range(len(parts)):
        others = {c for j, (_, term) in enumerate(parts) if j != i for c in term}
        parts[i] = _summed(b, *parts[i], others | set(result))
    while len(parts) > 1:
        later = {c for _, term in parts[2:] for c in term} | set(result)
        parts[:2] = [_product(b, parts[0], parts[1], later)]
    value, term = parts[0]
    return [b.transpose(value, [term.index(c) for c in result])]


def _parsed(equation: str, operands: list[Ref]) -> tuple[list[str], str]:
    """Letters of every operand and of the result; an ellipsis becomes letters of its own."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise UnsupportedError(f"equation {equation!r} for {len(operands)} operands")
    free = [c for c in string.ascii_uppercase + string.ascii_lowercase if c not in text]
    extra = max(
        (
            a.rank - len(t.replace("...", ""))
            for a, t in zip(operands, terms, strict=True)
            if "..." in t
        ),
        default=0,
    )
    dots = "".join(free[:extra])
    named = []
    for a, t in zip(operands, terms, strict=True):
        own = a.rank - len(t.replace("...", ""))
        named.append(t.replace("...", dots[len(dots) - own :] if own else ""))
        if len(named[-1]) != a.rank:
            raise UnsupportedError(f"equation {equation!r}: term {t!r} for shape {a.shape}")
    if arrow:
        return named, right.replace("...", dots)
    letters = "".join(named)
    once = sorted(c for c in set(letters) if letters.count(c) == 1 and c not in dots)
    return named, dots + "".join(once)


def _diagonal(b: Builder, a: Ref, term: str) -> tuple[Ref, str]:
    """Repeated letters of one operand read its diagonal."""
    letters = "".join(dict.fromkeys(term))
    if letters == term:
        return a, term
    own = strides_of(a.shape)
    shape = [a.shape[term.index(c)] for c in letters]
    steps = [sum(s for s, other in zip(own, term, strict=True) if other == c) for c in letters]
    return b.strided("identity", a, shape, steps), letters


def _summed(b: Builder, a: Ref, term: str, needed: set[str]) -> tuple[Ref, str]:
    axes = [i for i, c in enumerate(term) if c not in needed]
    if not axes:
        return a, term
    return b.reduce("sum", a, axes, False), "".join(c for c in term if c in needed)


def _product(
    b: Builder, first: tuple[Ref, str], second: tuple[Ref, str], needed: set[str]
) -> tuple[Ref, str]:
    (a, s), (c, t) = first, second
    shared = [d for d in s if d in t]
    sizes = dict(zip(t, c.shape, strict=True))
    for letter, dim in zip(s, a.shape, strict=True):
        sizes[letter] = max(dim, sizes.get(letter, 1))
    # Lengths of 1 broadcast.
    a = b.expand(a, [sizes[d] for d in s])
    c = b.expand(c, [sizes[d] for d in t])
    batch = [d for d in shared if d in needed]
    inner = [d for d in shared if d not in needed]
    rows = [d for d in s if d not in t]
    columns = [d for d in t if d not in s]

    def size(letters: list[str]) -> int:
        return math.prod(sizes[d] for d in letters)

    left = b.transpose(a, [s.index(d) for d in (*batch, *rows, *inner)])
    right = b.transpose(c, [t.index(d) for d in (*batch, *inner, *columns)])
    left = b.reshape(left, (size(batch), size(rows), size(inner)))
    right = b.reshape(right, (size(batch), size(inner), size(columns)))
    made = b.matmul(left, right)
    letters = [*batch, *rows, *columns]
    return b.reshape(made, [sizes[d] for d in letters]), "".join(letters)
