"""ONNX exports on a device: every decoder gives its golden's tokens and logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hornito
from hornito.api import LLM
from hornito.package import open_package
from hornito.runtime.session import Session
from onnx_samples import NAMES, QUANTISED, Expected, expected, unpack
from tiny import poison_blocks

pytest.importorskip("onnx")
pytestmark = pytest.mark.gpu

CONTEXT = 128


@pytest.fixture(scope="module", params=NAMES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, Expected]]:
    folder = tmp_path_factory.mktemp(request.param)
    package = folder / "model.vxm"
    hornito.compile_source(unpack(request.param, folder), package, weights="fp32")
    with hornito.load(package, precision="high", context=CONTEXT) as llm:
        poison_blocks(llm.engine)  # slots that nothing has written are never read
        llm.engine.poison_activations()
        yield llm, expected(request.param)


def test_logits_of_the_prompt(case: tuple[LLM, Expected]) -> None:
    llm, golden = case
    with Session(llm.engine) as session:
        logits = session.prefill_logits(golden.prompt)
    assert golden.error(logits) <= golden.tolerance


def test_32_tokens(case: tuple[LLM, Expected]) -> None:
    llm, golden = case
    out = llm.generate(golden.prompt, max_tokens=32, ignore_eos=True)
    assert list(out.token_ids) == golden.tokens


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_files_stay_quantised(name: str, tmp_path: Path) -> None:
    """By default their blocks are kept: the same numbers in 4 bits, the same answers."""
    package = tmp_path / "model.vxm"
    hornito.compile_source(unpack(name, tmp_path), package)
    golden = expected(name)
    with open_package(package) as opened:
        assert opened.manifest.quant["weights"] == "keep"
        assert opened.manifest.quant["formats"]["int4"]["matrices"] >= 12
    with hornito.load(package, precision="high", context=CONTEXT) as llm:
        with Session(llm.engine) as session:
            assert golden.error(session.prefill_logits(golden.prompt)) <= golden.tolerance
        out = llm.generate(golden.prompt, max_tokens=32, ignore_eos=True)
    assert list(out.token_ids) == golden.tokens


def test_every_node_is_in_the_package_report(tmp_path: Path) -> None:
    package = tmp_path / "model.vxm"
    hornito.compile_source(unpack("qwen2-tiny", tmp_path), package)
    with open_package(package) as opened:
        support = opened.manifest.support
    assert support["verdict"] == "SUPPORTED"
    assert support["summary"]["source_nodes"] == len(support["source_nodes"]) == 874
    assert {row["backend"] for row in support["source_nodes"] if row["raised_into"]} == {"vulkan"}
    kernels = {kernel for row in support["source_nodes"] for kernel in row["kernels"]}
    assert {"embedding", "attention", "head"} <= kernels


def test_a_directory_and_its_export_are_one_plan(tmp_path: Path) -> None:
    """The same package but for names of source nodes: bit for bit the same logits."""
    from onnx_samples import checkpoint

    ids = expected("qwen3-tiny").prompt
    logits = []
    for i, source in enumerate((checkpoint("qwen3-tiny"), unpack("qwen3-tiny", tmp_path))):
        package = tmp_path / f"{i}.vxm"
        hornito.compile_source(source, package, weights="fp32")
        with (
            hornito.load(package, precision="high", context=CONTEXT) as llm,
            Session(llm.engine) as session,
        ):
            logits.append(session.prefill_logits(ids))
    assert np.array_equal(logits[0], logits[1])
