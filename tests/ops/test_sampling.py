"""The `sample` tail on a device, against the float64 reference of tests/sampling_reference.py."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hornito.ops.base import MOST_BIASES, MOST_TOP, ROW_LIVE, Array, Tail
from hornito.runtime.sampler import IN_PROMPT, Sampler, SamplingParams, token_counts
from ops import cases
from ops.harness import Bench, Call, Outcome, rows_of
from sampling_reference import (
    adjusted,
    chi_square,
    distribution,
    drawn,
    kept,
    order,
    uniform,
)

pytestmark = pytest.mark.gpu

RUN = 1024
SAMPLE = Tail("sample", 1 << 20, 1)
NONE = 0xFFFFFFFF


def sample_call(
    logits: Array,
    params: Sequence[SamplingParams] | SamplingParams,
    *,
    seeds: Sequence[int] = (),
    positions: Sequence[int] = (),
    counts: Array | None = None,
    slots: Sequence[int] = (),
    tail: Tail = SAMPLE,
    kind: str = "batch",
    bucket: int = 0,
    eos: Sequence[int] = (),
    **rows: Any,
) -> Call:
    """A head whose logits are `logits`, `[V]` for every row or `[S, V]`.

    Args:
        counts: `[slots, V]` words, or `[V]` that the slot of every row begins with.
        slots: The slot of each row. A row with penalties counts its token in its slot, so no two of
            them share one.
    """
    shared = logits.ndim == 1
    every = [params] * max(len(seeds), 1) if isinstance(params, SamplingParams) else list(params)
    live = len(every) if shared else len(logits)
    if isinstance(params, SamplingParams):
        every = [params] * live
    vocabulary = logits.shape[-1]
    width = 8 if shared else max(8, -(-live // 8) * 8)
    table = np.zeros((vocabulary, width), np.float32)
    table[:, : 1 if shared else live] = logits.T[:, None] if shared else logits.T
    x = np.zeros((live, width), np.float32)
    x[np.arange(live), 0 if shared else np.arange(live)] = 1.0
    seeds = seeds or [0] * live
    samplers = [Sampler(q, seed, 0) for q, seed in zip(every, seeds, strict=True)]
    selected = max(bucket, live)
    biases = np.zeros((selected, MOST_BIASES, 2), np.uint32)
    for row, sampler in zip(biases, samplers, strict=False):
        found = np.frombuffer(sampler.biases(), np.uint32).reshape(-1, 2)
        row[: len(found)] = found
    if counts is None:
        counts = np.zeros(vocabulary, np.uint32)
    slots = slots or range(live)
    if counts.ndim == 1:
        counts = np.tile(counts, (len(slots), 1))
    penalised = [slot for slot, q in zip(slots, every, strict=True) if q.penalised]
    assert len(set(penalised)) == len(penalised), "two rows would count in one slot"
    state: Mapping[str, Array] = {
        "sampling": np.frombuffer(b"".join(s.record() for s in samplers), np.uint32),
        "biases": biases,
        "counts": counts,
    }
    return Call(
        graph=cases.head(vocabulary, width),
        rows=rows_of(positions or range(10, 10 + live), bucket=selected, slots=slots, **rows),
        inputs={"x": x},
        weights={"table": table},
        selection=range(live),
        selected=selected,
        kind=kind,
        tail=tail,
        eos=eos,
        slots=len(counts),
        state=state,
        allow_nan=True,
    )


def tokens(outcome: Outcome) -> npt.NDArray[np.int64]:
    """The token of each row's first record."""
    live = len(outcome.call.selection)
    return outcome.records[:live, 0, 0].astype(np.int64)


