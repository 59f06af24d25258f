"""Symbolic dimensions: arithmetic, binding, JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hornito.errors import FormatError
from hornito.graph.shapes import (
    Affine,
    S,
    T,
    bind,
    bind_shape,
    dim_from_json,
    dim_to_json,
    symbol,
)

dims = st.one_of(
    st.integers(-1000, 1000),
    st.builds(
        lambda a, b, c: T * a + S * b + c,
        st.integers(-9, 9),
        st.integers(-9, 9),
        st.integers(-99, 99),
    ),
)


@given(dims)
def test_dims_survive_json(dim: Any) -> None:
    assert dim_from_json(json.loads(json.dumps(dim_to_json(dim)))) == dim


@given(dims, dims, st.integers(-5, 5), st.integers(0, 50), st.integers(0, 50))
def test_dims_bind_like_numbers(a: Any, b: Any, factor: int, t: int, s: int) -> None:
    values = {"T": t, "S": s}
    assert bind(a + b, values) == bind(a, values) + bind(b, values)
    assert bind(a * factor, values) == factor * bind(a, values)


def test_dims_that_vanish_are_numbers() -> None:
    assert T + T * -1 == 0 and isinstance(T + T * -1, int)
    assert str(T * 2 + 1) == "2*T+1" and T + S == S + T
    assert isinstance(T + 0, Affine)
    with pytest.raises(FormatError, match="symbol T has no value"):
        bind(T, {"S": 1})
    assert bind(symbol("past") + T, {"past": 3, "T": 4}) == 7


@pytest.mark.parametrize("text", ("", "T*2", "2**T", "T-1", "1.5", "2*", "T T", True, None, [1]))
def test_texts_that_are_no_dims(text: Any) -> None:
    with pytest.raises(FormatError):
        dim_from_json(text)


def test_shapes_bind_dim_by_dim() -> None:
    assert bind_shape((T, 8, S * 2), {"T": 3, "S": 1}) == (3, 8, 2)
