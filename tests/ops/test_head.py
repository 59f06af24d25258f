"""The head's tails: argmax over tiles, log-probabilities, NaN, and the update of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hornito.ops.base import ROW_IGNORE_EOS, ROW_LIVE, Array, Tail
from ops import cases
from ops.harness import Bench, Call, Outcome, assert_close, rows_of

pytestmark = pytest.mark.gpu

EPS = 2.0**-24
NOT_A_NUMBER = 0xFFFFFFFE
RUN = 1024
RING = 4


def head_call(
    logits: Array,
    tail: Tail,
    *,
    kind: str = "batch",
    device: str = "software",
    bucket: int = 0,
    dtype: str = "fp32",
    **rows: Sequence[int],
) -> Call:
    """A head whose logits are exactly `logits [S, V]`: x is one-hot, the table holds them."""
    live, vocabulary = logits.shape
    width = max(8, -(-live // 8) * 8)
    table = np.zeros((vocabulary, width), np.float32)
    table[:, :live] = logits.T
    next_ids = rows.pop("next_ids", ())
    eos = rows.pop("eos", ())
    positions = rows.pop("positions", range(10, 10 + live))
    return Call(
        graph=cases.head(vocabulary, width, dtype),
        rows=rows_of(positions, bucket=max(bucket, live), **rows),
        inputs={"x": np.eye(live, width, dtype=np.float32)},
        weights={"table": table},
        selection=range(live),
        selected=max(bucket, live),
        kind=kind,
        device=device,
        tail=tail,
        next_ids=next_ids,
        eos=eos,
        allow_nan=True,
    )


def record(outcome: Outcome, s: int, slot: int = 0) -> tuple[int, float, int, int]:
    """Token, log-probability, sequence number and flags of a row."""
    words = outcome.records[s, slot]
    return int(words[0]), float(words[1:2].view(np.float32)[0]), int(words[2]), int(words[3])


def log_softmax(logits: Array) -> Array:
    logits = logits.astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    result: Array = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    return result


@pytest.mark.parametrize("device", ("software", "plain", "gpu"))
@pytest.mark.parametrize("dtype", ("fp32", "fp16"))
@pytest.mark.parametrize("live", (1, 3, 8, 17))
def test_logits(bench: Bench, device: str, dtype: str, live: int) -> None:
    rng = np.random.default_rng(live)
    x = rng.standard_normal((live, 72)).astype(np.float32)
    table = rng.standard_normal((1031, 72)).astype(np.float32)
    call = Call(
        graph=cases.head(1031, 72, dtype),
        rows=rows_of(range(64)),
        inputs={"x": x},
        weights={"table": table},
        selection=range(live),
        selected=1 << (live - 1).bit_length(),
        tail=Tail("logits"),
        device=device,
    )
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(table.astype(np.float64)).T
    bound = (4 * np.sqrt(72) + 8) * EPS * magnitude
    assert_close(bench.run(call).value("y"), call.expected()["y"], bound)


@pytest.mark.parametrize("device", ("software", "plain", "gpu"))
def test_softcap(bench: Bench, device: str) -> None:
    """Logits far beyond the cap come to the cap, small ones stay; argmax and logprob see them."""
    rng = np.random.default_rng(4)
    for live in (1, 3, 17):
        x = rng.standard_normal((live, 8)).astype(np.float32)
        table = rng.standard_normal((1500, 8)).astype(np.float32) * np.float32(4.0)
        table[7] *= 1e4
        call = Call(
            graph=cases.head(1500, 8, softcap=30.0),
            rows=rows_of(range(live)),
            inputs={"x": x},
            weights={"table": table},
            selection=range(live),
            selected=1 << (live - 1).bit_length(),
            tail=Tail("logits"),
            device=device,
        )
        expected = call.expected()["y"]
        assert np.abs(expected).max() <= 30.0
        magnitude = np.abs(x.astype(np.float64)) @ np.abs(table.astype(np.float64)).T
        bound = np.minimum((4 * np.sqrt(8) + 8) * EPS * magnitude, 1e-4) + 30 * 2e-6
        found = bench.run(call).value("y")
        assert_close(found, expected, bound)
        given = [5] * live + [0] * (call.bucket_selected - live)
        told = bench.run(replace(call, tail=Tail("logprob", RUN), next_ids=given))
        exact = log_softmax(found)
        assert_close(told.given_logprob[:live], exact[:, 5], 1e-5)


SEAMS = tuple(
    sorted({max(0, base + d) for base in (0, RUN, 2 * RUN, 3 * RUN, 4 * RUN) for d in (-1, 0, 1)})
)


@pytest.mark.parametrize("device", ("software", "gpu"))
@pytest.mark.parametrize("tile", (RUN, 2 * RUN, 1 << 20))
def test_argmax_at_every_seam(bench: Bench, device: str, tile: int) -> None:
    """The winner at each run's and tile's border, one before and one after."""
    vocabulary = 4 * RUN + 77
    winners = [*SEAMS, vocabulary - 1]
    rng = np.random.default_rng(tile)
    logits = rng.standard_normal((len(winners), vocabulary)).astype(np.float32)
    for s, winner in enumerate(winners):
        logits[s, winner] = 7.0
    call = head_call(logits, Tail("argmax", tile, RING), bucket=16, device=device)
    outcome = bench.run(call)
    exact = log_softmax(logits)
    for s, winner in enumerate(winners):
        token, logprob, sequence, _ = record(outcome, s)
        assert token == winner
        assert abs(logprob - exact[s, winner]) < 4e-6
        assert sequence == 1
    heads = [k for k in outcome.kernels if k.startswith("linear/")]
    assert len(heads) == -(-vocabulary // min(tile, 5 * RUN))


@pytest.mark.parametrize("tile", (RUN, 1 << 20))
def test_ties_go_to_the_lowest_id(bench: Bench, tile: int) -> None:
    vocabulary = 3 * RUN
    pairs = ((5, 6), (1023, 1024), (0, vocabulary - 1), (127, 128), (100, 2100), (1024, 2048))
    logits = np.zeros((len(pairs) + 1, vocabulary), np.float32)
    for s, pair in enumerate(pairs):
        logits[s, list(pair)] = 1.0
    outcome = bench.run(head_call(logits, Tail("argmax", tile, 1), bucket=8))
    found = [record(outcome, s)[0] for s in range(len(logits))]
    assert found == [pair[0] for pair in pairs] + [0]


def test_small_vocabularies(bench: Bench) -> None:
    for vocabulary in (1, 2, 7, 127, 129):
        logits = np.full((1, vocabulary), -5.0, np.float32)
        logits[0, -1] = -4.0
        outcome = bench.run(head_call(logits, Tail("argmax", RUN, 1)))
        token, logprob, _, _ = record(outcome, 0)
        assert token == vocabulary - 1
        assert abs(logprob - log_softmax(logits)[0, -1]) < 2e-6


def test_logprob_of_given_ids(bench: Bench) -> None:
    """Given ids at seams of runs and tiles; large and tiny probabilities."""
    vocabulary = 4 * RUN + 77
    ids = [*SEAMS, vocabulary - 1]
    logits = np.random.default_rng(7).standard_normal((len(ids), vocabulary)).astype(np.float32) * 8
    logits[0] *= 6
    for tile in (RUN, 2 * RUN, 1 << 20):
        for kind in ("chunk", "batch"):
            call = head_call(
                logits, Tail("logprob", tile, 1), kind=kind, next_ids=ids, positions=range(16)
            )
            outcome = bench.run(call)
            exact = log_softmax(logits)[np.arange(len(ids)), ids]
            assert_close(outcome.given_logprob, exact, 4e-6 + 4 * EPS * np.abs(exact))
            tokens = [record(outcome, s)[0] for s in range(len(ids))]
            assert tokens == logits.argmax(axis=1).tolist()
            assert np.array_equal(outcome.rows, call.rows), "only an argmax step moves rows"


@pytest.mark.parametrize("value", (np.nan, np.inf))
@pytest.mark.parametrize("place", (0, 1023, 1024, 2500, 3071))
def test_nan_and_infinite_logits_give_no_token(bench: Bench, place: int, value: float) -> None:
    logits = np.random.default_rng(place).standard_normal((3, 3 * RUN)).astype(np.float32)
    bias = logits.copy()
    call = head_call(bias, Tail("argmax", RUN, 1), bucket=4)
    # One-hot rows times an infinite weight are NaN for every row, so put it into x of row 1.
    call.inputs["x"][1, 1] = value
    outcome = bench.run(call)
    assert record(outcome, 0)[0] == int(logits[0].argmax())
    assert record(outcome, 1)[0] == NOT_A_NUMBER
    assert record(outcome, 2)[0] == int(logits[2].argmax())
    assert not int(outcome.rows[1, 3]) & ROW_LIVE, "a row without a token stops"


@pytest.mark.parametrize("place", (0, 1023, 1024, 3071))
def test_a_single_nan_logit_is_seen(bench: Bench, place: int) -> None:
    """One NaN among finite logits, wherever it stands."""
    logits = np.random.default_rng(place).standard_normal((1, 3 * RUN)).astype(np.float32)
    logits[0, place] = np.nan
    for tile in (RUN, 1 << 20):
        outcome = bench.run(head_call(logits, Tail("argmax", tile, 1)))
        assert record(outcome, 0)[0] == NOT_A_NUMBER


def test_one_huge_logit(bench: Bench) -> None:
    """A single logit of 3e38 among negative ones: probability 1, no NaN."""
    logits = np.full((1, 2 * RUN), -3e38, np.float32)
    logits[0, 1500] = 3e38
    token, logprob, _, _ = record(bench.run(head_call(logits, Tail("argmax", RUN, 1))), 0)
    assert (token, logprob) == (1500, 0.0)


def test_rows_move_on(bench: Bench) -> None:
    """EOS, limits, ignored EOS, inactive rows; the ring index of the record."""
    vocabulary, eos = 50, (7, 9)
    tokens = [3, 7, 9, 7, 4, 5, 6]
    logits = np.zeros((7, vocabulary), np.float32)
    logits[np.arange(7), tokens] = 5.0
    positions = [10, 11, 12, 13, 14, 15, 16]
    limits = [100, 100, 100, 100, 15, 100, 17]  # row 4 reaches its limit, and row 6
    emitted = [0, 1, 2, 3, 4, 5, 6]
    call = head_call(
        logits,
        Tail("argmax", RUN, RING, len(eos)),
        bucket=8,
        eos=eos,
        positions=positions,
        limits=limits,
        emitted=emitted,
        tokens=[40 + i for i in range(7)],
        ignore_eos=(3,),
        inactive=(5,),
        slots=[6, 5, 4, 3, 2, 1, 0],
    )
    outcome = bench.run(call)
    stopped = {1, 2, 4, 6}
    for r in range(7):
        before, after = call.rows[r], outcome.rows[r]
        if r == 5:
            assert np.array_equal(before, after)
            continue
        flags = 0 if r in stopped else ROW_LIVE
        flags |= ROW_IGNORE_EOS if r == 3 else 0
        expected = [tokens[r], positions[r] + 1, 6 - r, flags, limits[r], emitted[r] + 1, 0, 0]
        assert after.tolist() == expected
        assert record(outcome, r, emitted[r] % RING)[2:] == (emitted[r] + 1, flags)
        others = [slot for slot in range(RING) if slot != emitted[r] % RING]
        assert np.isnan(outcome.records[r, others].view(np.float32)).all()
    assert np.isnan(outcome.records[[5, 7]].view(np.float32)).all()
    assert np.array_equal(outcome.rows[7], call.rows[7])


def test_selection_picks_rows(bench: Bench) -> None:
    """Chunk: the selected row's record is read, and rows are not moved."""
    logits = np.zeros((1, 20), np.float32)
    logits[0, 13] = 1.0
    call = head_call(logits, Tail("argmax", RUN, RING), kind="chunk", bucket=0)
    rows = rows_of(range(9), bucket=16, emitted=[r for r in range(9)])
    picked = Call(
        graph=call.graph,
        rows=rows,
        inputs=call.inputs,
        weights=call.weights,
        selection=(6,),
        tail=call.tail,
        allow_nan=True,
    )
    outcome = bench.run(picked)
    assert record(outcome, 0, 6 % RING)[0] == 13
    assert record(outcome, 0, 6 % RING)[2] == 7
    assert np.array_equal(outcome.rows, rows)


def test_a_head_beyond_128_mib(bench: Bench) -> None:
    """A 136 MB head needs no storage-buffer range: the winner in the last tile is found."""
    vocabulary, k = 151936, 448
    assert 2 * vocabulary * k > 128 << 20
    table = np.zeros((vocabulary, k), np.float16)
    table[:, 0] = -1.0
    table[vocabulary - 2, 0] = 1.0
    x = np.zeros((1, k), np.float32)
    x[0, 0] = 1.0
    call = Call(
        graph=cases.head(vocabulary, k, "fp16"),
        rows=rows_of([0]),
        inputs={"x": x},
        weights={"table": table},
        selection=(0,),
        tail=Tail("argmax", 64 * RUN, 1),
        kind="batch",
    )
    assert record(bench.run(call, repeats=2), 0)[0] == vocabulary - 2
