"""Masks of the `sample` tail: which ids a row may choose, one bit each (docs/structured.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from hornito.ops.base import RUN, Array, Tail
from hornito.ops.sampling import mask_bytes
from hornito.runtime.sampler import Sampler, SamplingParams
from ops.harness import Bench, Call
from ops.test_sampling import kept_on_device, logits_of, sample_call, tokens
from sampling_reference import distribution, drawn, softmax, uniform

pytestmark = pytest.mark.gpu

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Fixed:
    """A constraint that allows the same ids at every place."""

    allowed: Bools

    @property
    def complete(self) -> bool:
        return False

    def mask(self) -> bytes:
        bits = np.zeros(mask_bytes(len(self.allowed)) * 8, bool)
        bits[: len(self.allowed)] = self.allowed
        return np.packbits(bits, bitorder="little").tobytes()

    def accept(self, token: int) -> None:
        assert self.allowed[token]

    def take_forced(self, most: int) -> list[int]:
        return []


def masked_call(
    logits: Array,
    params: Sequence[SamplingParams],
    allowed: Sequence[Bools | None],
    tile: int = 1 << 20,
) -> Call:
    """Rows of the same logits, each with its mask or with none."""
    call = sample_call(
        logits, params, seeds=[70 + i for i in range(len(params))], tail=Tail("sample", tile, 1)
    )
    samplers = [
        Sampler(q, 70 + i, 0, None if ids is None else Fixed(ids))
        for i, (q, ids) in enumerate(zip(params, allowed, strict=True))
    ]
    size = mask_bytes(len(logits))
    # Rows without a mask have bits that would forbid everything, were they read.
    rows = [bytes(size) if s.constraint is None else s.constraint.mask() for s in samplers]
    state = {
        **call.state,
        "sampling": np.frombuffer(b"".join(s.record() for s in samplers), np.uint32),
        "masks": np.frombuffer(b"".join(rows), np.uint32),
    }
    return replace(call, state=state)


def expected(logits: Array, params: SamplingParams, allowed: Bools | None, row: int) -> int | None:
    """The token of the reference; None where the random number is too close to a border."""
    x = logits.astype(np.float64)
    if allowed is not None:
        x = np.where(allowed, x, -np.inf)
    if params.greedy:
        return int(x.argmax())
    token, margin = drawn(distribution(x, params), uniform(70 + row, 10 + row))
    return token if margin > 1e-5 else None


FILTERS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.5, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=2.0, top_k=200, top_p=0.9, min_p=0.01),
)


@pytest.mark.parametrize("vocabulary", (50, 1056, 3001))
def test_masks_and_filters(bench: Bench, vocabulary: int) -> None:
    """Every filter counts what the mask leaves; a row without a mask is as ever."""
    rng = np.random.default_rng(vocabulary)
    logits = logits_of(vocabulary, seed=vocabulary, scale=3.0)
    few = np.zeros(vocabulary, bool)
    few[rng.choice(vocabulary, 6, replace=False)] = True
    many = rng.random(vocabulary) < 0.5
    one = np.zeros(vocabulary, bool)
    one[logits.argmin()] = True
    masks = (few, many, one, None)
    params = [q for q in FILTERS for _ in masks]
    allowed = [mask for _ in FILTERS for mask in masks]
    outcome = bench.run(masked_call(logits, params, allowed, tile=RUN), repeats=2)
    found = tokens(outcome)
    for row, (q, mask) in enumerate(zip(params, allowed, strict=True)):
        token = expected(logits, q, mask, row)
        assert token is None or found[row] == token, (row, q)
        assert mask is None or mask[found[row]]
        if mask is not None and not q.greedy and q.top_k == 5:
            assert (kept_on_device(outcome, row) & mask).sum() == min(5, mask.sum())


@pytest.mark.parametrize("tile", (RUN, 2 * RUN, 1 << 20))
def test_one_id_at_every_seam(bench: Bench, tile: int) -> None:
    """A single allowed id is chosen wherever it stands: ends of words, of runs, of tiles."""
    vocabulary = 3 * RUN + 37
    logits = logits_of(vocabulary, seed=2)
    places = [0, 31, 32, RUN - 1, RUN, 2 * RUN - 1, 2 * RUN, 3 * RUN, vocabulary - 1]
    allowed = [np.arange(vocabulary) == place for place in places for _ in range(2)]
    params = [SamplingParams(), SamplingParams(temperature=0.8)] * len(places)
    found = tokens(bench.run(masked_call(logits, params, allowed, tile), repeats=2))
    assert found.tolist() == [place for place in places for _ in range(2)]


def test_log_probabilities_are_of_the_model_itself(bench: Bench) -> None:
    """A mask changes what is chosen, not what the model thinks of it."""
    vocabulary = 1500
    logits = logits_of(vocabulary, seed=9)
    worst = np.arange(vocabulary) == logits.argmin()
    call = masked_call(logits, [SamplingParams(logprobs=3)], [worst])
    outcome = bench.run(call, repeats=2)
    assert tokens(outcome)[0] == logits.argmin()
    reported = outcome.records[0, 0, 1:2].view(np.float32)[0]
    assert abs(reported - np.log(softmax(logits.astype(np.float64)).min())) < 1e-4


def test_an_empty_mask_gives_no_token(bench: Bench) -> None:
    """The host never sends one; the device must not take an id from nowhere all the same."""
    vocabulary = 1200
    call = masked_call(
        logits_of(vocabulary),
        [SamplingParams(), SamplingParams(temperature=1.0)],
        [np.zeros(vocabulary, bool)] * 2,
    )
    assert tokens(bench.run(call, repeats=2)).tolist() == [0xFFFFFFFE] * 2
