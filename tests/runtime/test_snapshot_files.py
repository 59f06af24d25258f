"""Snapshots on disk: another process goes on with the same bits; a file that is damaged or of other
settings is refused, naming what is wrong, and nothing has changed then."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from gguf_samples import HF, read_config
from hornito.compiler import compile_source
from hornito.errors import DeviceMemoryError, FormatError, HornitoError, SessionError
from hornito.runtime.decode import decode, decode_records
from hornito.runtime.engine import Engine
from hornito.runtime.sampler import Sampler, SamplingParams
from hornito.runtime.session import Session
from hornito.runtime.snapshot_file import HASH_KEY, KEY, read_facts
from hornito.vk.device import Device
from tiny import Compiled, open_engine, pending, random_ids
from tree import ROOT

pytestmark = pytest.mark.gpu

IDS = random_ids(300, seed=71)
NEXT = random_ids(20, seed=72)
OPTIONS: dict[str, Any] = {"context": 512, "slots": 2, "chunk_rows": (16,), "rewind_budget": 16}
SAMPLER = Sampler.start(
    SamplingParams(
        temperature=0.8, top_p=0.95, repetition_penalty=1.1, logit_bias={7: 0.5}, seed=9
    ),
    77,
)


def going_on(session: Session) -> list[str | int]:
    """What follows, as plain values: drawn and greedy tokens, and a hash of logits."""
    sampler = session.sampler
    run = decode_records([session], [12], samplers=[sampler], ignore_eos=True)
    drawn = [record.token for (records,) in run for record in records]
    rows = session.prefill_logits(NEXT, chunk=16)
    tokens = [token for (new,) in decode([session], [20], ignore_eos=True) for token in new]
    digest = hashlib.sha256(rows.tobytes() + session.logits().tobytes()).hexdigest()
    return [*drawn, *tokens, digest, session.position]


SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from hornito.vk.device import open_device
from hornito.runtime.session import Session
from test_snapshot_files import OPTIONS, going_on
from tiny import open_engine
with open_device(sys.argv[4] or None) as device:
    with open_engine(device, Path(sys.argv[2]), **OPTIONS) as engine, Session(engine) as session:
        session.load(sys.argv[3])
        before = engine.counters.evaluated_tokens
        print(json.dumps([before, session.position, session.pending, going_on(session)]))
"""


@pytest.mark.parametrize("name", ["llama-tiny", "mistral-tiny", "gemma3-tiny"])
def test_a_new_process_goes_on(
    device: Device, compiled: Compiled, tmp_path: Path, name: str
) -> None:
    """Bit by bit, deep in the windows, with the next draws; nothing is evaluated again."""
    package, file = compiled(name), tmp_path / "file"
    with open_engine(device, package, **OPTIONS) as engine, Session(engine) as session:
        session.prefill(IDS, chunk=16, sampler=SAMPLER)
        with session.snapshot() as snapshot:
            size = snapshot.save(file)
            assert size == file.stat().st_size
            assert 0 < size - snapshot.nbytes < 8192
            assert [path.name for path in tmp_path.iterdir()] == ["file"]
        token = pending(session)
        want = going_on(session)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SCRIPT,
            str(ROOT / "tests/runtime"),
            package,
            file,
            os.environ.get("HORNITO_DEVICE", ""),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, len(IDS), token, want]


def test_e1_restoring_costs_no_prefill(device: Device, compiled: Compiled, tmp_path: Path) -> None:
    """E1: what is reported as held is held: counters stand still, and the first token comes in less
    than a fifth of the time."""
    with open_engine(device, compiled("mistral-tiny"), **OPTIONS) as engine:
        cold, warm = [], []
        for _ in range(3):
            with Session(engine) as session:
                began = time.perf_counter()
                session.prefill([*IDS, 5], chunk=1)
                cold.append(time.perf_counter() - began)
                want = session.pending
        with Session(engine) as session:
            session.prefill(IDS, chunk=1)
            session.snapshot().save(tmp_path / "file")
        for _ in range(3):
            with Session(engine) as session:
                session.load(tmp_path / "file")
                with session.snapshot() as snapshot:
                    session.rewind(0)
                    before = engine.counters.evaluated_tokens
                    began = time.perf_counter()
                    session.restore(snapshot)
                    session.step(5)
                    warm.append(time.perf_counter() - began)
                assert engine.counters.evaluated_tokens - before == 1
                assert session.position == len(IDS) + 1 and session.pending == want
        assert min(warm) < 0.2 * min(cold)


