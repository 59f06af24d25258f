"""A whole small llama on the device: prefill, a step and every tail, against the evaluator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from graph import small_llama
from hornito.graph.graph import Graph
from hornito.graph.passes import ORDER, run_passes
from hornito.graph.reference import ReferenceState
from hornito.ops.base import Array, Tail
from ops.harness import Bench, Call, Outcome, assert_close, rows_of
from ops.kv_pool import KvPool

pytestmark = pytest.mark.gpu

IDS = (5, 70, 0, 33, 5, 1, 2)
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
"""Those of llama-tiny, whose attention other tests compile as well."""


def graph_of(dtype: str, disabled: tuple[str, ...]) -> tuple[Graph, dict[str, Array]]:
    graph = small_llama.build(dtype, attention_bias=True, **HEADS)
    run_passes(graph, disabled)
    return graph, small_llama.weights(graph)


def calls(dtype: str, disabled: tuple[str, ...], device: str, half: bool) -> tuple[Call, Call]:
    """Prefill of 7 rows in a bucket of 16, and the next row as a batch."""
    graph, numbers = graph_of(dtype, disabled)
    pool = KvPool(3, 8, half=half, layers=2, layer=0, table_blocks=3)
    prefill = Call(
        graph=graph,
        weights=numbers,
        rows=rows_of(range(7), bucket=16, tokens=IDS),
        selection=(0, 3, 6),
        selected=4,
        kv=pool,
        tail=Tail("logits"),
        device=device,
        padding=not disabled,
    )
    step = replace(
        prefill,
        rows=rows_of([7], tokens=[11]),
        selection=(0,),
        selected=1,
        kind="batch",
    )
    return prefill, step


def run_both(bench: Bench, pair: tuple[Call, Call]) -> tuple[Outcome, Outcome]:
    first = bench.run(pair[0])
    second = bench.run(replace(pair[1], kv=first.blocks))
    return first, second


@pytest.mark.parametrize("disabled", ((), ORDER))
@pytest.mark.parametrize("device", ("software", "plain", "gpu"))
@pytest.mark.parametrize(("dtype", "half"), (("fp32", False), ("fp16", True)))
def test_logits(
    bench: Bench, device: str, dtype: str, half: bool, disabled: tuple[str, ...]
) -> None:
    pair = calls(dtype, disabled, device, half)
    state = ReferenceState()
    # fp16 keys and values are rounded to 11 bits: 5e-4 of values of about 1.
    bound = 3e-3 if half else 1e-5
    for outcome in run_both(bench, pair):
        expected = outcome.call.expected(state)["logits"]
        assert_close(outcome.value("logits"), expected, bound)
        top = np.argmax(outcome.value("logits"), axis=1)
        assert np.array_equal(top, np.argmax(expected, axis=1))


@pytest.mark.parametrize("name", ORDER)
def test_each_pass_against_its_twin(bench: Bench, name: str) -> None:
    """On the device, too, a pass changes roundings at most."""
    fused = run_both(bench, calls("fp32", (), "software", False))
    twin = run_both(bench, calls("fp32", (name,), "software", False))
    for a, b in zip(fused, twin, strict=True):
        assert_close(a.value("logits"), b.value("logits").astype(np.float64), 1e-5)


def test_planned_barriers_give_the_bits_of_barriers_everywhere(bench: Bench) -> None:
    for disabled in ((), ORDER):
        pair = calls("fp32", disabled, "software", False)
        planned = run_both(bench, pair)
        careful = run_both(
            bench,
            (replace(pair[0], barrier_everywhere=True), replace(pair[1], barrier_everywhere=True)),
        )
        for a, b in zip(planned, careful, strict=True):
            assert np.array_equal(a.value("logits"), b.value("logits"))


def test_tails_agree(bench: Bench) -> None:
    """argmax and logprob say of the prefill what its logits say."""
    prefill, _ = calls("fp16", (), "software", True)
    logits = bench.run(prefill).value("logits").astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    best = bench.run(replace(prefill, tail=Tail("argmax")))
    assert best.records[:3, 0, 0].tolist() == np.argmax(logits, axis=1).tolist()
    given = (33, 5, 70)
    told = bench.run(replace(prefill, tail=Tail("logprob"), next_ids=(*given, 0)))
    assert_close(told.given_logprob[:3], exact[np.arange(3), given], 4e-6)
