"""RoPE frequencies from a Hugging Face config: one table of `inv_freq` per model.

Numbers are computed in float64 and rounded once to fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import UnsupportedError
from hornito.models._builder import SourceTensor

SCALINGS = ("default", "llama3", "linear", "freq_factors")


def inverse_frequencies(
    config: Mapping[str, Any],
    tensors: Mapping[str, SourceTensor],
    rotary_dim: int,
    theta: float,
) -> npt.NDArray[np.float32]:
    """`inv_freq [rotary_dim / 2]` with the config's scaling applied.

    `freq_factors` is how GGUF spells a scaling that no formula explains: divisors, in a tensor that
    the config names.

    Source: the `rope_scaling` rules of transformers (llama3: the Llama 3.1 report's smoothing
    between scaled and unscaled wavelengths).

    Raises:
        UnsupportedError: a scaling that Hornito does not know.
    """
    inv = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        inv = inv / float(scaling["factor"])
    elif kind == "llama3":
        inv = _llama3(inv, scaling)
    elif kind == "freq_factors":
        factors = tensors[scaling["tensor"]]
        inv = inv / factors.rows(0, factors.shape[0]).astype(np.float64)
    elif kind != "default":
        raise UnsupportedError(
            f"rope_scaling type {kind!r} is not supported; supported: {', '.join(SCALINGS)}"
        )
    return inv.astype(np.float32)


def _llama3(inv: npt.NDArray[np.float64], scaling: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2.0 * math.pi / inv
    smooth = (original / wavelength - low) / (high - low)
    mixed = (1.0 - smooth) * inv / factor + smooth * inv
    return np.where(
        wavelength > original / low,
        inv / factor,
        np.where(wavelength < original / high, inv, mixed),
    )