# -- damage -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(device: Device, compiled: Compiled) -> Iterator[Engine]:
    """gemma3-tiny: two kinds of block."""
    with open_engine(device, compiled("gemma3-tiny"), **OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def file(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of 70 tokens, three of them embeddings."""
    path = tmp_path_factory.mktemp("snapshots") / "file"
    with Session(engine) as session:
        session.prefill(IDS[:60], chunk=16)
        session.prefill(embeddings=np.ones((3, engine.plan.width)))
        session.prefill(IDS[63:70], chunk=16, sampler=SAMPLER)
        session.snapshot().save(path)
    return path


@pytest.fixture
def live(engine: Engine) -> Iterator[Callable[..., str]]:
    """`live(path, error)`: loading is refused with the error, whose message it returns; the session
    that tried and another one are what they were, and so are the pools."""
    with Session(engine) as session, Session(engine) as other:
        session.prefill(IDS[:50], chunk=16)
        other.prefill(IDS[100:200], chunk=16)
        states = [(s.ids[:], s.pending, s.logits().tobytes()) for s in (session, other)]
        used = [pool.used for pool in engine.pools]
        free = [pool.count - pool.used for pool in engine.pools]

        def refused(path: Path, error: type[Exception] | tuple[type[Exception], ...]) -> str:
            with pytest.raises(error) as caught:
                session.load(path)
            assert [pool.used for pool in engine.pools] == used
            assert (session.position, session.pending) == (50, states[0][1])
            return str(caught.value)

        yield refused
        assert [(s.ids[:], s.pending, s.logits().tobytes()) for s in (session, other)] == states
        for pool, count in zip(engine.pools, free, strict=True):
            taken = [pool.take() for _ in range(count)]
            for block in taken:
                pool.release(block, engine.last_ticket)


def regions(data: bytes) -> dict[str, range]:
    """Where the parts of a snapshot file lie."""
    end = 8 + int.from_bytes(data[:8], "little")
    offsets = {
        name: entry["data_offsets"]
        for name, entry in json.loads(data[8:end]).items()
        if name != "__metadata__"
    }
    found = {name: range(end + a, end + b) for name, (a, b) in offsets.items()}
    assert max(part.stop for part in found.values()) == len(data)
    return {"length": range(8), "header": range(8, end), **found}


def test_e3_every_flipped_bit_is_found(
    file: Path, tmp_path: Path, live: Callable[..., str]
) -> None:
    """E3: in the length, in every byte of the header (description, hash, offsets), and all over
    each tensor."""
    data = bytearray(file.read_bytes())
    path = tmp_path / "damaged"
    places = regions(bytes(data))
    assert set(places) == {"length", "header", "kv.0", "kv.1", "embeddings"}
    rng = np.random.default_rng(0)
    for name, part in places.items():
        spots: list[int] = list(part)
        if name not in ("length", "header"):
            spots = [part[0], part[-1], *rng.choice(part, 10).tolist()]
        for spot in spots:
            bit = 1 << int(rng.integers(8))
            data[spot] ^= bit
            path.write_bytes(data)
            data[spot] ^= bit
            message = live(path, (FormatError, SessionError))
            assert str(path) in message
            if name.startswith("kv") or name == "embeddings":
                assert f"tensor {name} is damaged" in message


def test_e3_truncated_files(file: Path, tmp_path: Path, live: Callable[..., str]) -> None:
    """E3: at every region's edges, and in between; and files that are something else."""
    data = file.read_bytes()
    path = tmp_path / "short"
    ends = {0, 1, 7, 8, 9, len(data) - 1}
    for part in regions(data).values():
        ends |= {part.start, part.start + 1, (part.start + part.stop) // 2, part.stop - 1}
    for end in sorted(ends - {len(data)}):
        path.write_bytes(data[:end])
        assert "no readable snapshot file" in live(path, FormatError)
    path.write_bytes(data + b"\0")
    assert "no readable snapshot file" in live(path, FormatError)
    assert "no such snapshot file" in live(tmp_path / "missing", FormatError)
    assert "no readable snapshot file" in live(tmp_path, FormatError)
    save_file({"x": np.zeros(3, np.uint8)}, path)
    assert "a safetensors file, but no snapshot of Hornito" in live(path, FormatError)


def forge(source: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A snapshot file whose description was changed and signed again."""
    with safe_open(source, "numpy") as opened:
        facts = json.loads(opened.metadata()[KEY])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(facts)
    text = json.dumps(facts)
    save_file(tensors, target, {KEY: text, HASH_KEY: hashlib.sha256(text.encode()).hexdigest()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(format_version=2), "format version 2; this Hornito reads 1"),
        (lambda f: f.update(ids=[*f["ids"][:-1], 512]), "token id 512 is outside"),
        (lambda f: f.update(pending=-1), "token id -1 is outside"),
        (lambda f: f.update(pending="7"), "description is malformed"),
        (lambda f: f.update(ids=None), "description is malformed"),
        (lambda f: f["present"][0].append(2), "description is malformed"),
        (lambda f: f["present"][0].reverse(), "description is malformed"),
        (lambda f: f["present"][1].pop(0), "blocks [0] of kind 1 are missing"),
        (lambda f: f.update(present=f["present"][:1]), "70 positions in 1 kinds"),
        (lambda f: f.update(ids=f["ids"] * 8), "560 positions in 2 kinds of block; .* holds 512"),
        (lambda f: f.update(messages=[{"role": "user"}]), "description is malformed"),
        (lambda f: f.update(sampler={}), "sampling parameters are wrong"),
        (lambda f: f["sampler"]["params"].update(top_p=7), "top_p must be"),
        (lambda f: f["sampler"]["params"].update(colour=7), "colour"),
        (lambda f: f["sha256"].pop("kv.0"), "tensor kv.0 is damaged"),
        (lambda f: f["ids"].__setitem__(3, -1), "tensor embeddings is"),
    ],
)  # fmt: skip
def test_forged_descriptions(
    file: Path,
    tmp_path: Path,
    live: Callable[..., str],
    change: Callable[[dict[str, Any]], object],
    message: str,
) -> None:
    forge(file, tmp_path / "forged", change)
    found = live(tmp_path / "forged", (FormatError, SessionError))
    assert all(part in found for part in message.split(" .* "))


# -- other settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "int4"),
        ("precision", "high"),
        ("kv", "fp16"),
        ("rope_theta", 5e5),
        ("rope_scaling", {"factor": 2.0}),
        ("rope_factors", "long"),
        ("windows", [17, 0]),
        ("kinds", []),
        ("package", "0" * 64),
        ("something_new", 1),
    ],
)
def test_e8_other_settings_are_named(
    engine: Engine,
    file: Path,
    tmp_path: Path,
    live: Callable[..., str],
    field: str,
    value: object,
) -> None:
    """E8: each field of the identity, alone."""
    forge(file, tmp_path / "forged", lambda facts: facts["identity"].update({field: value}))
    mine = engine.identity.get(field)
    message = f"made with {field} = {value!r}; this session has {mine!r}"
    assert message in live(tmp_path / "forged", SessionError)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rope_theta": 5e5}, "this is a snapshot of another model, which was made with rope"),
        ({"weights": "int4"}, "another package of this one, which was made with weights"),
        ({}, "another package of this one, which was made with package"),
    ],
)
def test_e8_another_model_is_said_first(
    file: Path,
    tmp_path: Path,
    live: Callable[..., str],
    more: dict[str, object],
    message: str,
) -> None:
    changed = {"package": "0" * 64, **more}
    forge(file, tmp_path / "forged", lambda facts: facts["identity"].update(changed))
    assert message in live(tmp_path / "forged", SessionError)


def test_e8_other_models_and_settings(device: Device, compiled: Compiled, tmp_path: Path) -> None:
    """E8: the real thing: other weights, KV types, windows, bases, factors and models."""

    def package(name: str, **changes: Any) -> Path:
        folder = tmp_path / f"{name}-{len(changes)}-{'-'.join(changes)}"
        shutil.copytree(HF / name, folder)
        (folder / "config.json").write_text(json.dumps(read_config(name) | changes))
        compile_source(folder, folder / "m.vxm", weights="fp32")
        return folder / "m.vxm"

    mistral, longrope = compiled("mistral-tiny"), compiled("phi3-longrope")
    llama = compiled("llama-tiny")
    cases: list[tuple[Path, dict[str, Any], Path, dict[str, Any], str]] = [
        (llama, {}, compiled("llama-tiny", "fp16"), {}, "weights = 'fp32'; this .* 'fp16'"),
        (llama, {}, llama, {"kv_half": True}, "kv = 'fp32'; this session has 'fp16'"),
        (
            mistral,
            {},
            package("mistral-tiny", sliding_window=17),
            {},
            r"windows = \[16\]; .*\[17\]",
        ),
        (mistral, {}, package("mistral-tiny", rope_theta=5e4), {}, r"rope_theta = .* 50000"),
        (longrope, {"context": 32}, longrope, {}, "rope_factors = 'short'; this .* 'long'"),
        (mistral, {}, package("mistral-tiny", rms_norm_eps=1e-3), {}, "package = '"),
        (llama, {}, compiled("llama3-tiny"), {}, "made with (rope|kinds|package)"),
    ]
    for number, (one, settings, other, changes, message) in enumerate(cases):
        path = tmp_path / f"{number}"
        with (
            open_engine(device, one, **{**OPTIONS, **settings}) as engine,
            Session(engine) as session,
        ):
            session.prefill(IDS[:20])
            session.snapshot().save(path)
            session.load(path)
        with (
            open_engine(device, other, **{**OPTIONS, **changes}) as engine,
            Session(engine) as session,
        ):
            session.prefill(IDS[:30])
            last = session.logits().tobytes()
            with pytest.raises(SessionError, match=message):
                session.load(path)
            assert session.logits().tobytes() == last
            assert [pool.used for pool in engine.pools] == [1] * len(engine.pools)


def test_a_smaller_context_and_a_full_pool(
    device: Device, compiled: Compiled, tmp_path: Path
) -> None:
    with open_engine(device, compiled("gemma3-tiny"), **OPTIONS) as engine:
        with Session(engine) as session:
            session.prefill(IDS[:200])
            session.snapshot().save(tmp_path / "file")
            want = going_on(session)
        with Session(engine) as session:
            session.prefill(IDS[:10])
            last = session.logits().tobytes()
            for pool in engine.pools:
                taken = [pool.take() for _ in range(pool.count - pool.used)]
                before = [p.used for p in engine.pools]
                with pytest.raises(DeviceMemoryError, match="KV pool is full"):
                    session.load(tmp_path / "file")
                assert [p.used for p in engine.pools] == before
                assert session.logits().tobytes() == last
                for block in taken:
                    pool.release(block, engine.last_ticket)
            session.load(tmp_path / "file")
            assert going_on(session) == want
    with (
        open_engine(device, compiled("gemma3-tiny"), **{**OPTIONS, "context": 128}) as engine,
        Session(engine) as session,
        pytest.raises(SessionError, match=r"200 positions in 2 kinds .* holds 128 in 2"),
    ):
        session.load(tmp_path / "file")


def test_what_a_file_says(engine: Engine, file: Path) -> None:
    facts = read_facts(file)
    assert facts["ids"][:60] == IDS[:60] and facts["ids"][60:63] == [-1] * 3
    assert facts["identity"] == engine.identity
    assert (facts["identity"]["kv"], facts["identity"]["weights"]) == ("fp32", "fp32")
    assert facts["sampler"]["seed"] == 9 and facts["messages"] == []


def test_saving(engine: Engine, tmp_path: Path) -> None:
    """Whole or not at all; an older file is replaced; messages travel along."""
    with Session(engine) as session:
        session.prefill(IDS[:20])
        with session.snapshot() as snapshot:
            with pytest.raises(HornitoError, match="can't write the snapshot"):
                snapshot.save(tmp_path / "nowhere" / "file")
            with pytest.raises(HornitoError, match="can't write the snapshot"):
                snapshot.save(tmp_path)
            assert list(tmp_path.iterdir()) == []
            snapshot.messages = ({"role": "system", "content": "Ünïcode\n"},)
            snapshot.save(tmp_path / "file")
        session.prefill(IDS[20:40])
        first = (tmp_path / "file").read_bytes()
        assert read_facts(tmp_path / "file")["messages"][0]["content"] == "Ünïcode\n"
        session.snapshot().save(tmp_path / "file")
        assert read_facts(tmp_path / "file")["ids"] == IDS[:40]
        assert (tmp_path / "file").read_bytes() != first
        # An empty session is a snapshot, too.
        session.rewind(0)
        session.snapshot().save(tmp_path / "empty")
        session.prefill(IDS[:5])
        session.load(tmp_path / "empty")
        assert (session.position, session.pending, session.nbytes) == (0, None, 0)