def scratch(outcome: Outcome, name: str) -> npt.NDArray[np.uint32]:
    """A scratch buffer of the head, a row for each selected row."""
    (full,) = (n for n in outcome.low.buffers if n.endswith(f":{name}@sample"))
    start, size = outcome.places[full]
    words = outcome.image[start // 4 : (start + size) // 4]
    return words.reshape(outcome.low.selected, -1)


def kept_on_device(outcome: Outcome, s: int) -> npt.NDArray[np.bool_]:
    """Which ids row `s` could have drawn, from what the passes left behind."""
    vocabulary = outcome.low.vocabulary
    values = scratch(outcome, "adjusted")[s, :vocabulary].view(np.float32)
    sampler = np.frombuffer(outcome.call.state["sampling"].tobytes(), np.uint32).reshape(-1, 16)[s]
    bits = values.view(np.uint32)
    places = np.where(bits >> 31, ~bits, bits | 0x80000000)
    _, _, end, end_id = scratch(outcome, "cut")[s, :4]
    mask = (places > end) | ((places == end) & (np.arange(vocabulary) <= end_id))
    distance = (values.max() - values).astype(np.float64) * sampler[1:2].view(np.float32)[0]
    return mask & (np.floor(2.0 ** (31 - distance)) >= sampler[4])


def logits_of(vocabulary: int, seed: int = 0, scale: float = 2.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(vocabulary) * scale).astype(np.float32)


FILTERS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 5.0},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "bias": {"temperature": 1.0, "logit_bias": {3: 2.0, 40: -100.0}},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
}


@pytest.mark.parametrize("rows", (50, pytest.param(500, marks=pytest.mark.slow)))
@pytest.mark.parametrize("name", FILTERS)
def test_chi_square(bench: Bench, name: str, rows: int) -> None:
    """10,000 or 100,000 draws of each filter have the exact distribution."""
    params = SamplingParams(**FILTERS[name])  # type: ignore[arg-type]
    vocabulary, steps = 50, 200
    if params.penalised:  # each draw changes the counts, and so the distribution
        rows, steps = max(800, 8 * rows), 1
    logits = logits_of(vocabulary, seed=4)
    counts = token_counts([1, 2, 3, 4, 4, 5, 5, 5, 30, 31], None, 4, vocabulary)
    call = sample_call(
        logits,
        params,
        seeds=range(1000, 1000 + rows),
        counts=counts,
        tail=Tail("sample", RUN, steps),
    )
    found = bench.steps(call, steps).records[:, :, 0]
    probabilities = distribution(logits, params, counts if params.penalised else None)
    assert (probabilities > 0).sum() > 4
    observed = np.bincount(found.reshape(-1), minlength=vocabulary)
    assert observed.sum() == rows * steps
    assert abs(chi_square(observed, probabilities)) < 4.5


OPTIONS = {
    "top_k": (0, 1, 9),
    "top_p": (1.0, 0.6),
    "min_p": (0.0, 0.2),
    "temperature": (0.0, 0.5, 2.0),
    "repetition_penalty": (1.0, 1.5),
    "presence_penalty": (0.0, 0.7),
    "frequency_penalty": (0.0, 0.2),
    "logit_bias": ({}, {7: 1.5, 1030: 3.0}),
}


def test_f7_all_combinations_of_filters(bench: Bench) -> None:
    """Each of 576 combinations, in one dispatch: the token at the same random number."""
    vocabulary = 1100
    combinations = [
        dict(zip(OPTIONS, v, strict=True)) for v in itertools.product(*OPTIONS.values())
    ]
    every = [SamplingParams(**values) for values in combinations]  # type: ignore[arg-type]
    assert len(every) == 576
    logits = logits_of(vocabulary, seed=8, scale=3.0)
    counts = token_counts([3, 7, 1, 9, 1030, 1030, *order(logits)[:4]], None, 3, vocabulary)
    # A row without penalties must not even look at its counts, and one that draws changes them.
    seeds = [1000 + i for i in range(len(every))]
    call = sample_call(logits, every, seeds=seeds, counts=counts)
    outcome = bench.run(call, repeats=2)
    found = tokens(outcome)
    after = outcome.words(outcome.low.counts).reshape(-1, vocabulary)
    close = 0
    for i, params in enumerate(every):
        expected = distribution(logits, params, counts if params.penalised else None)
        token, margin = drawn(expected, uniform(seeds[i], 10 + i))
        if params.greedy:
            token = int(adjusted(logits, params, counts if params.penalised else None).argmax())
        elif margin < 1e-5:
            close += 1
            continue
        assert found[i] == token, (combinations[i], margin)
        want = counts.copy()
        want[token] += int(params.penalised)
        assert np.array_equal(after[i], want)
    assert close < 5


