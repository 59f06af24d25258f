"""The comparison of two models' logits on the device, against float64 on the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hornito.compiler import compile_source
from hornito.diag.divergence import Comparer, RowComparison
from hornito.diag.quality import Text, measure, summarise
from hornito.errors import HornitoError
from hornito.plan.plan import LOGITS_ROWS
from hornito.progress import NullProgress
from hornito.runtime.logit_rows import logit_rows
from hornito.runtime.session import Session
from hornito.vk.device import Device
from tiny import Compiled, open_engine, random_ids, spoil, write_llama

pytestmark = pytest.mark.gpu

Wide = npt.NDArray[np.float64]


def log_softmax(logits: npt.NDArray[np.float32]) -> Wide:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def compare_all(
    device: Device, reference: Path, model: Path, ids: list[int], skip: int
) -> tuple[list[RowComparison], Wide, Wide]:
    """The device's rows behind each id but the first `skip`, and both models' log-softmax."""
    with open_engine(device, reference) as ours, open_engine(device, model) as theirs:
        with Session(ours) as a, Session(theirs) as b:
            p, q = (log_softmax(s.prefill_logits(ids[:-1])) for s in (a, b))
        rows = []
        with Comparer(ours, theirs) as comparer, Session(ours) as a, Session(theirs) as b:
            pairs = zip(
                logit_rows(a, ids[:-1], skip=skip),
                logit_rows(b, ids[:-1], skip=skip),
                strict=True,
            )
            for mine, other in pairs:
                assert mine.count <= LOGITS_ROWS
                following = ids[mine.first + 1 : mine.first + 1 + mine.count]
                rows += comparer.compare(mine, other, following)
            assert a.ids == ids[:-1] and a.pending is not None
        return rows, p[skip:], q[skip:]


@pytest.mark.parametrize(
    ("vocabulary", "count", "skip"), [(512, 70, 0), (3001, 90, 45), (300, 258, 250)]
)
@pytest.mark.parametrize("noise", [1e-5, 1e-3, 0.02, 3.0])
def test_rows_against_float64(
    device: Device,
    tmp_path: Path,
    vocabulary: int,
    count: int,
    skip: int,
    noise: float,
) -> None:
    """From almost equal models to ones that have nothing in common."""
    made = write_llama(tmp_path / "a", vocabulary=vocabulary)
    rng = np.random.default_rng(5)
    changed = {
        name: (w * (1 + noise * rng.standard_normal(w.shape))).astype(np.float32)
        for name, w in made.items()
    }
    write_llama(tmp_path / "b", vocabulary=vocabulary, tensors=changed)
    for name in "ab":
        compile_source(tmp_path / name, tmp_path / f"{name}.vxm", weights="fp32")
    ids = random_ids(count, 3, vocabulary)
    rows, p, q = compare_all(device, tmp_path / "a.vxm", tmp_path / "b.vxm", ids, skip)
    assert len(rows) == count - 1 - skip
    exact = (np.exp(p) * (p - q)).sum(axis=1)
    found = np.array([row.divergence for row in rows])
    assert exact.min() > 0
    np.testing.assert_allclose(found, exact, rtol=2e-4, atol=1e-12)
    targets = np.array(ids[1:])[skip:]
    at = np.arange(len(targets))
    np.testing.assert_allclose([r.reference_logprob for r in rows], p[at, targets], atol=2e-5)
    np.testing.assert_allclose([r.logprob for r in rows], q[at, targets], atol=2e-5)
    assert [row.reference_id for row in rows] == p.argmax(axis=1).tolist()
    assert [row.id for row in rows] == q.argmax(axis=1).tolist()


def test_a_model_equals_itself(device: Device, compiled: Compiled) -> None:
    path = compiled("llama-tiny")
    ids = random_ids(40, 1)
    rows, _, _ = compare_all(device, path, path, ids, 0)
    assert all(row.divergence == 0 and row.id == row.reference_id for row in rows)
    assert [row.logprob for row in rows] == [row.reference_logprob for row in rows]


def test_a_text_is_measured_the_same_every_time(device: Device, compiled: Compiled) -> None:
    windows = tuple(tuple(random_ids(32, seed)) for seed in range(3))
    text = Text("t", "", 100, 32, windows)
    with (
        open_engine(device, compiled("llama-tiny")) as a,
        open_engine(device, compiled("llama-tiny", "int8")) as b,
    ):
        first, second = (measure(a, b, text, NullProgress()) for _ in range(2))
        assert first == second
        assert 0 < first.kl_mean < first.kl_p99 <= first.kl_max
        # The log-probabilities are those that `Session.logprobs` gives.
        total, scored = 0.0, 0
        for ids in windows:
            with Session(b) as session:
                values = session.logprobs(ids)[32 // 2 + 1 :]
            total, scored = total + float(values.sum(dtype=np.float64)), scored + len(values)
        assert scored == text.scored
        assert abs(np.exp(-total / scored) / first.perplexity - 1) < 1e-4


def test_summaries() -> None:
    rows = [RowComparison(0.01 * i, -2.0, -3.0, 7, 7 if i % 4 else 8) for i in range(101)]
    found = summarise(rows)
    assert abs(found.kl_mean - 0.5) < 1e-12 and abs(found.kl_p99 - 0.99) < 1e-12
    assert found.kl_max == 1.0 and found.top1 == 75 / 101
    assert abs(found.perplexity - np.exp(3)) < 1e-9
    assert abs(found.reference_perplexity - np.exp(2)) < 1e-9


def test_a_nan_is_named(device: Device, tmp_path: Path) -> None:
    write_llama(tmp_path / "hf", vocabulary=64)
    for name in "ab":
        compile_source(tmp_path / "hf", tmp_path / f"{name}.vxm", weights="fp32")
    spoil(tmp_path / "b.vxm", "lm_head.weight", 5, 3, np.inf)
    text = Text("t", "", 20, 16, (tuple(random_ids(16, 1, 64)),))
    with (
        open_engine(device, tmp_path / "a.vxm") as a,
        open_engine(device, tmp_path / "b.vxm") as b,
        pytest.raises(HornitoError, match="the model are not finite"),
    ):
        measure(a, b, text, NullProgress())
