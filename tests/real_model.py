"""Checks of a real model against its golden: what transformers computes in fp32 for some prompts.

A golden has, for each prompt, the ids, the log-probability of every token, 64 greedy ids with their
top-2 margins, and the first step's twenty largest logits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from hornito.api import LLM
from hornito.runtime.decode import decode
from hornito.runtime.session import Session
from tiny import pending
from tree import ROOT


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
def prompts(model: str) -> dict[str, dict[str, Any]]:
    """The golden's prompts by name."""
    text = (ROOT / "tests" / "data" / f"{model}.golden.json").read_text()
    return {prompt["id"]: prompt for prompt in json.loads(text)["prompts"]}


def prompt_ids(llm: LLM, prompt: dict[str, Any]) -> list[int]:
    """Ids of the prompt's messages or text."""
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
    loaded: Loaded,
    prompt: dict[str, Any],
    steps: int,
    capsys: pytest.CaptureFixture[str],
    *,
    say: bool,
) -> None:
    """All of them, `steps` tokens far; what differed is printed, and with `say` what did not."""
    difference = check_prompt(loaded, prompt)
    check_first_step(loaded, prompt)
    forced = forced_differences(loaded, prompt, steps)
    equal = check_stream(loaded, prompt, steps)
    if say or forced or equal < steps:
        gaps = ", ".join(f"{step} (margin {prompt['top2_margin'][step]:.4f})" for step in forced)
        with capsys.disabled():
            print(
                f"\n{prompt['id']} at {loaded.setting.precision}: log-probabilities within "
                f"{difference:.1e}; teacher-forced steps that differ: {gaps or 'none'}; "
                f"free-running equal for {equal} of {steps}"
            )