def test_the_generator_is_philox() -> None:
    """The reference itself, against the vectors of its authors (Random123, kat_vectors)."""
    from sampling_reference import philox

    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = [0xFFFFFFFF] * 4
    assert philox(ones, ones[:2]) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox(pi, [0xA4093822, 0x299F31D0]) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


def test_64_bit_seeds_and_positions(bench: Bench) -> None:
    """Both halves of a seed, and the position, choose the number."""
    params = SamplingParams(temperature=1.0)
    logits = logits_of(200, seed=3, scale=0.5)
    seeds = [0, 1, 1 << 32, (1 << 64) - 1, 0, 0]
    positions = [10, 10, 10, 10, 11, 100_000]
    outcome = bench.run(sample_call(logits, params, seeds=seeds, positions=positions))
    expected = distribution(logits, params)
    want = [drawn(expected, uniform(*pair))[0] for pair in zip(seeds, positions, strict=True)]
    assert tokens(outcome).tolist() == want
    assert len(set(want)) == 6


def large(vocabulary: int, rows: int) -> Array:
    """Rows like a model's: a few large logits, many middling ones, and long runs of equal ones."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((rows, vocabulary)).astype(np.float32) * 2.5
    logits[:, rng.integers(0, vocabulary, 50)] += 8
    # On a grid of 1/8 most values occur thousands of times: every filter ends in a tie.
    logits[1] = np.round(logits[1] * 8) / 8
    logits[2] = 1.5
    return logits


@pytest.mark.parametrize("vocabulary", (151_936, 262_144))
@pytest.mark.parametrize(
    "filters",
    (
        {"top_k": 40},
        {"top_k": 50_000},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"top_k": 1000, "top_p": 0.95, "min_p": 0.001},
        {},
    ),
)
def test_what_large_vocabularies_keep(
    bench: Bench, vocabulary: int, filters: dict[str, float]
) -> None:
    """The kept set, ties included, is the reference's; and so is the token."""
    params = SamplingParams(temperature=0.8, **filters)  # type: ignore[arg-type]
    logits = large(vocabulary, 3)
    seeds = [5, 6, 7]
    outcome = bench.run(sample_call(logits, params, seeds=seeds), repeats=2)
    found = tokens(outcome)
    for s in range(3):
        wanted = kept(logits[s].astype(np.float64), params)
        got = kept_on_device(outcome, s)
        # Ids of less than 2^-31 of the largest weight are never drawn.
        weights = (logits[s] - logits[s].max()) / params.temperature > -21.4
        differing = (wanted != got) & weights
        if differing.any():  # only where a hair's breadth of p moves the border
            sides = [
                replace(params, top_p=min(params.top_p * f, 1.0), min_p=params.min_p * f)
                for f in (1 - 1e-6, 1 + 1e-6)
            ]
            masks = [kept(logits[s].astype(np.float64), side) for side in sides]
            assert any(np.array_equal(mask & weights, got & weights) for mask in masks)
        assert got[found[s]]
        token, margin = drawn(distribution(logits[s], params), uniform(seeds[s], 10 + s))
        if margin > 1e-5:
            assert found[s] == token
        if filters == {"top_k": 40}:
            assert np.array_equal(np.flatnonzero(got), np.sort(order(logits[s])[:40]))


def test_ties_keep_the_lowest_ids(bench: Bench) -> None:
    """All logits equal: top-k and top-p keep ids 0, 1, 2 and so on."""
    logits = np.full((4, 3000), 0.25, np.float32)
    every = [
        SamplingParams(temperature=1.0, top_k=1500),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, top_k=2000, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=1.0),
    ]
    outcome = bench.run(sample_call(logits, every))
    for s, count in enumerate((1500, 1500, 1000, 3000)):
        assert np.array_equal(np.flatnonzero(kept_on_device(outcome, s)), np.arange(count))


def test_top_k_counts_zeros_of_both_signs_as_equal(bench: Bench) -> None:
    """Both filters at once: -0 and 0 tie, so the lower id is kept."""
    logits = np.array([[-1.0, -0.0, 0.0, -0.0, -2.0]], np.float32)
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.999)
    outcome = bench.run(sample_call(logits, params))
    assert np.flatnonzero(kept_on_device(outcome, 0)).tolist() == [1, 2]


