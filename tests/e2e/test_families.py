"""Every family from file to tokens: against transformers' goldens, and position by position against
the float64 oracle where a golden does not reach (windows, RoPE scalings).

Weights fp32, KV fp32 (`high`): logits within 1e-3 of the reference and the same tokens.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hornito
from gguf_samples import HF, read_config, write_checkpoint
from hornito.compiler import compile_source
from hornito.errors import UsageError
from hornito.graph.passes import ORDER
from hornito.runtime.engine import Engine
from hornito.runtime.session import Session
from hornito.vk.device import Device, open_device
from oracle import Oracle
from tiny import CONTEXT, Floats, answer, differing_steps, log_softmax, open_engine, random_ids

pytestmark = pytest.mark.gpu

FAMILIES = (
    "mistral-tiny",
    "qwen2-tiny",
    "qwen2-bigvocab",
    "qwen3-tiny",
    "phi3-tiny",
    "smollm3-tiny",
    "gpt2-tiny",
    "gemma2-tiny",
    "gemma3-tiny",
)
Engines = Callable[..., Engine]


@pytest.fixture(scope="module")
def device(kernels: None) -> Iterator[Device]:
    """One device for the file, so that pipelines are made once."""
    with open_device(os.environ.get("HORNITO_DEVICE")) as opened:
        yield opened


@pytest.fixture
def engine_of(device: Device, tmp_path: Path) -> Iterator[Engines]:
    """`engine_of(source, context=, disabled=, weights=)`: an engine on a checkpoint."""
    stack = []

    def make(
        source: Path, *, context: int = 256, disabled: tuple[str, ...] = (), weights: str = "fp32"
    ) -> Engine:
        package = tmp_path / f"{len(stack)}.vxm"
        compile_source(source, package, weights=weights, disabled_passes=disabled)
        opened = open_engine(device, package, context=context, kv_half=weights == "fp16")
        stack.append(opened)
        return opened.__enter__()

    yield make
    for opened in stack:
        opened.__exit__(None, None, None)


def logits_of(engine: Engine, ids: list[int], chunk: int | None = None) -> Floats:
    """Logits after every id, `[n, V]`."""
    with Session(engine) as session:
        return session.prefill_logits(ids, chunk=chunk)


def changed(folder: Path, name: str, **changes: Any) -> Path:
    """A copy of a tiny checkpoint with other config keys."""
    shutil.copytree(HF / name, folder)
    (folder / "config.json").write_text(json.dumps(read_config(name) | changes))
    return folder


def assert_exact(found: Floats, exact: np.ndarray) -> None:
    """Within 1e-3 of the oracle at every position, the same argmax but for near-ties."""
    worst = np.abs(found - exact).max()
    assert worst < 1e-3, f"largest difference {worst:.2e}"
    assert differing_steps(found, exact.astype(np.float32)) == []


# -- goldens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_golden(engine_of: Engines, name: str) -> None:
    """Prompt logits, 32 tokens, and the eight best logits of each step."""
    engine = engine_of(HF / name)
    with np.load(HF / name / "golden.npz") as data:
        golden = dict(data)
    prompt, tokens = golden["prompt"].tolist(), golden["tokens"].tolist()
    rows = logits_of(engine, prompt + tokens[:-1])
    if "prefill_logits" in golden:
        difference = np.abs(rows[: len(prompt)] - golden["prefill_logits"]).max()
    else:
        difference = np.abs(rows[len(prompt) - 1] - golden["prefill_logits_last"]).max()
        assert max(prompt + tokens) > 65504
    print(f"{name}: {difference:.1e} from the golden's prompt logits")
    assert difference < 1e-3
    steps = rows[len(prompt) - 1 :]
    best = np.take_along_axis(steps, golden["step_top_ids"].astype(np.int64), axis=1)
    np.testing.assert_allclose(best, golden["step_top_logits"], rtol=0, atol=1e-3)
    assert golden["margin"].min() > 1e-3
    assert answer(engine, prompt, 32).tokens == tokens


@pytest.mark.parametrize("name", [*FAMILIES, "phi3-longrope"])
def test_gguf_equals_the_directory(engine_of: Engines, tmp_path: Path, name: str) -> None:
    """Bit by bit, though rows lie in another order (smollm3), matrices the other way (gpt2), and
    norms hold 1 + w (gemma)."""
    pytest.importorskip("gguf")
    folder = HF / name
    if name.startswith("gemma"):
        # A GGUF file has no key for another scale than the one of the head's size.
        folder = changed(tmp_path / "hf", name, query_pre_attn_scalar=16)
    path = write_checkpoint(tmp_path / "model.gguf", folder)
    ids = random_ids(40, seed=4)
    a, b = (answer(engine_of(source), ids, 16) for source in (folder, path))
    assert a.bits() == b.bits()


@pytest.mark.parametrize("name", FAMILIES)
def test_without_passes(engine_of: Engines, name: str) -> None:
    """The unfused twins of every family's kernels give the same tokens."""
    ids = random_ids(40, seed=5)
    fused, plain = engine_of(HF / name), engine_of(HF / name, disabled=ORDER)
    assert plain.plan.dispatches_per_layer() > fused.plan.dispatches_per_layer()
    assert fused.plan.dispatches_per_layer() <= (11 if name.startswith("gemma") else 9)
    a, b = logits_of(fused, ids), logits_of(plain, ids)
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
    assert answer(fused, ids, 16).tokens == answer(plain, ids, 16).tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_normal_precision(engine_of: Engines, name: str) -> None:
    """fp16 weights (which hold these models exactly) and fp16 KV."""
    ids = random_ids(40, seed=6)
    exact = Oracle(HF / name).logits(ids)
    rows = logits_of(engine_of(HF / name, weights="fp16"), ids)
    assert differing_steps(rows, exact.astype(np.float32), 0.05) == []
    assert np.abs(log_softmax(rows) - log_softmax(exact.astype(np.float32))).max() < 0.05


