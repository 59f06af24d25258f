"""SmolLM2 from the blocks of its own file (Q4_1, and Q8_0 for the table), against its golden.

The golden is transformers in fp32 on the numbers that the blocks stand for, so `high` is held to
what fp32 weights are held to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hornito
from hornito.package import open_package
from real_model import Loaded, Setting, check, check_first_step, check_prompt, check_stream, prompts
from tiny import Compiled

pytestmark = [pytest.mark.gpu, pytest.mark.model]

MODEL = "smollm2-135m"
HIGH = Setting("high", "keep", margin=1e-3, tolerance=1e-3)


@pytest.fixture(scope="module")
def loaded(smollm2: Compiled) -> Iterator[Loaded]:
    with hornito.load(smollm2("keep"), precision="high", context=1024) as llm:
        yield Loaded(llm, HIGH)


@pytest.mark.parametrize("name", ("completion", "code", "system"))
def test_kept_blocks_follow_the_golden(
    loaded: Loaded, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(loaded, prompts(MODEL)[name], 8, capsys, say=False)
    assert check_stream(loaded, prompts(MODEL)[name], 8) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", list(prompts(MODEL)))
def test_whole_streams(loaded: Loaded, name: str) -> None:
    """All prompts, all 64 tokens."""
    prompt = prompts(MODEL)[name]
    check_prompt(loaded, prompt)
    check_first_step(loaded, prompt)
    assert check_stream(loaded, prompt, 64) == 64


def test_the_package_is_no_larger_than_the_file(smollm2: Compiled, smollm2_gguf: Path) -> None:
    """Blocks are kept by default, the tied table once, and nothing takes more bits."""
    with open_package(smollm2("keep")) as package:
        formats = package.manifest.quant["formats"]
        assert {name: entry["bits"] for name, entry in formats.items()} == {
            "int4m": 5.0,
            "int8": 8.5,
        }
        assert sum("embed_tokens" in name for name in package.tensors) == 1
        assert "lm_head.weight" not in package.tensors
        assert package.size < smollm2_gguf.stat().st_size + 200_000