# Logits whose probabilities at temperature 1 are 0.5, 0.25, 0.125, 0.0625, 0.0625.
HALVES = np.log2([0.5, 0.25, 0.125, 0.0625, 0.0625]).astype(np.float32) * np.log(
    2, dtype=np.float32
)


@pytest.mark.parametrize(
    ("given", "expected"),
    (
        ({}, (8, 4, 2, 1, 1)),
        ({"top_k": 2}, (2, 1, 0, 0, 0)),
        # The id that crosses the line is kept.
        ({"top_p": 0.6}, (2, 1, 0, 0, 0)),
        ({"top_p": 0.0001}, (1, 0, 0, 0, 0)),
        # Of two equals the lower id.
        ({"top_k": 4}, (8, 4, 2, 1, 0)),
        ({"top_p": 0.9}, (8, 4, 2, 1, 0)),
        ({"min_p": 0.2}, (4, 2, 1, 0, 0)),
        # top-p counts what top-k leaves: 0.5 / 0.875 is below 0.6, so a second id is kept; of the
        # whole distribution 0.45 would end at the first.
        ({"top_k": 3, "top_p": 0.6}, (2, 1, 0, 0, 0)),
        ({"top_k": 2, "top_p": 0.6}, (1, 0, 0, 0, 0)),
        # min-p comes last: the ids that it drops count for top-p (without them 0.6 were reached).
        ({"top_p": 0.7, "min_p": 0.4}, (2, 1, 0, 0, 0)),
        # The temperature comes first: at 2 the probabilities go as square roots.
        ({"temperature": 2.0, "top_p": 0.5}, (2**0.5, 1, 0, 0, 0)),
        ({"temperature": 0.5, "min_p": 0.2}, (4, 1, 0, 0, 0)),
        # Penalties act before the temperature, the bias before the penalties: all logits are
        # negative, and a bias of 3 makes that of id 1 positive, so that it is divided.
        ({"logit_bias": {1: 3.0}, "repetition_penalty": 2.0}, "bias"),
        ({"temperature": 2.0, "presence_penalty": 1.0}, "presence"),
    ),
)
def test_f9_golden_order(bench: Bench, given: dict[str, Any], expected: Any) -> None:
    """The documented order, by small examples whose weights are written out."""
    params = SamplingParams(**{"temperature": 1.0, **given})
    counts = token_counts([1, 1], None, 1, 5)  # id 1 is in the prompt and generated once
    if expected == "bias":
        x = HALVES.astype(np.float64)
        x[1] = (x[1] + 3.0) / 2.0
        expected = np.exp(x)
    elif expected == "presence":
        x = HALVES.astype(np.float64)
        x[1] -= 1.0
        expected = np.exp(x / 2.0)
    want = np.asarray(expected, np.float64) / np.sum(expected)
    assert np.allclose(distribution(HALVES, params, counts if params.penalised else None), want)
    draws = 400
    seeds = range(draws)
    call = sample_call(
        HALVES,
        params,
        seeds=seeds,
        positions=[10] * draws,
        counts=counts,
    )
    found = tokens(bench.run(call, repeats=1))
    for seed, token in zip(seeds, found, strict=True):
        exact, margin = drawn(want, uniform(seed, 10))
        assert token == exact or margin < 1e-6


def test_penalties_equal_a_float64_reference(bench: Bench) -> None:
    """Adjusted logits of every id: prompt, generated once and often, both, neither."""
    vocabulary = 2500
    rng = np.random.default_rng(9)
    logits = rng.standard_normal((6, vocabulary)).astype(np.float32) * 4
    counts = np.zeros((6, vocabulary), np.uint32)
    counts[:, ::3] |= IN_PROMPT
    counts[:, ::5] += rng.integers(1, 40, counts[:, ::5].shape).astype(np.uint32)
    every = [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.5),
        SamplingParams(presence_penalty=1.5),
        SamplingParams(frequency_penalty=-0.3),
        SamplingParams(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.1),
        SamplingParams(repetition_penalty=1.2, logit_bias={0: 5.0, 15: -3.0, 2499: 1.0}),
    ]
    slots = [5, 4, 3, 2, 1, 0]
    outcome = bench.run(sample_call(logits, every, counts=counts, slots=slots))
    found = scratch(outcome, "adjusted")[:, :vocabulary].view(np.float32)
    for s, params in enumerate(every):
        want = adjusted(logits[s], params, counts[slots[s]])
        assert np.abs(found[s] - want).max() < 2e-5
        assert tokens(outcome)[s] == want.argmax()


