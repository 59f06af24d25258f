"""The "tokens" contract: other chunkings, other batch sizes, other passes, other head tiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hornito.compiler import compile_source
from hornito.graph.passes import pass_names
from hornito.package import open_package
from hornito.runtime.decode import decode
from hornito.runtime.engine import Engine
from hornito.runtime.session import Session
from hornito.vk.device import Device
from tiny import (
    NAMES,
    Compiled,
    Floats,
    answer,
    assert_same_stream,
    assert_same_tokens,
    forced_logits,
    log_softmax,
    margins,
    open_engine,
    pending,
    random_ids,
    write_llama,
)

pytestmark = pytest.mark.gpu

LONG = random_ids(300, seed=3)


@pytest.fixture(scope="module")
def reference(engine: Engine) -> Floats:
    return forced_logits(engine, LONG)


MIXED: list[tuple[int, int | None]] = [
    (1, None), (15, 16), (3, 1), (100, 64), (1, None), (63, 16), (64, None), (37, 64),
]  # fmt: skip


@pytest.mark.parametrize(
    "pieces",
    [[(300, 1)], [(300, 16)], [(300, 64)], [(300, 256)], MIXED],
    ids=["1", "16", "64", "256", "mixed"],
)
def test_chunkings(engine: Engine, reference: Floats, pieces: list[tuple[int, int | None]]) -> None:
    """Argmax and log-probabilities of 300 rows; the reference is held to the golden elsewhere."""
    assert_same_tokens(forced_logits(engine, LONG, pieces=pieces), reference)


@pytest.mark.parametrize("chunk", [1, 16, 64, 256])
def test_chunkings_of_the_other_verbs(engine: Engine, reference: Floats, chunk: int) -> None:
    want = log_softmax(reference)
    with Session(engine) as session:
        logprobs = session.logprobs(LONG, chunk=chunk)
        assert np.isnan(logprobs[0])
        picked = want[np.arange(299), LONG[1:]]
        np.testing.assert_allclose(logprobs[1:], picked, rtol=0, atol=1e-3)
        assert pending(session) == reference[-1].argmax()
    with Session(engine) as session:
        session.prefill(LONG, chunk=chunk)
        assert session.position == 300 and pending(session) == reference[-1].argmax()
        assert_same_tokens(session.logits()[None], reference[-1:])


def test_logprobs_behind_a_prefix(engine: Engine, reference: Floats) -> None:
    """The first log-probability then comes from the token before."""
    with Session(engine) as session:
        session.prefill(LONG[:100])
        logprobs = session.logprobs(LONG[100:200])
    want = log_softmax(reference)[np.arange(99, 199), LONG[100:200]]
    np.testing.assert_allclose(logprobs, want, rtol=0, atol=1e-3)


BATCHES = [
    (2, NAMES[0]),
    (3, NAMES[1]),
    (4, NAMES[0]),
    (4, NAMES[1]),
    (7, NAMES[0]),
    (16, NAMES[1]),
]


@pytest.mark.parametrize(("batch", "name"), BATCHES)
def test_sharing_a_call_gives_what_each_gives_alone(
    device: Device, compiled: Compiled, name: str, batch: int
) -> None:
    lengths = (5, 130, 17, 64, *range(6, 66, 5))[:batch]
    prompts = [random_ids(n, seed=10 + n) for n in lengths]
    counts = [40, 25, 33, 40, *range(3, 39, 3)][:batch]
    with open_engine(device, compiled(name), slots=batch) as engine:
        alone = [answer(engine, p, n) for p, n in zip(prompts, counts, strict=True)]
        sessions = [Session(engine) for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.prefill(prompt)
        tokens = [[pending(session)] for session in sessions]
        for new in decode(sessions, [n - 1 for n in counts], ignore_eos=True, steps=7):
            for mine, found in zip(tokens, new, strict=True):
                mine += found
        for session, mine, want in zip(sessions, tokens, alone, strict=True):
            assert session.position == len(want.prompt) + len(want.tokens) - 1
            last = session.logits()
            session.close()
            forced = forced_logits(engine, want.prompt + want.tokens[:-1])
            gaps = margins(forced[len(want.prompt) - 1 :])
            assert_same_stream(mine, want.tokens, gaps.tolist())
            if mine == want.tokens:
                assert_same_tokens(last[None], want.last[None])


PASSES = [*((name,) for name in pass_names()), pass_names()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("disabled", PASSES, ids=[*pass_names(), "all"])
def test_passes_change_no_token(
    device: Device, compiled: Compiled, name: str, disabled: tuple[str, ...]
) -> None:
    ids = LONG[:80]
    with open_package(compiled(name)) as package:
        matched = sum(package.manifest.support["passes"][each] for each in disabled)
    with open_engine(device, compiled(name)) as engine:
        want = answer(engine, ids, 30)
        nodes = len(engine.graph.nodes)
    with open_engine(device, compiled(name, "fp32", disabled)) as engine:
        got = answer(engine, ids, 30)
        assert (len(engine.graph.nodes) > nodes) is (matched > 0)
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.logprobs[1:], want.logprobs[1:], rtol=0, atol=1e-4)
    np.testing.assert_allclose(log_softmax(got.last), log_softmax(want.last), rtol=0, atol=1e-4)


# -- head tiles -----------------------------------------------------------------------------------

VOCABULARY = 5000
SEAMS = (0, 1023, 1024, 1025, 2047, 2048, 4095, 4096, 4999)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Floats]]:
    """A model of 5000 ids, and its tensors."""
    folder = tmp_path_factory.mktemp("wide")
    tensors = write_llama(folder / "hf", vocabulary=VOCABULARY)
    compile_source(folder / "hf", folder / "model.vxm", weights="fp32")
    return folder / "model.vxm", tensors


@pytest.fixture(scope="module")
def untiled(device: Device, wide: tuple[Path, dict[str, Floats]]) -> Iterator[Engine]:
    with open_engine(device, wide[0]) as engine:
        yield engine


@pytest.mark.parametrize("tile", [1024, 2048, 3072])
def test_head_tiles_change_no_token(
    device: Device, wide: tuple[Path, dict[str, Floats]], untiled: Engine, tile: int
) -> None:
    """5000 = 4 x 1024 + 904: whole tiles and a rest."""
    ids = random_ids(70, seed=5, vocabulary=VOCABULARY)
    want = answer(untiled, ids, 30)
    forced = forced_logits(untiled, want.prompt + want.tokens[:-1])
    with open_engine(device, wide[0], head_tile_ids=tile) as engine:
        heads = [d for d in engine.plan.buckets["batch", 1].tails["argmax"].dispatches]
        assert sum("partial" in d.kernel for d in heads) == -(-VOCABULARY // tile)
        got = answer(engine, ids, 30)
    assert_same_stream(got.tokens, want.tokens, margins(forced[69:]).tolist())
    np.testing.assert_allclose(got.logprobs[1:], want.logprobs[1:], rtol=0, atol=1e-4)
    # All logits together need no tiles.
    assert got.tokens != want.tokens or got.last.tobytes() == want.last.tobytes()


def test_the_winner_may_stand_at_any_seam(
    device: Device, wide: tuple[Path, dict[str, Floats]], untiled: Engine, tmp_path: Path
) -> None:
    """The winning row of the head is moved to either side of each tile's and run's edge."""
    ids = random_ids(20, seed=6, vocabulary=VOCABULARY)
    with Session(untiled) as session:
        session.prefill(ids)
        winner = pending(session)
        logits = session.logits()
    assert margins(logits) > 0.01
    head = wide[1]["lm_head.weight"]
    for seam in SEAMS:
        moved = head.copy()
        moved[[seam, winner]] = head[[winner, seam]]
        write_llama(tmp_path / "hf", vocabulary=VOCABULARY, tensors={"lm_head.weight": moved})
        compile_source(tmp_path / "hf", tmp_path / "model.vxm", weights="fp32")
        with open_engine(device, tmp_path / "model.vxm", head_tile_ids=1024) as engine:
            with Session(engine) as session:
                session.prefill(ids)
                assert pending(session) == seam
            with Session(engine) as session:
                got = session.logprobs([*ids, seam])[-1]
            assert abs(got - log_softmax(logits)[winner]) < 1e-4


def test_ties_go_to_the_lowest_id_across_tiles(
    device: Device, wide: tuple[Path, dict[str, Floats]], untiled: Engine, tmp_path: Path
) -> None:
    ids = random_ids(20, seed=6, vocabulary=VOCABULARY)
    with Session(untiled) as session:
        session.prefill(ids)
        winner = pending(session)
    head = wide[1]["lm_head.weight"].copy()
    for twin in (4999, 3000, 1024, 1023, 500):
        head[twin] = head[winner]
        write_llama(tmp_path / "hf", vocabulary=VOCABULARY, tensors={"lm_head.weight": head})
        compile_source(tmp_path / "hf", tmp_path / "model.vxm", weights="fp32")
        with (
            open_engine(device, tmp_path / "model.vxm", head_tile_ids=1024) as engine,
            Session(engine) as session,
        ):
            session.prefill(ids)
            assert pending(session) == min(twin, winner)
            row = session.logits()
            assert row[twin] == row[winner] == row.max()


def test_vocabulary_smaller_than_the_mlp(device: Device, tmp_path: Path) -> None:
    """The head, not the tallest matrix, says how many ids there are."""
    write_llama(tmp_path / "hf", vocabulary=40)
    compile_source(tmp_path / "hf", tmp_path / "model.vxm", weights="fp32")
    with open_engine(device, tmp_path / "model.vxm") as engine:
        assert engine.vocabulary == 40
        assert max(w.shape[0] for w in engine.graph.weights.values()) > 40
        with Session(engine) as session:
            rows = session.prefill_logits([5, 39, 7])
            assert rows.shape == (3, 40) and np.isfinite(rows).all()
            assert pending(session) == rows[-1].argmax()
            np.testing.assert_allclose(session.logits(), rows[-1], rtol=0, atol=1e-4)
