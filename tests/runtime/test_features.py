"""Device features that are done without, known faults that are overridden, and what plans make."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hornito
from hornito.cli.main import main
from hornito.errors import UsageError
from hornito.ops.kernels import load_spirv
from hornito.vk.caps import Caps, CoopMat
from hornito.vk.device import open_device
from hornito.vk.quirks import FEATURES, without_features
from ops.spirv import parse
from tiny import Compiled, golden, open_engine


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path))
    yield


def subgroup_kernels(llm: hornito.LLM) -> set[str]:
    found = {d.kernel for d in llm.engine.plan.distinct()}
    return {
        name
        for name in found
        if any(c.startswith("GroupNonUniform") for c in parse(load_spirv(name)).capabilities)
    }


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
def test_d5_every_optional_feature_can_be_done_without(
    compiled: Compiled, kernels: None, feature: str
) -> None:
    wanted = golden("llama-tiny")
    package = compiled("llama-tiny")
    with hornito.load(package, context=64, precision="high", disable_features=[feature]) as llm:
        assert llm.engine.device.disabled == (feature,)
        flag = "no_coopmat" if feature == "cooperative_matrix" else f"no_{feature}"
        assert flag in llm.feature_line
        answer = llm.generate(wanted.prompt, max_tokens=8, ignore_eos=True)
        assert list(answer.token_ids) == wanted.tokens[:8]
        if feature == "subgroups":
            assert not subgroup_kernels(llm)


@pytest.mark.gpu
def test_d5_on_the_command_line(
    compiled: Compiled,
    kernels: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HORNITO_DISABLE_FEATURE", "float16")
    wanted = golden("llama-tiny")
    command = ["run", str(compiled("llama-tiny")), "--ids", ",".join(map(str, wanted.prompt))]
    command += ["--max-tokens", "4", "--context", "64", "--stats", "--submission-ms", "50"]
    assert main([*command, "--disable-feature", "subgroups", "--recover", "--tune", "off"]) == 0
    found = capsys.readouterr()
    assert "no_float16" in found.err and "no_subgroups" in found.err
    for bad in (["--disable-feature", "magic"], ["--submission-ms", "0"], ["--tune", "hard"]):
        assert main([*command, *bad]) == 2


def test_features_are_taken_from_the_caps() -> None:
    caps = Caps.parse(
        {
            "subgroupSize": 32,
            "subgroupSupportedStages": 32,
            "subgroupSupportedOperations": 255,
            "shaderFloat16": 1,
            "shaderIntegerDotProduct": 1,
        }
    )
    assert without_features(caps, ()) is caps
    assert not without_features(caps, ["float16"]).has_float16
    assert not without_features(caps, ["dot_product"]).has_dot_product
    bare = without_features(caps, ["subgroups"])
    assert not bare.subgroup_ops and not bare.has_full_subgroups
    with_matrices = Caps.parse(
        {"cooperativeMatrix": 1, "cooperativeMatrices": [(16, 16, 16, 0, 0, 1, 1, 0, 3)]}
    )
    assert isinstance(with_matrices.coopmat[0], CoopMat)
    assert without_features(with_matrices, ["cooperative_matrix"]).coopmat == ()


@pytest.mark.parametrize(
    "keywords",
    [
        {"disable_features": ["magic"]},
        {"submission_ms": 0},
        {"submission_ms": -1.0},
        {"tune": "hard"},
    ],
)
def test_bad_arguments(compiled: Compiled, keywords: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        hornito.load(compiled("llama-tiny"), **keywords)


@pytest.mark.gpu
def test_c13_no_pipeline_is_made_that_the_plan_does_not_use(
    compiled: Compiled, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_device() as device:
        made = 0
        create = device.vk.vkCreateComputePipelines

        def count(*arguments: Any) -> int:
            nonlocal made
            made += 1
            code: int = create(*arguments)
            return code

        monkeypatch.setattr(device.vk, "vkCreateComputePipelines", count)
        with open_engine(device, compiled("llama-tiny"), context=64) as engine:
            used = {d.pipeline_key for d in engine.plan.distinct()}
            assert engine.pipeline_count == len(used)
            if engine.trust.exempt:  # elsewhere twins are made for the self-test
                assert made == len(used)
    with hornito.load(compiled("llama-tiny"), context=64) as llm:
        assert re.search(rf"{llm.engine.pipeline_count} pipelines", llm.plan_summary())


LOAD = """
import json, re, sys
import hornito
from hornito.diag.bench import anonymous_bytes

def peak():
    found = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())
    return int(found[1]) * 1024

before = anonymous_bytes()
if before is None:
    sys.exit("this system does not tell")
most = peak()
with hornito.load(sys.argv[1], context=64) as llm:
    grown = anonymous_bytes() - before, peak() - most
    print(json.dumps([*grown, llm.engine.memory.total]))
"""


@pytest.mark.gpu
def test_c14_loading_takes_no_host_memory_of_its_own(kernels: None, tmp_path: Path) -> None:
    """Beside the package's own pages, neither at the end nor at any time before: a second copy of
    the weights would show. On a software device, whose memory is the host's, the plan's bytes are.
    """
    from hornito.diag import random_model

    package = tmp_path / "model.vxm"
    monkey = pytest.MonkeyPatch()
    monkey.setitem(random_model.SHAPES, "wide", (256, 640, 1, 4, 2, 120000, False))
    size = random_model.write_random_model("wide", package, weights="fp32", context=512)
    monkey.undo()
    assert size > 240e6
    command = [sys.executable, "-c", LOAD, str(package)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "does not tell" in done.stderr:
        pytest.skip("this system does not tell")
    assert done.returncode == 0, done.stderr
    grown, most, planned = json.loads(done.stdout)
    with open_device() as device:
        held = planned if device.info.kind == "software" else 0
    driver = 160e6  # its libraries and compiled pipelines
    assert grown < held + driver
    assert most < held + size + driver
