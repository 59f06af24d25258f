"""Tiny models for tests of the runtime: their goldens, engines on them, and what is compared.

Two classes of equality (docs/architecture.md): "bits" for the same schedule, and "tokens" for
everything else: the same argmax at every step but where the reference's two best logits are closer
than a margin, and log-probabilities within a tolerance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from gguf_samples import HF
from hornito.graph.graph import Graph
from hornito.package import open_package
from hornito.plan.plan import PlanOptions
from hornito.runtime.decode import decode
from hornito.runtime.engine import DEFAULT_POLICY, Engine
from hornito.runtime.session import Session
from hornito.runtime.settle import KernelPolicy
from hornito.vk.device import Device

NAMES = ("llama-tiny", "llama3-tiny")
CONTEXT = 512
VOCABULARY = 512
MARGIN = 1e-3
TOLERANCE = 1e-3

Floats = npt.NDArray[np.float32]
Compiled = Callable[..., Path]
Broken = Callable[[str, str, str], None]
"""Compiles a kernel with a text of its source replaced, and has it used from then on."""


@dataclass(frozen=True)
class Golden:
    """What transformers computes for a tiny model, in fp32."""

    prompt: list[int]  # 24 ids
    tokens: list[int]  # 32 greedy ids after it
    logits: Floats  # [24, V], of the prompt
    top_ids: npt.NDArray[np.int32]  # [32, 8], of each step
    top_logits: Floats  # [32, 8]
    margin: Floats  # [32], between the two largest


def golden(name: str) -> Golden:
    """The golden of a checkpoint under tests/data/hf."""
    with np.load(HF / name / "golden.npz") as data:
        return Golden(
            data["prompt"].tolist(),
            data["tokens"].tolist(),
            data["prefill_logits"],
            data["step_top_ids"],
            data["step_top_logits"],
            data["margin"],
        )


def random_ids(count: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Token ids that mean nothing."""
    ids: list[int] = np.random.default_rng(seed).integers(3, vocabulary, count).tolist()
    return ids


def write_llama(
    folder: Path, *, vocabulary: int, seed: int = 0, tensors: dict[str, Floats] | None = None
) -> dict[str, Floats]:
    """Write a random untied llama checkpoint of one layer, and return its tensors.

    Args:
        tensors: replace those of the same name.
    """
    hidden, heads, kv_heads, head_dim, inner = 32, 9, 3, 8, 48  # llama-tiny's heads
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 0.25) -> Floats:
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    layer = "model.layers.0"
    made = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden, 1.0),
        f"{layer}.input_layernorm.weight": np.ones(hidden, np.float32),
        f"{layer}.self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
        f"{layer}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
        f"{layer}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
        f"{layer}.self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
        f"{layer}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
        f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
        f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
        f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(vocabulary, hidden, 0.5),
        **(tensors or {}),
    }
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(made, folder / "model.safetensors")
    return made


def spoil(package: Path, tensor: str, row: int, column: int, number: float) -> None:
    """Damage a package: put a number into a matrix that is stored as fp32."""
    with open_package(package) as opened:
        info = opened.tensors[tensor]
    assert info.dtype == "F32"
    with package.open("r+b") as file:
        file.seek(info.offset + 4 * (row * info.shape[1] + column))
        file.write(np.float32(number).tobytes())


@contextmanager
def open_engine(
    device: Device,
    package: Path,
    *,
    context: int = CONTEXT,
    kv_half: bool = False,
    eos_ids: Sequence[int] = (),
    policy: KernelPolicy = DEFAULT_POLICY,
    submission_ms: float | None = 60_000.0,
    recover: bool = False,
    **options: Any,
) -> Iterator[Engine]:
    """An engine on a package; `options` are those of `PlanOptions`.

    Submissions are not cut by default, so that their number does not follow the machine's load.
    """
    with open_package(package) as opened:
        plan = PlanOptions(context=context, kv_half=kv_half, **options)
        graph = Graph.from_json(opened.manifest.graph)
        engine = Engine(
            device,
            opened,
            graph,
            plan,
            eos_ids,
            policy=policy,
            submission_ms=submission_ms,
            recover=recover,
        )
        try:
            yield engine
        finally:
            engine.close()


