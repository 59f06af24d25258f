"""`hornito.diag.compare`: what is equal, what differs and where it begins, and who is guilty.

Faults are put into a pass, a kernel's launch and a weight; the comparison must find each, and name
nobody where nothing is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_samples import HF
from hornito.diag import compare_bench
from hornito.diag.compare import Comparison, compare
from hornito.diag.compare_bench import Settings, Workbench
from hornito.diag.compare_bisect import Bisection, bisect
from hornito.diag.compare_values import Tolerance, measure, storage_tolerance
from hornito.errors import ContextOverflowError, UsageError
from hornito.graph.graph import Graph
from hornito.graph.passes import merge_gate_up
from hornito.ops.base import Lowering
from hornito.plan.pins import matching
from hornito.plan.selftest import exempt
from hornito.vk.device import open_device
from lent import lent_devices
from tiny import Compiled, golden

DEVICE = os.environ.get("HORNITO_DEVICE")
EXACT = Settings(precision="high", kv_half=False, context=256, device=DEVICE, steps=3)
LLAMA = str(HF / "llama-tiny")
PROMPT = golden("llama-tiny").prompt


@pytest.fixture(scope="module", autouse=True)
def lent() -> Iterator[None]:
    """The comparisons share devices, pipelines and all."""
    with lent_devices(compare_bench):
        yield


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))


def compared(
    model: str = LLAMA,
    reference: str = "cpu",
    settings: Settings = EXACT,
    prompt: Sequence[int] | None = PROMPT,
) -> Comparison:
    with ExitStack() as stack:
        return compare(Workbench(stack, model, reference, prompt, settings))


def blamed(
    settings: Settings = EXACT, prompt: Sequence[int] = PROMPT[:6]
) -> tuple[Comparison, Bisection | None]:
    with ExitStack() as stack:
        bench = Workbench(stack, LLAMA, "cpu", prompt, settings)
        found = compare(bench)
        return found, bisect(bench, found.first) if found.first else None


# -- numbers ----------------------------------------------------------------------------------


def test_measures() -> None:
    want = np.array([[3.0, 4.0], [0.0, 1.0]])
    got = want + np.array([[0.0, 0.0], [0.0, 0.1]])
    found = measure("run", "x", got, want, Tolerance(0.2, 0.9))
    assert (found.position, found.first, found.equal) == (1, None, True)
    assert found.relative == pytest.approx(0.1) and found.max_abs == pytest.approx(0.1)
    assert found.cosine == pytest.approx((25 + 1.1) / np.sqrt(26 * (25 + 1.21)))
    assert measure("run", "x", got, want, Tolerance(0.05, 0.9)).first == 1
    assert measure("run", "x", got, want, Tolerance(0.2, 0.99999)).first == 1
    same = measure("run", "x", want, want, Tolerance(0, 1))
    assert same.equal and same.cosine == 1 and same.max_abs == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_differs(bad: float) -> None:
    want = np.array([[1.0, 2.0], [3.0, 4.0]])
    got = np.array([[1.0, 2.0], [bad, 4.0]])
    found = measure("run", "x", got, want, Tolerance(0.5, 0.1))
    assert found.first == 1 and found.relative == np.inf and found.to_dict()["relative"] is None
    assert measure("run", "x", want, got, Tolerance(0.5, 0.1)).first == 1
    assert measure("run", "x", got, got, Tolerance(0, 1)).equal


def test_a_row_of_zeros_is_not_divided_by() -> None:
    want = np.array([[1.0, 1.0], [0.0, 0.0]])
    assert measure("run", "x", want + 1e-9, want, Tolerance(1e-2, 0)).equal
    assert not measure("run", "x", want + 1e-6, want, Tolerance(1e-2, 0)).equal


def test_patterns() -> None:
    names = ["layer0.q", "layer1.q", "logits"]
    assert matching(["layer?.q", "log*"], names, "--dump") == names
    with pytest.raises(UsageError, match=r"--dump 'nothing\*' matches none of 3 names"):
        matching(["*", "nothing*"], names, "--dump")


def test_tolerances_follow_the_storage() -> None:
    found = [storage_tolerance([name]) for name in ("fp32", "fp16", "int8", "int4")]
    assert [t.relative for t in found] == sorted({t.relative for t in found})
    assert [t.cosine for t in found] == sorted({t.cosine for t in found}, reverse=True)
    assert storage_tolerance(["fp32", "int4"]) == found[-1]
    assert found[0].with_choice(0.1, None) == Tolerance(0.1, 0.9)
    assert found[0].with_choice(None, 0.5) == Tolerance(found[0].relative, 0.5)


# -- comparisons ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama-tiny", "gemma3-tiny", "gpt2-tiny"])
def test_b12_every_value_of_every_bucket_equals_the_reference(name: str) -> None:
    """Row B12 of the checks: the device against the evaluator, layer by layer."""
    found = compared(str(HF / name))
    assert found.equal and found.first is None
    assert [run.run for run in found.runs] == [
        *("step", "chunk 16", "chunk 64", "chunk 256", "prefill, step")
    ]
    labels = [value.value for value in found.runs[0].values]
    assert {"embedding", "layer0.cache.keys", "layer0.cache.values", "logits"} <= set(labels)
    assert labels[0] == "embedding" and labels[-1] == "logits"
    for run in found.runs:
        assert [value.value for value in run.values] == labels
        assert all(value.relative < 1e-3 and value.kernels for value in run.values)
        assert len(run.steps) == len(PROMPT) + 3
        assert all(step.got == step.want or step.margin < 1e-3 for step in run.steps)
        assert run.run == "step" or run.from_steps is not None
    assert found.only_model == []


@pytest.mark.gpu
def test_batches_are_among_the_runs() -> None:
    """Three sequences of a call; the bucket of four has a row that is not live."""
    found = compared(settings=replace(EXACT, slots=3, steps=1), prompt=PROMPT[:8])
    labels = [run.run for run in found.runs]
    assert found.equal and {"batch 2", "batch 4"} <= set(labels)
    kernels = {run.run: {v.value: v.kernels for v in run.values} for run in found.runs}
    with open_device(DEVICE) as device:
        software = exempt(device.caps)
    assert kernels["batch 4"]["logits"] and kernels["step"]["logits"]
    if software:  # a GPU may take one kernel for both
        assert kernels["batch 4"]["logits"] != kernels["step"]["logits"]


@pytest.mark.gpu
def test_a_call_longer_than_a_window_and_its_budget() -> None:
    """What the next call frees is compared like the rest."""
    ids = [3 + i * 37 % 400 for i in range(150)]
    found = compared(str(HF / "gemma3-tiny"), prompt=ids)
    assert found.equal and "chunk 256" in {run.run for run in found.runs}


@pytest.mark.gpu
def test_tokens_are_the_references() -> None:
    found = compared()
    expected = golden("llama-tiny")
    assert list(found.ids) == [*expected.prompt, *expected.tokens[:3]]
    wanted = [step.want for step in found.runs[0].steps[-4:]]
    assert wanted == expected.tokens[:4]


@pytest.mark.gpu
def test_half_precision_is_within_its_tolerance_and_beyond_the_exact_one() -> None:
    normal = replace(EXACT, precision="normal", kv_half=True)
    assert compared(settings=normal).equal
    found = compared(settings=replace(normal, relative=1e-6))
    assert found.first is not None and found.first.value == "layer0.cache.keys"


@pytest.mark.gpu
def test_values_in_fp16_are_within_their_tolerance_and_a_rounding_of_their_own() -> None:
    low = replace(EXACT, precision="low")
    assert compared(settings=low).equal
    found, blame = blamed(replace(low, relative=1e-5))
    assert found.first is not None and found.first.value == "layer0.q_rope"
    assert blame is not None
    assert [str(s) for s in blame.culprits] == ["rounding: values stored as fp16"]


@pytest.mark.gpu
def test_a_package_says_that_its_passes_ran(compiled: Compiled) -> None:
    package = str(compiled("llama-tiny"))
    found = compared(package)
    assert found.equal and "after passes" in found.notes[0]
    assert found.only_reference == []
    with pytest.raises(UsageError, match="its passes ran when it was compiled"):
        compared(package, settings=replace(EXACT, disabled_passes=("merge_qkv",)))


@pytest.mark.gpu
def test_another_file_on_either_backend(compiled: Compiled) -> None:
    package = str(compiled("llama-tiny"))
    for backend in ("cpu", "vulkan"):
        found = compared(LLAMA, package, replace(EXACT, ref_backend=backend), PROMPT[:6])
        assert found.equal and found.reference == package
    with pytest.raises(UsageError, match=r"not the same model|outside the vocabulary"):
        compared(LLAMA, str(compiled("llama3-tiny")))


def test_the_evaluator_on_both_sides_needs_no_device() -> None:
    settings = replace(EXACT, backend="cpu", weights="int8", ref_weights="fp32")
    found = compared(LLAMA, LLAMA, settings)
    assert [run.run for run in found.runs] == ["cpu"] and found.device == "cpu"
    assert found.equal and 0 < max(v.relative for v in found.runs[0].values) < 0.2
    exact = compared(LLAMA, "cpu", replace(settings, weights="fp32", ref_weights=None))
    assert max(value.relative for value in exact.runs[0].values) < 1e-12


@pytest.mark.gpu
def test_passes_that_are_off_leave_every_value() -> None:
    passes = ("merge_qkv", "merge_gate_up", "residual_in_linear")
    found = compared(settings=replace(EXACT, disabled_passes=passes))
    labels = {value.value for value in found.runs[0].values}
    assert found.equal and {"layer0.k_rope", "layer1.mlp.gate", "layer1.o"} <= labels


@pytest.mark.gpu
def test_dumps(tmp_path: Path) -> None:
    dumps = (("layer1.attention*", str(tmp_path / "out")),)
    found = compared(settings=replace(EXACT, dumps=dumps), prompt=PROMPT[:6])
    files = {Path(path).name for path in found.dumped}
    assert {"layer1.attention.step.npy", "layer1.attention.reference.npy"} <= files
    got = np.load(tmp_path / "out/layer1.attention.chunk-16.npy")
    want = np.load(tmp_path / "out/layer1.attention.reference.npy")
    assert got.shape == want.shape and got.shape[0] == len(found.ids)
    np.testing.assert_allclose(got, want, atol=1e-4)
    with pytest.raises(UsageError, match="--dump 'layer9"):
        compared(settings=replace(EXACT, backend="cpu", dumps=(("layer9.*", str(tmp_path)),)))


@pytest.mark.gpu
def test_pins() -> None:
    pinned = replace(EXACT, fp32_tensors=("layer1.mlp*", "*embed_tokens.weight"))
    names = compared(settings=pinned, prompt=PROMPT[:3]).pinned
    assert "layer1.mlp.gated" in names and "embedding" in names
    assert not any(name.startswith("layer0") for name in names)
    with pytest.raises(UsageError, match="--fp32-tensors 'layer9"):
        compared(settings=replace(EXACT, backend="cpu", fp32_tensors=("layer9.*",)))


def test_what_does_not_fit_is_said() -> None:
    cpu = replace(EXACT, backend="cpu")
    with pytest.raises(ContextOverflowError, match="exceed the context of 16"):
        compared(settings=replace(cpu, context=16))
    with pytest.raises(UsageError, match="token id 512 is outside the vocabulary of 512"):
        compared(settings=cpu, prompt=[512])
    with pytest.raises(UsageError, match="the prompt is empty"):
        compared(settings=cpu, prompt=[])
    with pytest.raises(UsageError, match="--ref cpu has the model's own weights"):
        compared(settings=replace(cpu, ref_weights="fp32"))
    with pytest.raises(UsageError, match="--ref cpu runs on the numpy evaluator"):
        compared(settings=replace(cpu, ref_backend="vulkan"))


# -- faults -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_nobody_is_guilty_when_nothing_is_wrong() -> None:
    found, blame = blamed()
    assert found.equal and found.first is None and blame is None


@pytest.mark.gpu
def test_a_wrong_pass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up change places: what `merge_gate_up` must never do."""
    right = merge_gate_up.interleave_weights

    def swapped(graph: Graph, parts: Sequence[Any], name: str) -> tuple[str, str]:
        return right(graph, parts[::-1], name)

    monkeypatch.setattr(merge_gate_up, "interleave_weights", swapped)
    found, blame = blamed()
    assert found.first is not None and found.first.value == "layer0.mlp.gated"
    assert found.first.op == "gated_linear" and found.first.first == 0
    assert blame is not None and [str(s) for s in blame.culprits] == ["pass merge_gate_up"]
    assert {"pass merge_qkv", "pass merge_gate_up"} <= {str(s) for s in blame.tried}