def test_f4_frequency_and_presence_are_two_things(bench: Bench) -> None:
    """Presence is taken once, frequency for each time."""
    logits = np.zeros((2, 4), np.float32)
    counts = np.array([0, 1, 3, IN_PROMPT], np.uint32)
    every = [SamplingParams(presence_penalty=0.5), SamplingParams(frequency_penalty=0.25)]
    outcome = bench.run(sample_call(logits, every, counts=counts))
    found = scratch(outcome, "adjusted")[:2, :4].view(np.float32)
    assert found[0].tolist() == [0.0, -0.5, -0.5, 0.0]
    assert found[1].tolist() == [0.0, -0.25, -0.75, 0.0]


@pytest.mark.parametrize("temperature", (0.0, 1e-8, 1e-5, 1e-3, 5.0, 100.0))
def test_b16_temperatures(bench: Bench, temperature: float) -> None:
    """From 0 to 100: a token, finite numbers, and greedy below 1e-4."""
    logits = logits_of(3000, seed=1)[None].repeat(3, 0)
    logits[1, 17] = 3e38
    logits[2] = -3e38
    params = SamplingParams(temperature=temperature, top_p=0.9)
    outcome = bench.run(sample_call(logits, params))
    found = tokens(outcome)
    assert (found < 3000).all()
    assert found[1] == 17
    logprobs = outcome.records[:3, 0, 1].view(np.float32)
    assert np.isfinite(logprobs).all()
    if temperature < 1e-4:
        assert found.tolist() == [int(logits[0].argmax()), 17, 0]
    if temperature == 1e-3:
        assert found[0] == logits[0].argmax()


@pytest.mark.parametrize("value", (np.nan, np.inf))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_bad_logits_give_no_token(bench: Bench, value: float, temperature: float) -> None:
    logits = logits_of(2100, seed=2)[None].repeat(2, 0)
    call = sample_call(logits, SamplingParams(temperature=temperature, top_k=5))
    call.inputs["x"][1, 1] = value
    outcome = bench.run(call)
    found = tokens(outcome)
    assert found[0] < 2100 and found[1] == 0xFFFFFFFE
    assert not int(outcome.rows[1, 3]) & ROW_LIVE


@pytest.mark.parametrize("tile", (RUN, 2 * RUN, 1 << 20))
def test_f11_bias_reaches_every_head_tile(bench: Bench, tile: int) -> None:
    """-100 on the argmax, wherever it stands: the second best is taken. Also up to 1024 biases."""
    vocabulary = 4 * RUN + 77
    winners = [0, 1, RUN - 1, RUN, RUN + 1, 2 * RUN - 1, 2 * RUN, 3 * RUN + 500, vocabulary - 1]
    logits = np.tile(logits_of(vocabulary, seed=6), (len(winners) + 1, 1))
    for s, winner in enumerate(winners):
        logits[s, winner] = 20.0
    every = [SamplingParams(logit_bias={winner: -100.0}) for winner in winners]
    banned = order(logits[-1])[:MOST_BIASES]
    every.append(SamplingParams(logit_bias={int(token): -100.0 for token in banned}))
    outcome = bench.run(sample_call(logits, every, tail=Tail("sample", tile, 1)))
    want = [int(order(row)[1]) for row in logits[:-1]] + [int(order(logits[-1])[MOST_BIASES])]
    assert tokens(outcome).tolist() == want
    # The raw distribution is what log-probabilities are of.
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1, keepdims=True)) + exact.max(
        1, keepdims=True
    )
    found = outcome.records[: len(every), 0, 1].view(np.float32)
    assert np.abs(found - exact[np.arange(len(every)), want]).max() < 1e-5