# -- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mistral-tiny", "phi3-tiny", "gemma2-tiny", "gemma3-tiny"])
def test_windows(engine_of: Engines, name: str) -> None:
    """Prompts about and far beyond the window of 16, in any chunks."""
    engine, oracle = engine_of(HF / name), Oracle(HF / name)
    assert max(kind.window for kind in engine.plan.kinds) == 16
    for count in (15, 16, 17, 80):
        ids = random_ids(count, seed=count)
        exact = oracle.logits(ids)
        for chunk in (None, 16, 1):
            assert_exact(logits_of(engine, ids, chunk), exact)


def test_five_sliding_layers_to_a_full_one(engine_of: Engines, tmp_path: Path) -> None:
    """Window 8, prompts of 7, 8, 9 and 40: right at every position, and not what a model without
    windows computes from the ninth on."""
    folder = changed(tmp_path / "hf", "gemma3-tiny", sliding_window=8)
    engine, oracle = engine_of(folder), Oracle(folder)
    full = Oracle(folder, layer_types=["full_attention"] * 7)
    bases = {kind.window: kind.layers for kind in engine.plan.kinds}
    assert bases == {8: (0, 1, 2, 3, 4, 6), 0: (5,)}
    for count in (7, 8, 9, 40):
        ids = random_ids(count, seed=70 + count)
        rows, exact = logits_of(engine, ids), oracle.logits(ids)
        assert_exact(rows, exact)
        # The local base of sliding layers differs, too; so the twin keeps it and drops the mask.
        unmasked = without_mask(folder, ids)
        assert np.abs(rows[:8] - unmasked[:8]).max() < 1e-3
        if count > 8:
            assert (np.abs(rows[8:] - unmasked[8:]).max(axis=1) > 1e-2).all()
            assert np.abs(rows - full.logits(ids)).max() > 1e-2


def without_mask(folder: Path, ids: list[int]) -> np.ndarray:
    """The oracle with windows too wide to hide anything."""
    return Oracle(folder, sliding_window=10_000).logits(ids)


@pytest.mark.parametrize("name", ["qwen2-tiny", "qwen3-tiny", "smollm3-tiny"])
def test_windows_of_some_layers(engine_of: Engines, tmp_path: Path, name: str) -> None:
    """Families whose published models have no window can still have one."""
    count = read_config(name)["num_hidden_layers"]
    kinds = ["sliding_attention" if i % 2 else "full_attention" for i in range(count)]
    folder = changed(
        tmp_path / "hf", name, use_sliding_window=True, sliding_window=9, layer_types=kinds
    )
    ids = random_ids(50, seed=8)
    exact = Oracle(folder).logits(ids)
    assert_exact(logits_of(engine_of(folder), ids), exact)
    assert np.abs(exact - Oracle(HF / name).logits(ids)).max() > 1e-2


def test_the_window_does_not_bound_the_context(tmp_path: Path) -> None:
    """A window of 16 and 2048 positions: the plan has them all."""
    folder = changed(tmp_path / "hf", "gemma3-tiny", max_position_embeddings=2048)
    compile_source(folder, tmp_path / "model.vxm", weights="fp32")
    with hornito.load(tmp_path / "model.vxm", precision="high") as llm:
        assert llm.context == 2048 and llm.engine.plan.table_blocks == 32
        assert "context: 2048 positions" in llm.plan_summary()


# -- RoPE -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["hf", "gguf"])
@pytest.mark.parametrize(("context", "factors"), [(32, "short"), (33, "long"), (256, "long")])
def test_longrope_by_context(
    engine_of: Engines, tmp_path: Path, source: str, context: int, factors: str
) -> None:
    """The capacity at load picks the set, for every position and length."""
    name = "phi3-longrope"
    path = HF / name
    if source == "gguf":
        pytest.importorskip("gguf")
        path = write_checkpoint(tmp_path / "model.gguf", name)
    engine = engine_of(path, context=context)
    ids = random_ids(min(context, 100), seed=context)
    exact = Oracle(HF / name, context=context).logits(ids)
    other = Oracle(HF / name, context=32 if factors == "long" else 33).logits(ids)
    for count in {min(20, context), len(ids)}:
        assert_exact(logits_of(engine, ids[:count]), exact[:count])
    assert np.abs(exact - other).max() > 0.1