def spoil(monkeypatch: pytest.MonkeyPatch, *stems: str) -> None:
    """Launch kernels whose names begin so with half the grid: what they leave out is NaN."""
    right = Lowering.emit

    def wrong(self: Lowering, node: Any, kernel: str, *args: Any, **keywords: Any) -> None:
        push, values, (x, y, z) = args
        if kernel.startswith(stems):
            x = max(1, x // 2)
        right(self, node, kernel, push, values, (x, y, z), **keywords)

    monkeypatch.setattr(Lowering, "emit", wrong)


@pytest.fixture
def unproved(kernels: None) -> None:
    """A device whose kernels are taken without a self-test; others drop the spoilt one at load."""
    with open_device(DEVICE) as device:
        if not exempt(device.caps):
            pytest.skip("the self-test of this device drops wrong kernels")


@pytest.mark.gpu
def test_a_wrong_kernel_is_named(unproved: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only single steps take the kernel, so only they differ; the pass that leads to the op is not
    blamed for it."""
    spoil(monkeypatch, "linear/words.gated")
    found, blame = blamed()
    assert found.first is not None and found.first.run == "step"
    assert found.first.value == "layer0.mlp.gated"
    assert any(name.startswith("linear/words.gated") for name in found.first.kernels)
    chunks = [run for run in found.runs if run.run.startswith("chunk")]
    assert chunks and all(value.equal for run in chunks for value in run.values)
    assert blame is not None and len(blame.culprits) == 1
    assert str(blame.culprits[0]).startswith("kernel linear/words.gated")
    assert "pass merge_gate_up" in {str(s) for s in blame.alone}


@pytest.mark.gpu
def test_two_wrong_kernels_are_named_together(
    unproved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither helps alone: the other one is still there, or takes its place."""
    spoil(monkeypatch, "linear/words.", "linear/broadcast.")
    _, blame = blamed()
    assert blame is not None and blame.alone == () and blame.verdict.count(" and ") >= 1
    kernels = {str(s) for s in blame.culprits}
    assert any("linear/words." in k for k in kernels)
    assert any("linear/broadcast." in k for k in kernels)
    assert not any(k.startswith("pass") for k in kernels)


@pytest.mark.gpu
def test_a_rounding_is_named() -> None:
    normal = replace(EXACT, precision="normal", kv_half=True, relative=1e-5)
    _, blame = blamed(normal)
    assert blame is not None
    assert [str(s) for s in blame.culprits] == ["rounding: keys and values in fp16"]


@pytest.mark.gpu
def test_what_no_switch_reaches_is_blamed_on_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "rms_norm/")
    found, blame = blamed(prompt=PROMPT)  # more rows than half a bucket
    assert found.first is not None and found.first.value == "layer0.q_rope"
    assert blame is not None and blame.culprits == ()
    assert "what is left is what all of them share" in blame.verdict
