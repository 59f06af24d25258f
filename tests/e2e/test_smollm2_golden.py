"""SmolLM2-135M-Instruct from its published GGUF file, against transformers in fp32.

`high` (fp32 weights, activations and KV) is held to a near-tie margin of 1e-3 and log-probabilities
within 1e-3; `normal` (fp16 weights and KV) to a margin of 0.05, and where it differed is printed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hornito
from real_model import SETTINGS, Loaded, Setting, check, prompt_ids, prompts
from tiny import Compiled

pytestmark = [pytest.mark.gpu, pytest.mark.model]

MODEL = "smollm2-135m"
CONTEXT = 1024
#: Prompts whose evaluation takes seconds on two cores, and the steps looked at in the suite.
SHORT = {"high": ("completion", "code"), "normal": ("system", "code")}
STEPS = 8
NAMES = list(prompts(MODEL))


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: setting.precision)
def loaded(request: pytest.FixtureRequest, smollm2: Compiled) -> Iterator[Loaded]:
    setting: Setting = request.param
    package = smollm2(setting.weights)
    with hornito.load(package, precision=setting.precision, context=CONTEXT) as llm:
        yield Loaded(llm, setting)


@pytest.mark.parametrize(
    ("loaded", "name"),
    [
        pytest.param(setting, name, id=f"{setting.precision}-{name}")
        for setting in SETTINGS
        for name in SHORT[setting.precision]
    ],
    indirect=["loaded"],
)
def test_short(loaded: Loaded, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(loaded, prompts(MODEL)[name], STEPS, capsys, say=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_full(loaded: Loaded, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All prompts, all 64 tokens."""
    check(loaded, prompts(MODEL)[name], 64, capsys, say=True)


@pytest.mark.parametrize("name", NAMES)
def test_prompt_ids(loaded: Loaded, name: str) -> None:
    """Text and messages become the golden's ids, whatever the weights."""
    assert prompt_ids(loaded.llm, prompts(MODEL)[name]) == prompts(MODEL)[name]["prompt_ids"]


def test_a_chat_answer(loaded: Loaded) -> None:
    """The capital of France, ended by the model's own end token, as text."""
    out = loaded.llm.chat(prompts(MODEL)["capital"]["messages"], max_tokens=32)
    assert out.text == "The capital of France is Paris." and out.finish_reason == "stop"
    end = prompts(MODEL)["capital"]["greedy_ids"].index(2)
    assert list(out.token_ids) == prompts(MODEL)["capital"]["greedy_ids"][: end + 1]


def test_stop_strings(loaded: Loaded) -> None:
    ids = prompts(MODEL)["capital"]["prompt_ids"]
    out = loaded.llm.generate(ids, max_tokens=32, stop=[" France"])
    assert out.text == "The capital of" and out.finish_reason == "stop"
    pieces = list(loaded.llm.stream(ids, max_tokens=32, stop=["is Par", "never"]))
    assert "".join(piece.text for piece in pieces) == "The capital of France "
    assert pieces[-1].finish_reason == "stop"
