"""RoPE frequencies from a Hugging Face config.

Numbers are computed in float64 and rounded once to fp32. The rules are those of transformers
(`modeling_rope_utils.py`): linear, llama3 (the Llama 3.1 report), yarn (arXiv 2309.00071) and
longrope (arXiv 2402.13753).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError, UnsupportedError
from hornito.models._builder import Builder, Rope

Doubles = npt.NDArray[np.float64]

#: Keys of each scaling; a key that is not listed is refused by name.
SCALINGS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "longrope": frozenset(
        {
            "long_factor",
            "short_factor",
            "factor",
            "attention_factor",
            "original_max_position_embeddings",
        }
    ),
    # How GGUF spells a scaling that no formula explains: divisors in a tensor.
    "freq_factors": frozenset({"tensor"}),
}


def rotary(
    b: Builder,
    *,
    dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None,
    name: str = "rope.inv_freq",
) -> Rope:
    """RoPE over `dim` dimensions of each head, its table declared as the weight `name`.

    Raises:
        UnsupportedError: a scaling, or a setting of one, that Hornito does not know.
        FormatError: a setting is missing or does not fit.
    """
    scaling = scaling or {}
    kind = _kind(scaling)
    if dim < 2 or dim % 2 or theta <= 1.0:
        raise UnsupportedError(
            f"RoPE over {dim} dimensions with base {theta} is not supported: it takes an even "
            "number of dimensions and a base above 1"
        )
    inv = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)  # [R / 2]
    scale, original = 1.0, 0
    try:
        if kind == "linear":
            inv = inv / float(scaling["factor"])
        elif kind == "llama3":
            inv = _llama3(inv, scaling)
        elif kind == "yarn":
            inv, scale = _yarn(inv, theta, b.config, scaling)
        elif kind == "longrope":
            inv, scale, original = _longrope(inv, b.config, scaling)
        elif kind == "freq_factors":
            factors = b.tensors[scaling["tensor"]]
            inv = inv / factors.rows(0, factors.shape[0]).astype(np.float64)
    except KeyError as error:
        raise FormatError(f"rope_scaling of type {kind!r} lacks {error}") from error
    return Rope(b.constant(name, inv.astype(np.float32)), scale, original)


def _kind(scaling: Mapping[str, Any]) -> str:
    """The scaling's type, once all of its keys are known."""
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "dynamic":
        raise UnsupportedError(
            "rope_scaling type 'dynamic' (NTK) is not supported: it turns all keys anew as the "
            f"text grows; supported: {', '.join(SCALINGS)}"
        )
    if kind not in SCALINGS:
        raise UnsupportedError(
            f"rope_scaling type {kind!r} is not supported; supported: {', '.join(SCALINGS)}"
        )
    unknown = [
        f"{key}={value!r}"
        for key, value in scaling.items()
        if key not in SCALINGS[kind] | {"rope_type", "type"} and value is not None
    ]
    if unknown:
        raise UnsupportedError(
            f"rope_scaling settings that Hornito does not handle for {kind!r}: {', '.join(unknown)}"
        )
    return kind


def _llama3(inv: Doubles, scaling: Mapping[str, Any]) -> Doubles:
    """Long wavelengths scaled, short ones not, those between mixed."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    if high <= low:
        raise FormatError(
            f"rope_scaling: high_freq_factor {high} is not above low_freq_factor {low}"
        )
    wavelength = 2.0 * math.pi / inv
    smooth = (original / wavelength - low) / (high - low)
    mixed = (1.0 - smooth) * inv / factor + smooth * inv
    return np.where(
        wavelength > original / low,
        inv / factor,
        np.where(wavelength < original / high, inv, mixed),
    )


def _yarn(
    inv: Doubles, theta: float, config: Mapping[str, Any], scaling: Mapping[str, Any]
) -> tuple[Doubles, float]:
    """Frequencies that turn often are kept, slow ones divided, with a ramp between; and the factor
    on sine and cosine."""
    factor = float(scaling["factor"])
    original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
    dim = 2 * len(inv)

    def dimension(turns: float) -> float:
        """The (fractional) dimension whose frequency turns so often within the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(scaling.get("beta_fast") or 32))
    high = dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(len(inv)) - low) / (high - low), 0.0, 1.0)
    scaled: Doubles = inv / factor * ramp + inv * (1.0 - ramp)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = scaling.get("attention_factor")
    if scale is None:
        mscale, every = scaling.get("mscale"), scaling.get("mscale_all_dim")
        scale = magnitude(mscale) / magnitude(every) if mscale and every else magnitude(1.0)
    return scaled, float(scale)


def _longrope(
    inv: Doubles, config: Mapping[str, Any], scaling: Mapping[str, Any]
) -> tuple[Doubles, float, int]:
    """Frequencies `[2, R/2]` for short and for long contexts, the factor on sine and cosine (of
    both), and the longest context that counts as short."""
    stated = scaling.get("original_max_position_embeddings")
    original = config.get("original_max_position_embeddings") or stated
    if stated and stated != original:
        raise UnsupportedError(
            f"original_max_position_embeddings is {original}, but {stated} in rope_scaling"
        )
    longest = config["max_position_embeddings"]
    factor = longest / original if original else float(scaling.get("factor") or 1.0)
    original = int(original or longest)
    sets = []
    for key in ("short_factor", "long_factor"):
        divisors = np.asarray(scaling[key], np.float64)
        if divisors.shape != inv.shape:
            raise FormatError(
                f"rope_scaling: {key} holds {divisors.size} numbers; RoPE over {2 * len(inv)} "
                f"dimensions asks for {len(inv)}"
            )
        sets.append(inv / divisors)
    scale = scaling.get("attention_factor")
    if scale is None:
        scale = 1.0
        if factor > 1.0 and original > 1:
            scale = math.sqrt(1.0 + math.log(factor) / math.log(original))
    return np.stack(sets), float(scale), original
