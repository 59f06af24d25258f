"""SmolLM2-135M-Instruct from its published GGUF file, against transformers in fp32.

`high` (fp32 weights, activations and KV) is held to a near-tie margin of 1e-3 and log-probabilities
within 1e-3; `normal` (fp16 weights and KV) to a margin of 0.05, and where it differed is printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

import hornito
from hornito.api import LLM
from hornito.runtime.decode import decode
from hornito.runtime.session import Session
from tiny import Compiled, pending
from tree import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.model]

GOLDEN = ROOT / "tests" / "data" / "smollm2-135m.golden.json"
CONTEXT = 1024
#: Prompts whose evaluation takes seconds on two cores, and the steps looked at in the suite.
SHORT = ("completion", "code", "system")
STEPS = 8


@dataclass(frozen=True)
class Setting:
    """How the model is loaded and what it is held to."""

    precision: str
    weights: str
    margin: float
    tolerance: float


SETTINGS = (
    Setting("high", "fp32", margin=1e-3, tolerance=1e-3),
    Setting("normal", "fp16", margin=0.05, tolerance=0.05),
)


@dataclass(frozen=True)
class Loaded:
    """The model under a setting."""

    llm: LLM
    setting: Setting


@cache
def prompts() -> dict[str, dict[str, Any]]:
    """The golden's prompts by name."""
    return {prompt["id"]: prompt for prompt in json.loads(GOLDEN.read_text())["prompts"]}


NAMES = list(prompts())


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: setting.precision)
def loaded(request: pytest.FixtureRequest, smollm2: Compiled) -> Iterator[Loaded]:
    setting: Setting = request.param
    package = smollm2(setting.weights)
    with hornito.load(package, precision=setting.precision, context=CONTEXT) as llm:
        yield Loaded(llm, setting)


def prompt_ids(llm: LLM, prompt: dict[str, Any]) -> list[int]:
    if prompt["kind"] == "chat":
        return llm.chat_ids(prompt["messages"])
    return llm.tokenizer.encode(prompt["prompt_text"])


def check_prompt(loaded: Loaded, prompt: dict[str, Any]) -> float:
    """Ids, and the log-probability of every token; returns the largest difference."""
    ids = prompt_ids(loaded.llm, prompt)
    assert ids == prompt["prompt_ids"]
    with Session(loaded.llm.engine) as session:
        logprobs = session.logprobs(ids)
    difference = float(np.abs(logprobs[1:] - np.array(prompt["prompt_logprobs"])).max())
    assert difference <= loaded.setting.tolerance
    return difference


def check_first_step(loaded: Loaded, prompt: dict[str, Any]) -> None:
    """The twenty largest logits after the prompt, and the log of the sum over all."""
    with Session(loaded.llm.engine) as session:
        session.prefill(prompt["prompt_ids"])
        logits = session.logits().astype(np.float64)
    total = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
    bound = 5 * loaded.setting.tolerance
    assert abs(total - prompt["first_logsumexp"]) < bound
    for token, logit in prompt["first_logits_top20"]:
        assert abs(logits[token] - logit) < bound, token


def forced_differences(loaded: Loaded, prompt: dict[str, Any], steps: int) -> list[int]:
    """Steps along the golden's own tokens where another one was more likely; none may be but at
    near-ties."""
    different = []
    with Session(loaded.llm.engine) as session:
        session.prefill(prompt["prompt_ids"])
        for step, token in enumerate(prompt["greedy_ids"][:steps]):
            if pending(session) != token:
                different.append(step)
            session.step(token)
    gaps = prompt["top2_margin"]
    wrong = {step: gaps[step] for step in different if gaps[step] >= loaded.setting.margin}
    assert wrong == {}
    return different


def check_stream(loaded: Loaded, prompt: dict[str, Any], steps: int) -> int:
    """Free-running: equal up to the first near-tie at least; returns how many steps were equal."""
    want = prompt["greedy_ids"][:steps]
    with Session(loaded.llm.engine) as session:
        session.prefill(prompt["prompt_ids"])
        got = [pending(session)]
        for (new,) in decode([session], [steps - 1], ignore_eos=True, steps=8):
            got += new
    assert len(got) == steps
    equal = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), steps)
    if equal < steps:
        gap = prompt["top2_margin"][equal]
        assert gap < loaded.setting.margin, f"step {equal}: {got[equal]} for {want[equal]}"
    return equal


def check(
    loaded: Loaded, name: str, steps: int, capsys: pytest.CaptureFixture[str], *, say: bool
) -> None:
    prompt = prompts()[name]
    difference = check_prompt(loaded, prompt)
    check_first_step(loaded, prompt)
    forced = forced_differences(loaded, prompt, steps)
    equal = check_stream(loaded, prompt, steps)
    if say or forced or equal < steps:
        gaps = ", ".join(f"{step} (margin {prompt['top2_margin'][step]:.4f})" for step in forced)
        with capsys.disabled():
            print(
                f"\n{name} at {loaded.setting.precision}: log-probabilities within "
                f"{difference:.1e}; teacher-forced steps that differ: {gaps or 'none'}; "
                f"free-running equal for {equal} of {steps}"
            )


@pytest.mark.parametrize("name", SHORT)
def test_short(loaded: Loaded, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(loaded, name, STEPS, capsys, say=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_full(loaded: Loaded, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All prompts, all 64 tokens."""
    check(loaded, name, 64, capsys, say=True)


@pytest.mark.parametrize("name", NAMES)
def test_prompt_ids(loaded: Loaded, name: str) -> None:
    """Text and messages become the golden's ids, whatever the weights."""
    assert prompt_ids(loaded.llm, prompts()[name]) == prompts()[name]["prompt_ids"]


def test_a_chat_answer(loaded: Loaded) -> None:
    """The capital of France, ended by the model's own end token, as text."""
    out = loaded.llm.chat(prompts()["capital"]["messages"], max_tokens=32)
    assert out.text == "The capital of France is Paris." and out.finish_reason == "stop"
    end = prompts()["capital"]["greedy_ids"].index(2)
    assert list(out.token_ids) == prompts()["capital"]["greedy_ids"][: end + 1]


def test_stop_strings(loaded: Loaded) -> None:
    ids = prompts()["capital"]["prompt_ids"]
    out = loaded.llm.generate(ids, max_tokens=32, stop=[" France"])
    assert out.text == "The capital of" and out.finish_reason == "stop"
    pieces = list(loaded.llm.stream(ids, max_tokens=32, stop=["is Par", "never"]))
    assert "".join(piece.text for piece in pieces) == "The capital of France "
    assert pieces[-1].finish_reason == "stop"
