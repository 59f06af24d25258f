"""RoPE scaling of GGUF files as Hugging Face's `rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError, UnsupportedError
from hornito.importers.families import decimal
from hornito.importers.gguf_names import Keys
from hornito.importers.source import LazyTensor

Doubles = npt.NDArray[np.float64]
#: `rope_type` of frequency divisors that no known rule explains; `tensor` names them.
FREQ_FACTORS = "freq_factors"


def _factors(tensors: Mapping[str, LazyTensor], name: str, pairs: int) -> Doubles:
    tensor = tensors[name]
    if tensor.shape != (pairs,):
        raise FormatError(
            f"{tensor.file}: tensor '{name}' has the shape {tensor.shape}, "
            f"RoPE over {2 * pairs} dimensions asks for {(pairs,)}"
        )
    values = tensor.load_f32().astype(np.float64)
    if not np.all(np.isfinite(values)) or np.any(values <= 0):
        raise FormatError(f"{tensor.file}: tensor '{name}' holds a value that is not above zero")
    return values


def llama3_factors(
    theta: float, pairs: int, factor: float, low: float, high: float, original: int
) -> Doubles:
    """Divisors that Llama 3's rule gives for each frequency, as llama.cpp's converter stores them.

    float64 `[pairs]`; rounded to float32 they are what a file holds.
    """
    frequency = theta ** (-np.arange(0, 2 * pairs, 2, dtype=np.float64) / (2 * pairs))
    wavelength = 2 * np.pi / frequency
    smooth = (original / wavelength - low) / (high - low)
    between = 1.0 / ((1.0 - smooth) / factor + smooth)
    out = np.where(wavelength > original / low, factor, between)
    return np.where(wavelength < original / high, 1.0, out)


def recover_llama3(theta: float, factors: Doubles) -> dict[str, Any] | None:
    """Find the Llama 3 settings that explain stored divisors, or None.

    The rule has four numbers; `low` 1 and `high` 4 are those of every published model, the
    largest divisor is the factor, and any divisor in between gives the original context. The
    find counts only if it gives back every stored number, so that a GGUF file and the directory
    it was made from end in the same frequencies.
    """
    pairs, factor, low, high = len(factors), float(factors.max()), 1.0, 4.0
    if factor <= 1.0:
        return None
    frequency = theta ** (-np.arange(0, 2 * pairs, 2, dtype=np.float64) / (2 * pairs))
    inside = (factors > 1.0) & (factors < factor)
    smooth = (1.0 / factors - 1.0 / factor) / (1.0 - 1.0 / factor)
    guesses = (smooth * (high - low) + low) * 2 * np.pi / frequency
    originals = {round(guess) for guess in guesses[inside] if guess < 2**31}
    originals |= {1 << n for n in range(5, 21)}
    best, error = 0, np.inf
    for original in sorted(n for n in originals if n > 0):
        ours = llama3_factors(theta, pairs, factor, low, high, original)
        worst = float(np.max(np.abs(ours / factors - 1.0)))
        if worst < error:
            best, error = original, worst
    # Converters compute in float32; the steep part of the rule magnifies that by the factor.
    if error > 1e-6 * factor:
        return None
    return {
        "rope_type": "llama3",
        "factor": decimal(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": best,
    }


def _yarn(keys: Keys, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
    }
    for ours, theirs in (
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        if keys.get(f"rope.scaling.{theirs}") is not None:
            scaling[ours] = keys.real(f"rope.scaling.{theirs}")
    return scaling


def _longrope(
    keys: Keys, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], pairs: int
) -> dict[str, Any]:
    long, short = "rope_factors_long.weight", "rope_factors_short.weight"
    for name in (long, short):
        if name not in tensors:
            raise FormatError(f"{keys.path}: tensor '{name}' is missing")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": [decimal(v) for v in _factors(tensors, long, pairs)],
        "short_factor": [decimal(v) for v in _factors(tensors, short, pairs)],
    }
    attention = keys.get("rope.scaling.attn_factor")
    # A file states the factor that the rule gives anyway, rounded to float32; only another one
    # is worth a key of its own.
    if attention is not None:
        stated = keys.real("rope.scaling.attn_factor")
        ratio = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        original = config["original_max_position_embeddings"]
        ruled = 1.0
        if ratio > 1.0 and original > 1:
            ruled = float(np.sqrt(1.0 + np.log(ratio) / np.log(original)))
        if abs(stated - ruled) > 1e-5 * ruled:
            scaling["attention_factor"] = stated
    return scaling


def rope_settings(
    keys: Keys, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]
) -> dict[str, Any] | None:
    """The value of `rope_scaling`, from the keys and from tensors of divisors.

    Args:
        keys: the file's metadata.
        config: from `config_of`.
        tensors: the tensors of divisors that the file holds, by their own names.
    """
    pairs = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)) // 2
    if "rope_factors_long.weight" in tensors or "rope_factors_short.weight" in tensors:
        if config["model_type"] != "phi3":
            raise UnsupportedError(
                f"{keys.path}: two sets of RoPE factors are supported for phi3 only, "
                f"not for {keys.architecture}"
            )
        return _longrope(keys, config, tensors, pairs)
    kind = keys.get("rope.scaling.type")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    if "rope_freqs.weight" in tensors:
        values = _factors(tensors, "rope_freqs.weight", pairs)
        if np.all(values == 1.0):
            return None
        found = recover_llama3(config["rope_theta"], values)
        return found or {"rope_type": FREQ_FACTORS, "tensor": "rope_freqs.weight"}
    if kind in (None, "linear"):
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind == "none":
        return None
    if kind == "yarn":
        return _yarn(keys, factor)
    raise UnsupportedError(
        f"{keys.path}: RoPE scaling {str(kind)[:40]!r} is not supported; supported: none, linear, "
        "yarn, longrope (phi3), llama3"
    )