def poison_blocks(engine: Engine) -> None:
    """Fill every KV block with NaN, also as pairs of fp16."""
    for pool in engine.pools:
        words = np.full(pool.kind.block_bytes // 4, 0xFFFFFFFF, np.uint32)
        device = engine.device
        device.upload([(*pool.place(block), words) for block in range(pool.count)])


@dataclass(frozen=True)
class Answer:
    """A prompt and its greedy continuation: everything of it that can be compared."""

    prompt: list[int]
    tokens: list[int]
    logprobs: Floats  # [prompt], the first is NaN
    last: Floats  # [V], logits after the last evaluated token

    def bits(self) -> tuple[Any, ...]:
        """Equal when every bit is."""
        return (tuple(self.tokens), self.logprobs.tobytes(), self.last.tobytes())


def answer(
    engine: Engine,
    prompt: Sequence[int],
    count: int,
    *,
    steps: int = 8,
    chunk: int | None = None,
) -> Answer:
    """Evaluate a prompt and continue it with `count` tokens, past end tokens."""
    with Session(engine) as session:
        logprobs = session.logprobs(prompt, chunk=chunk)
        tokens = [pending(session)]
        for (new,) in decode([session], [count - 1], ignore_eos=True, steps=steps):
            tokens += new
        return Answer(list(prompt), tokens, logprobs, session.logits())


def check_answer(engine: Engine) -> None:
    """An engine on llama-tiny gives the tokens of the reference."""
    wanted = golden("llama-tiny")
    assert answer(engine, wanted.prompt, 8).tokens == wanted.tokens[:8]


def kernels_of(engine: Engine) -> set[str]:
    """The kernels that an engine's plan launches."""
    return {dispatch.kernel for dispatch in engine.plan.distinct()}


def forced_logits(
    engine: Engine, ids: Sequence[int], *, pieces: Sequence[tuple[int, int | None]] = ()
) -> Floats:
    """Logits `[n, V]` along given ids.

    Args:
        pieces: (how many ids, chunk) of each prefill call; what is left goes into a last one.
    """
    parts, at = [], 0
    with Session(engine) as session:
        for count, chunk in pieces:
            parts.append(session.prefill_logits(ids[at : at + count], chunk=chunk))
            at += len(parts[-1])
        if at < len(ids):
            parts.append(session.prefill_logits(ids[at:]))
    return np.concatenate(parts)


def pending(session: Session) -> int:
    """The session's next token, which must be there."""
    assert session.pending is not None
    return session.pending


def leave(run: Iterator[Any]) -> None:
    """Close a generator before its end, as a loop that breaks does."""
    cast("Generator[Any, None, None]", run).close()


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """In float64, over the last axis."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def margins(logits: Floats) -> Floats:
    """The largest minus the second largest, over the last axis."""
    best = np.partition(logits, -2, axis=-1)
    return best[..., -1] - best[..., -2]


def differing_steps(got: Floats, want: Floats, margin: float = MARGIN) -> list[tuple[int, float]]:
    """(step, the reference's margin) where the argmax differs without a near-tie to excuse it."""
    gaps = margins(want)
    different = got.argmax(-1) != want.argmax(-1)
    return [(int(i), float(gaps[i])) for i in np.flatnonzero(different) if gaps[i] >= margin]


def assert_same_tokens(
    got: Floats, want: Floats, *, margin: float = MARGIN, tolerance: float = TOLERANCE
) -> None:
    """The "tokens" contract over two `[n, V]` arrays of logits along the same ids."""
    assert got.shape == want.shape
    assert differing_steps(got, want, margin) == []
    np.testing.assert_allclose(log_softmax(got), log_softmax(want), rtol=0, atol=tolerance)


def assert_same_stream(
    got: Sequence[int], want: Sequence[int], gaps: Collection[float], margin: float = MARGIN
) -> None:
    """The "tokens" contract over two free-running streams: equal up to the first near-tie.

    Args:
        gaps: the reference's margin at each step.
    """
    assert len(got) == len(want) == len(gaps)
    for step, (a, b, gap) in enumerate(zip(got, want, gaps, strict=True)):
        if a != b:
            assert gap < margin, f"step {step}: {a} for {b}, whose margin is {gap}"
            return