@pytest.mark.parametrize("vocabulary", (5, 1024, 5000))
def test_top_log_probabilities(bench: Bench, vocabulary: int) -> None:
    """The best 20 of the raw distribution, ties to the lowest id; none where none was asked for."""
    logits = np.round(logits_of(vocabulary, seed=12) * 4)[None].repeat(3, 0) / 4
    every = [
        SamplingParams(logprobs=MOST_TOP),
        SamplingParams(temperature=2.0, logprobs=3, logit_bias={0: 50.0}, presence_penalty=1.0),
        SamplingParams(temperature=1.0),
    ]
    outcome = bench.run(sample_call(logits, every))
    top = outcome.words(outcome.low.top).reshape(3, MOST_TOP, 2)
    exact = logits[0].astype(np.float64)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    best = order(logits[0])
    for s, wanted in ((0, MOST_TOP), (1, 3)):
        count = min(wanted, vocabulary)
        assert top[s, :count, 0].tolist() == best[:count].tolist()
        values = top[s, :count, 1].copy().view(np.float32)
        assert np.abs(values - exact[best[:count]]).max() < 4e-6
        assert (top[s, count:wanted, 0] == NONE).all()
    assert np.isnan(top[2].view(np.float32)).all(), "nothing is written that was not asked for"
    assert outcome.records[0, 0, 0] == best[0]


def test_rows_move_on_as_with_argmax(bench: Bench) -> None:
    """EOS, limits, ignored EOS, inactive rows, rows past the live ones, ring places."""
    vocabulary, eos = 50, (7, 9)
    drawn_ids = [3, 7, 9, 7, 4, 5, 6]
    logits = np.full((7, vocabulary), -50.0, np.float32)
    logits[np.arange(7), drawn_ids] = 50.0
    rows: dict[str, Any] = {
        "limits": [100, 100, 100, 100, 15, 100, 17],
        "emitted": [0, 1, 2, 3, 4, 5, 6],
        "tokens": [40 + i for i in range(7)],
        "ignore_eos": (3,),
        "inactive": (5,),
    }
    params = SamplingParams(temperature=1.0, top_k=3, top_p=0.9)
    call = sample_call(
        logits, params, bucket=8, eos=eos, tail=Tail("sample", RUN, 4, len(eos)), **rows
    )
    outcome = bench.run(call)
    for r in range(7):
        before, after = call.rows[r], outcome.rows[r]
        if r == 5:
            assert np.array_equal(before, after)
            continue
        stopped = r in (1, 2, 4, 6)
        assert after[0] == drawn_ids[r] and after[1] == before[1] + 1
        assert bool(int(after[3]) & ROW_LIVE) != stopped
        assert outcome.records[r, r % 4, 0] == drawn_ids[r]
        assert outcome.records[r, r % 4, 2] == r + 1
    assert np.array_equal(outcome.rows[7], call.rows[7])
    assert np.isnan(outcome.records[[5, 7]].view(np.float32)).all()


def test_a_chunk_samples_without_moving_rows(bench: Bench) -> None:
    logits = logits_of(300, seed=5)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    batch = bench.run(sample_call(logits, params, seeds=[3], positions=[77]))
    call = sample_call(logits, params, seeds=[3], positions=[77], kind="chunk")
    chunk = bench.run(call)
    assert tokens(chunk).tolist() == tokens(batch).tolist()
    assert np.array_equal(chunk.rows, call.rows)


def test_the_token_does_not_depend_on_the_row(bench: Bench) -> None:
    """The same parameters, seed and position in other rows and other company."""
    logits = logits_of(5000, seed=13)
    params = SamplingParams(temperature=1.2, top_k=300, top_p=0.97, min_p=0.001)
    others = [SamplingParams(temperature=0.3), SamplingParams(), SamplingParams(temperature=9.0)]
    alone = tokens(bench.run(sample_call(logits, params, seeds=[42], positions=[500])))[0]
    for row in range(4):
        every, seeds, positions = list(others), [1, 2, 3], [7, 8, 9]
        every.insert(row, params)
        seeds.insert(row, 42)
        positions.insert(row, 500)
        call = sample_call(logits, every, seeds=seeds, positions=positions)
        assert tokens(bench.run(call, repeats=1))[row] == alone
