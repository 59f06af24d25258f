"""The `sample` tail on a device, against the float64 reference of tests/sampling_reference.py."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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
        counts: `[slots, V]` words.
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
    count = 1 if counts is None else len(counts)
    state: Mapping[str, Array] = {
        "sampling": np.frombuffer(b"".join(s.record() for s in samplers), np.uint32),
        "biases": biases,
        "counts": np.zeros((1, vocabulary), np.uint32) if counts is None else counts,
    }
    return Call(
        graph=cases.head(vocabulary, width),
        rows=rows_of(
            positions or range(10, 10 + live), bucket=selected, slots=slots or [0] * live, **rows
        ),
        inputs={"x": x},
        weights={"table": table},
        selection=range(live),
        selected=selected,
        kind=kind,
        tail=tail,
        eos=eos,
        slots=count,
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


@pytest.mark.parametrize("name", FILTERS)
def test_chi_square(bench: Bench, name: str) -> None:
    """100,000 draws of each filter have the exact distribution."""
    params = SamplingParams(**FILTERS[name])  # type: ignore[arg-type]
    vocabulary, rows, steps = 50, 500, 200
    if params.penalised:  # each draw changes the counts, and so the distribution
        rows, steps = 4000, 1
    logits = logits_of(vocabulary, seed=4)
    counts = token_counts([1, 2, 3, 4, 4, 5, 5, 5, 30, 31], None, 4, vocabulary)
    slots = rows if params.penalised else 1
    call = sample_call(
        logits,
        params,
        seeds=range(1000, 1000 + rows),
        counts=np.tile(counts, (slots, 1)),
        slots=range(rows) if params.penalised else (),
        tail=Tail("sample", RUN, steps),
    )
    found = bench.steps(call, steps).records[:, :, 0]
    probabilities = distribution(logits, params, counts if params.penalised else None)
    assert (probabilities > 0).sum() > 4
    observed = np.bincount(found.reshape(-1), minlength=vocabulary)
    assert observed.sum() == rows * steps
    assert abs(chi_square(observed, probabilities)) < 4.5
