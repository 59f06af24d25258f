"""Sampling in float64 numpy, from the definitions in docs/sampling.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hornito.runtime.sampler import SamplingParams

Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.uint32]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 of Salmon et al. (SC 2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(MULTIPLIERS[0] * c[0], 1 << 32)
        high1, low1 = divmod(MULTIPLIERS[1] * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(a + b) & 0xFFFFFFFF for a, b in zip(k, WEYL, strict=True)]
    return c


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that draws the token after `position`."""
    low, high, _, _ = philox((position, 0, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return (high * 2**32 + low) / 2**64


def adjusted(
    logits: npt.ArrayLike, params: SamplingParams, counts: Counts | None = None
) -> Doubles:
    """Logits `[V]` after bias and penalties, before the temperature."""
    out = np.asarray(logits, np.float64).copy()
    for token, bias in params.logit_bias.items():
        out[token] += bias
    if counts is not None:
        generated = (counts & 0x7FFFFFFF).astype(np.float64)
        p = params.repetition_penalty
        out = np.where(counts > 0, np.where(out > 0, out / p, out * p), out)
        out -= params.frequency_penalty * generated + params.presence_penalty * (generated > 0)
    return out


def softmax(x: Doubles) -> Doubles:
    e = np.exp(x - x.max())
    out: Doubles = e / e.sum()
    return out


def order(x: Doubles) -> npt.NDArray[np.int64]:
    """Ids from the largest value down; the lowest id first among equals."""
    return np.argsort(-x, kind="stable")


def kept(x: Doubles, params: SamplingParams) -> npt.NDArray[np.bool_]:
    """Which ids the filters leave, of adjusted logits `[V]`."""
    scaled = x / params.temperature
    ranked = order(x)
    if params.top_k:
        ranked = ranked[: params.top_k]
    probabilities = softmax(scaled[ranked])
    if params.top_p < 1.0:
        reached = np.cumsum(probabilities)
        ranked = ranked[: int(np.searchsorted(reached, params.top_p * (1 - 1e-12))) + 1]
    ratio = np.exp(scaled[ranked] - scaled[ranked[0]])
    ranked = ranked[ratio >= params.min_p]
    mask = np.zeros(len(x), bool)
    mask[ranked] = True
    return mask


def distribution(
    logits: npt.ArrayLike, params: SamplingParams, counts: Counts | None = None
) -> Doubles:
    """The probability of each id `[V]` of being chosen."""
    x = adjusted(logits, params, counts)
    if params.greedy:
        out = np.zeros(len(x))
        out[x.argmax()] = 1.0
        return out
    return softmax(np.where(kept(x, params), x / params.temperature, -np.inf))


def drawn(probabilities: Doubles, u: float) -> tuple[int, float]:
    """The id at `u` of the cumulative distribution, and how far u is from its borders."""
    reached = np.cumsum(probabilities)
    token = int(np.searchsorted(reached, u, side="right"))
    token = min(token, int(np.flatnonzero(probabilities)[-1]))
    return token, float(np.abs(np.concatenate([[0.0], reached]) - u).min())


def chi_square(observed: npt.NDArray[np.int64], probabilities: Doubles) -> float:
    """How many standard deviations the chi-square statistic lies above its mean.

    Ids whose expected count is under 5 are put together. An id of probability 0 must not occur.
    """
    assert not observed[probabilities == 0].any(), "an id that the filters drop was drawn"
    expected = probabilities * observed.sum()
    rare = expected < 5
    o = np.append(observed[~rare], observed[rare].sum()).astype(np.float64)
    e = np.append(expected[~rare], expected[rare].sum())
    o, e = o[e > 0], e[e > 0]
    freedom = len(e) - 1
    if freedom == 0:
        return 0.0
    return float((((o - e) ** 2 / e).sum() - freedom) / np.sqrt(2 * freedom))
