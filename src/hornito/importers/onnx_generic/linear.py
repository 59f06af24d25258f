"""ONNX ops that multiply matrices."""

from __future__ import annotations

from hornito.importers.onnx.reader import OpNode
from hornito.importers.onnx_generic.builder import Builder, Ref
from hornito.importers.onnx_generic.elementwise import NUMBERS
from hornito.importers.onnx_generic.table import (
    handles,
    inputs,
    integer,
    number,
    of_type,
    optional,
)
from hornito.tensor.graph import FLOATS


@handles("MatMul")
def _matmul(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, c = inputs(x, 2)
    of_type(c, (of_type(a, NUMBERS).dtype,))
    return [product(b, a, c)]


def product(b: Builder, a: Ref, c: Ref) -> Ref:
    """`a @ c` by numpy's rules for vectors and stacks."""
    left = b.reshape(a, (1, *a.shape)) if a.rank == 1 else a
    right = b.reshape(c, (*c.shape, 1)) if c.rank == 1 else c
    made = b.matmul(left, right)
    shape = list(made.shape)
    if c.rank == 1:
        shape.pop(-1)
    if a.rank == 1:
        shape.pop(-1 if c.rank == 1 else -2)
    return b.reshape(made, shape)


@handles("Gemm")
def _gemm(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, c = inputs(x, 2)
    return [
        b.matmul(
            of_type(a, FLOATS),
            of_type(c, FLOATS),
            flip_a=bool(integer(node, "transA", 0)),
            flip_b=bool(integer(node, "transB", 0)),
            alpha=number(node, "alpha", 1.0),
            c=optional(x, 2),
            beta=number(node, "beta", 1.0),
        )
    ]


@handles("MatMulInteger")
def _matmul_integer(b: Builder, node: OpNode, x: list[Ref | None]) -> list[Ref]:
    a, c = inputs(x, 2)
    left, right = b.cast(a, "int32"), b.cast(c, "int32")
    zeros = optional(x, 2), optional(x, 3)
    if zeros[0] is not None:
        zero = b.cast(zeros[0], "int32")
        if zero.rank == 1 and zero.size > 1:
            zero = b.reshape(zero, (zero.size, 1))
        left = b.map("sub", [left, zero])
    if zeros[1] is not None:
        right = b.map("sub", [right, b.cast(zeros[1], "int32")])
    return [product(b, left, right)]