def test_longrope_is_stated(tmp_path: Path) -> None:
    compile_source(HF / "phi3-longrope", tmp_path / "model.vxm", weights="fp32")
    for context, said in ((32, "short factors"), (64, "long factors")):
        with hornito.load(tmp_path / "model.vxm", context=context) as llm:
            assert f"rope: {said}" in llm.plan_summary()
            assert "32 positions" in llm.plan_summary()


SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 4,
        "beta_slow": 2,
    },
)


@pytest.mark.parametrize("name", ["llama3-tiny", "qwen3-tiny", "smollm3-tiny"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=["linear", "yarn", "yarn-betas"])
def test_rope_scalings(
    engine_of: Engines, tmp_path: Path, name: str, scaling: dict[str, Any]
) -> None:
    folder = changed(tmp_path / "hf", name, rope_scaling=scaling)
    ids = random_ids(90, seed=9)
    exact = Oracle(folder).logits(ids)
    assert_exact(logits_of(engine_of(folder), ids), exact)
    assert np.abs(exact - Oracle(folder, rope_scaling=None).logits(ids)).max() > 1e-2


def test_linear_scaling_of_gemma3_is_of_its_full_layers(engine_of: Engines, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    folder = changed(tmp_path / "hf", "gemma3-tiny", rope_scaling=scaling)
    ids = random_ids(60, seed=10)
    exact = Oracle(folder).logits(ids)
    assert_exact(logits_of(engine_of(folder), ids), exact)
    assert np.abs(exact - Oracle(HF / "gemma3-tiny").logits(ids)).max() > 1e-3


# -- layouts --------------------------------------------------------------------------------------


def test_permuted_rows_are_of_llama_only(engine_of: Engines, tmp_path: Path) -> None:
    """One set of weights as llama and as qwen2 (biases of zero), each from a directory and from a
    GGUF file: llama's rows of q and k are permuted in the file, qwen2's are not."""
    pytest.importorskip("gguf")
    llama = changed(tmp_path / "llama", "llama3-tiny", rope_scaling=None)
    qwen = changed(
        tmp_path / "qwen", "llama3-tiny", rope_scaling=None, model_type="qwen2", head_dim=None
    )
    weights = load_file(qwen / "model.safetensors")
    for name in list(weights):
        if any(f".{p}_proj.weight" in name for p in "qkv"):
            bias = np.zeros(len(weights[name]), np.float32)
            weights[name.replace(".weight", ".bias")] = bias
    save_file(weights, qwen / "model.safetensors")
    sources = [
        llama,
        write_checkpoint(tmp_path / "llama.gguf", llama),
        qwen,
        write_checkpoint(tmp_path / "qwen.gguf", qwen),
    ]
    ids = random_ids(50, seed=11)
    first, *others = (logits_of(engine_of(source), ids) for source in sources)
    assert_exact(first, Oracle(llama).logits(ids))
    for rows in others:
        assert rows.tobytes() == first.tobytes()


def test_tied_and_untied_heads(engine_of: Engines, tmp_path: Path) -> None:
    """qwen3-tiny (its heads make 128 of 64) with its table tied, and as a head of its own: equal,
    and the tied package holds the table once."""
    pytest.importorskip("gguf")
    untied = changed(tmp_path / "untied", "qwen3-tiny", tie_word_embeddings=False)
    weights = load_file(untied / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    save_file(weights, untied / "model.safetensors")
    sources = [
        HF / "qwen3-tiny",
        untied,
        write_checkpoint(tmp_path / "tied.gguf", "qwen3-tiny"),
        write_checkpoint(tmp_path / "untied.gguf", untied),
    ]
    ids = random_ids(30, seed=12)
    first, *others = (logits_of(engine_of(source), ids) for source in sources)
    for rows in others:
        assert rows.tobytes() == first.tobytes()
    sizes = [(tmp_path / f"{i}.vxm").stat().st_size for i in range(4)]
    table = 512 * 64 * 4
    for tied, other in ((sizes[0], sizes[1]), (sizes[2], sizes[3])):
        assert abs(other - tied - table) < 4096


def test_gpt2_has_no_positions_beyond_its_table(engine_of: Engines) -> None:
    with pytest.raises(UsageError, match=r"learned positions for 256 .* context of 512"):
        engine_of(HF / "gpt2-tiny", context=CONTEXT)
    engine = engine_of(HF / "gpt2-tiny", context=256)
    ids = random_ids(256, seed=13)
    assert_exact(logits_of(engine, ids), Oracle(HF / "gpt2-tiny").logits(ids))
