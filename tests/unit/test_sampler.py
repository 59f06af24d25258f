"""Sampling parameters: ranges, records, what callers and models ask for."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest

from hornito.errors import UsageError
from hornito.runtime.sampler import (
    IN_PROMPT,
    Sampler,
    SamplingKeywords,
    SamplingParams,
    sampling_params,
    token_counts,
)

NAN, INF = float("nan"), float("inf")

WRONG = {
    "temperature": (-1, -1e-9, NAN, INF, 100.5, "1", None, True),
    "top_k": (-5, -1, 1.5, NAN, 1 << 31, "3", True),
    "top_p": (0, 0.0, -0.1, 1.5, NAN, INF, "x"),
    "min_p": (-0.1, 1.01, NAN, INF),
    "repetition_penalty": (0, -1, NAN, INF, 101),
    "presence_penalty": (-2.1, 2.1, NAN, -INF),
    "frequency_penalty": (-2.1, 2.1, NAN, -INF),
    "seed": (-1, 1 << 64, 0.5, NAN, "7"),
    "logprobs": (-1, 21, 1.0, NAN, True),
    "logit_bias": (
        {5: NAN},
        {5: INF},
        {5: 10001},
        {-1: 1.0},
        {0.5: 1.0},
        {5: "1"},
        [(5, 1.0)],
        dict.fromkeys(range(1025), 1.0),
    ),
}
RANGES = {
    "temperature": "from 0 to 100",
    "top_k": "from 0 to 2147483647",
    "top_p": "above 0 and at most 1",
    "min_p": "from 0 to 1",
    "repetition_penalty": "above 0 and at most 100",
    "presence_penalty": "from -2 to 2",
    "frequency_penalty": "from -2 to 2",
    "seed": "from 0 to 18446744073709551615",
    "logprobs": "from 0 to 20",
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs])
def test_f6_values_out_of_range_are_errors(name: str, value: Any) -> None:
    """NaN, infinities, wrong signs and types: the message has the name and the range."""
    with pytest.raises(UsageError) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value)
    if name in RANGES:
        assert RANGES[name] in str(error.value)


def test_f6_the_ends_of_the_ranges_are_allowed() -> None:
    for values in (
        {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "logprobs": 0, "seed": 0},
        {"temperature": 100, "top_k": 10**9, "top_p": 1e-9, "min_p": 1, "logprobs": 20},
        {"repetition_penalty": 1e-3, "presence_penalty": -2, "frequency_penalty": 2},
        {"seed": (1 << 64) - 1, "logit_bias": {0: -10000, 5: 10000.0}},
        {"temperature": np.float32(0.5), "top_k": np.int64(3), "seed": np.uint64(1 << 63)},
    ):
        Sampler.start(SamplingParams(**values), 0).record()  # type: ignore[arg-type]


def test_biased_ids_must_exist() -> None:
    params = SamplingParams(logit_bias={511: 1.0})
    params.check_vocabulary(512)
    with pytest.raises(UsageError, match="names token 511; the vocabulary has ids 0 to 510"):
        params.check_vocabulary(511)
    with pytest.raises(UsageError, match="up to 1024 token ids, not 1025"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))


def test_f5_every_parameter_changes_what_the_device_is_told() -> None:
    """No accepted parameter is dropped on the way; tests/ops and tests/runtime see the effects."""
    base = {"temperature": 1.0, "seed": 1}
    seen = {told(base)}
    for name, value in (
        ("temperature", 0.5),
        ("temperature", 0.0),
        ("top_k", 3),
        ("top_p", 0.5),
        ("min_p", 0.5),
        ("repetition_penalty", 1.5),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {3: 1.0}),
        ("logit_bias", {4: 1.0}),
        ("logit_bias", {4: 2.0}),
        ("seed", 2),
        ("seed", 1 + (1 << 32)),
        ("logprobs", 1),
    ):
        assert told({**base, name: value}) not in seen, name
        seen.add(told({**base, name: value}))


def told(values: dict[str, Any]) -> tuple[bytes, bytes]:
    sampler = Sampler.start(SamplingParams(**values), 5)
    return sampler.record(), sampler.biases()


def test_the_record() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={9: 1.0, 2: -3.0},
        seed=(5 << 32) | 6,
        logprobs=4,
    )
    sampler = Sampler.start(params, 3)
    assert struct.unpack("<IfIIIfffIIII16x", sampler.record()) == (
        2 | 4 | 8,
        np.float32(2 * math.log2(math.e)),
        7,
        1 << 30,
        1 << 30,
        1.5,
        -0.5,
        0.25,
        6,
        5,
        2,
        4,
    )
    assert struct.unpack("<IfIf", sampler.biases()) == (2, -3.0, 9, 1.0)
    greedy = Sampler.start(SamplingParams(), 3).record()
    assert struct.unpack("<If", greedy[:8]) == (1, 0.0)


def test_b16_small_temperatures_are_greedy() -> None:
    for temperature in (0, 1e-8, 9.9e-5):
        assert SamplingParams(temperature=temperature).greedy
    for temperature in (1e-4, 1e-3, 5):
        assert not SamplingParams(temperature=temperature).greedy


def test_plain_parameters_need_no_sampler() -> None:
    assert SamplingParams(top_k=5, top_p=0.5, min_p=0.1, seed=3, logprobs=0).plain
    for values in (
        {"temperature": 1.0},
        {"logit_bias": {1: 1.0}},
        {"logprobs": 1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
    ):
        assert not SamplingParams(**values).plain  # type: ignore[arg-type]


def test_seeds_are_random_unless_given() -> None:
    assert Sampler.start(SamplingParams(seed=0), 1).seed == 0
    seeds = {Sampler.start(SamplingParams(), 1).seed for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 1 << 32 for seed in seeds)


def test_f1_counts_come_from_the_whole_sequence() -> None:
    """Prompt and answer, wherever the tokens were evaluated; embeddings don't count."""
    counts = token_counts([3, 3, -1, 4, 5, 5, 3], 5, 4, 8)
    assert counts.tolist() == [0, 0, 0, IN_PROMPT + 1, IN_PROMPT, 3, 0, 0]
    assert token_counts([3, 4], None, 2, 5).tolist() == [0, 0, 0, IN_PROMPT, IN_PROMPT]
    assert token_counts([], None, 0, 2).tolist() == [0, 0]


MODEL = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05}


def test_the_default_is_greedy_whatever_the_model_says() -> None:
    assert sampling_params({}, MODEL) == SamplingParams()
    assert sampling_params({"temperature": 0.3}, MODEL) == SamplingParams(temperature=0.3)


def test_the_models_own_parameters() -> None:
    asked: SamplingKeywords = {"sampling": "model"}
    found = sampling_params(asked, MODEL)
    assert found == SamplingParams(temperature=0.6, top_k=50, top_p=0.95, repetition_penalty=1.05)
    changed = sampling_params({**asked, "temperature": 0.0, "top_k": 0, "seed": 4}, MODEL)
    assert changed == SamplingParams(
        temperature=0.0, top_k=0, top_p=0.95, repetition_penalty=1.05, seed=4
    )
    assert sampling_params(asked, {}) == SamplingParams()
    greedy = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.2}
    assert sampling_params(asked, greedy) == SamplingParams(repetition_penalty=1.2)
    with pytest.raises(UsageError, match="top_p must be above 0"):
        sampling_params(asked, {"do_sample": True, "top_p": 0})


@pytest.mark.parametrize("given", ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}))
def test_f5_filters_without_a_temperature_are_errors(given: SamplingKeywords) -> None:
    """They would change nothing, and the caller would not know."""
    with pytest.raises(UsageError, match="needs a temperature: the default is 0"):
        sampling_params(given, {})
    zero: SamplingKeywords = {**given, "temperature": 0.0}
    assert sampling_params(zero, {}).greedy, "a temperature of 0 was asked for"


def test_unknown_words() -> None:
    with pytest.raises(UsageError, match="no sampling parameter is called 'topk'"):
        sampling_params({"topk": 3}, {})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(UsageError, match="sampling must be 'default' or 'model', not 'auto'"):
        sampling_params({"sampling": "auto"}, {})
