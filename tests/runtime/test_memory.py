"""Memory: what was planned is what is held, and what does not fit is refused with numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hornito
from hornito.cli.main import main
from hornito.errors import ContextOverflowError, DeviceMemoryError, size_text
from hornito.package import open_package
from hornito.runtime.overflow import room_advice
from hornito.runtime.session import Session
from hornito.vk.device import Device, _open_devices
from tiny import NAMES, Compiled, answer, open_engine, random_ids, write_llama

pytestmark = pytest.mark.gpu


def by_purpose(device: Device) -> dict[str, int]:
    """The device's report with the pools of all kinds added up."""
    report: dict[str, int] = {}
    for label, size in device.memory_report().items():
        purpose = "kv" if label.startswith("kv") else label
        report[purpose] = report.get(purpose, 0) + size
    return report


LOW = {"half_values": True, "kv_half": True}
"""As precision `low` stores values, whose kernels other tests compile as well."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "options",
    [
        {"context": 512},
        {"context": 1},
        {"context": 100, "slots": 3, "kv_half": True},
        {"context": 512, "slots": 4, "guard": 256, "eos_ids": (1, 2, 3)},
        {"context": 65, "head_tile_ids": 1024, "chunk_rows": (16,), **LOW},
    ],
    ids=["512", "1", "slots", "guard", "tiles"],
)
def test_planned_is_allocated(
    device: Device, compiled: Compiled, name: str, weights: str, options: dict[str, Any]
) -> None:
    """To the byte: every item is planned with the alignment that it gets. (A driver may round
    whole buffers up, at the end only; none of the known ones does beyond the 256 bytes planned.)
    """
    assert device.memory_report() == {} and device.allocated_bytes == 0
    with open_engine(device, compiled(name, weights), **options) as engine:
        memory = engine.memory
        assert by_purpose(device) == {
            "weights": memory.weights,
            "kv": memory.kv,
            "activations": memory.activations,
            "state": memory.state,
            "readback": memory.readback,
        }
        assert device.allocated_bytes == memory.total
        count = min(engine.context, 40)
        with Session(engine) as session:
            session.prefill(random_ids(count, seed=1))
            session.logits()
        # Staging memory and the like are gone again, and running needs nothing more.
        assert device.allocated_bytes == memory.total
    assert device.memory_report() == {} and device.allocated_bytes == 0


def test_fifty_engines_leave_nothing(device: Device, compiled: Compiled) -> None:
    package = compiled("llama3-tiny")
    prompt = random_ids(20, seed=2)
    for _ in range(50):
        with open_engine(device, package, context=64) as engine:
            answer(engine, prompt, 2)
    assert device.allocated_bytes == 0


def test_weights_are_uploaded_once(
    device: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied table too; the bytes on the device are those of the package."""
    sent: list[int] = []
    plain = device.upload

    def counting(pairs: Any, progress: Any = None) -> None:
        def note(pair: Any) -> Any:
            sent.append(memoryview(pair[2]).nbytes)
            return pair

        plain((note(pair) for pair in pairs), progress)

    monkeypatch.setattr(device, "upload", counting)
    for name, tied in (("llama-tiny", True), ("llama3-tiny", False)):
        sent.clear()
        with open_engine(device, compiled(name)) as engine:
            names = engine.plan.weight_bytes
            assert ("lm_head.weight" in names) is not tied
            table = names["model.embed_tokens.weight"]
            assert table == 512 * (72 if tied else 64) * 4
            assert sent.count(table) == (1 if tied else 2)  # the head of the other is as large
            for weight, size in names.items():
                buffer, offset = engine._weights[weight]
                assert len(device.download(buffer, offset, size)) == size


def test_weights_on_the_device_are_those_of_the_package(device: Device, compiled: Compiled) -> None:
    path = compiled("llama-tiny", "fp16")
    with open_engine(device, path) as engine, open_package(path) as package:
        for weight, size in engine.plan.weight_bytes.items():
            buffer, offset = engine._weights[weight]
            assert device.download(buffer, offset, size) == bytes(package.tensor(weight)), weight


@pytest.fixture
def small_heap(device: Device, monkeypatch: pytest.MonkeyPatch) -> int:
    """The shared device pretends to have 2 MB left."""
    free = 2_000_000
    monkeypatch.setattr(
        type(device),
        "heap_budget",
        lambda self: (max(0, free - self.allocated_bytes), 8_000_000),
    )
    return free


def test_too_large_a_plan_allocates_nothing(
    device: Device, compiled: Compiled, small_heap: int
) -> None:
    with (
        pytest.raises(DeviceMemoryError) as caught,
        open_engine(device, compiled("llama-tiny"), context=4096),
    ):
        raise AssertionError("it was loaded")
    error = caught.value
    assert error.available == small_heap and error.needed > small_heap
    message = str(error)
    for part in (
        f"needs {size_text(error.needed)}",
        f"{size_text(small_heap)} left",
        "weights 648,960 bytes",
        "KV ",
    ):
        assert part in message
    assert "context below 4096 (--context), or keep the KV cache in fp16" in message
    assert device.allocated_bytes == 0 and device.memory_report() == {}


@pytest.mark.parametrize("label", ["weights", "activations", "kv0", "state", "readback"])
def test_a_failed_allocation_frees_the_others(
    device: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    """Another program took the memory between the check and the allocation."""
    plain = device.allocate

    def allocate(size: int, kind: Any, name: str) -> Any:
        if name == label:
            raise DeviceMemoryError("taken", needed=size, available=0)
        return plain(size, kind, name)

    monkeypatch.setattr(device, "allocate", allocate)
    with (
        pytest.raises(DeviceMemoryError, match="taken"),
        open_engine(device, compiled("llama-tiny")),
    ):
        raise AssertionError("it was loaded")
    assert device.allocated_bytes == 0


def test_a_failed_pipeline_frees_everything(
    device: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, name: str, **__: Any) -> Any:
        raise RuntimeError(f"no {name} today")

    monkeypatch.setattr(device, "pipeline", refuse)
    with pytest.raises(RuntimeError, match="today"), open_engine(device, compiled("llama-tiny")):
        raise AssertionError("it was loaded")
    assert device.allocated_bytes == 0


# -- through the interface and the command line -----------------------------------------------


def test_a_context_that_was_asked_for_is_never_shortened(compiled: Compiled) -> None:
    """10^12 positions of 864 bytes fit no machine."""
    before = set(_open_devices)
    with pytest.raises(DeviceMemoryError) as caught:
        hornito.load(compiled("llama-tiny"), precision="high", context=10**12)
    assert caught.value.needed > 10**12 * 576
    assert caught.value.exit_code == 5
    assert f"context below {10**12} (--context)" in str(caught.value)
    assert set(_open_devices) == before


def test_the_command_line_says_it_in_one_line(
    compiled: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    package = str(compiled("llama-tiny"))
    command = ["run", package, "--ids", "1,2,3", "--context", "999999999999"]
    assert main(command) == 5
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if "error" in line]
    assert line.startswith("hornito: error: the plan needs ")
    assert "left. What helps: load with a context" in line


def test_a_default_context_is_shortened_to_what_fits(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "hf", vocabulary=300)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["max_position_embeddings"] = 1 << 20
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    hornito.compile_source(tmp_path / "hf", tmp_path / "m.vxm", weights="fp32")
    with hornito.load(tmp_path / "m.vxm", precision="high", context=64) as llm:
        free = llm.engine.memory.total + 12_000_000
    monkeypatch.setattr(Device, "heap_budget", lambda self: (free - self.allocated_bytes, 2 * free))
    with hornito.load(tmp_path / "m.vxm", precision="high") as llm:
        assert llm.engine.memory.total <= 0.95 * free
        assert llm.context % 64 == 0 and 64 <= llm.context < 1 << 20
        # Twice as much would not have fitted.
        assert llm.engine.memory.total + llm.engine.memory.kv > 0.95 * free
        assert f"context: {llm.context} positions" in llm.plan_summary()
        tokens = llm.generate([5, 6, 7], max_tokens=5, ignore_eos=True).token_ids
        assert len(tokens) == 5
    free = 500_000
    with pytest.raises(DeviceMemoryError, match=r"at a context of 64; .* 475,000 bytes left"):
        hornito.load(tmp_path / "m.vxm", precision="high")


def test_an_item_beyond_one_allocation(
    device: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of llama-tiny has 147,456 bytes; KV blocks of the same device go into chunks."""
    small = replace(device.caps, max_allocation_bytes=100_000)
    monkeypatch.setattr(device, "caps", small)
    with (
        pytest.raises(DeviceMemoryError, match=r"weights: '.*' needs .* bytes, but .* allows"),
        open_engine(device, compiled("llama-tiny")),
    ):
        raise AssertionError("it was loaded")
    assert device.allocated_bytes == 0


def test_many_chunks_compute_the_same(
    device: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and KV spread over many allocations: other addresses, the same bits."""
    prompt = random_ids(150, seed=3)
    with open_engine(device, compiled("llama-tiny")) as engine:
        want = answer(engine, prompt, 20)
        whole = engine.memory
    # The readback of the records is the largest single item.
    small = replace(device.caps, max_allocation_bytes=1 << 20)
    monkeypatch.setattr(device, "caps", small)
    with open_engine(device, compiled("llama-tiny"), context=4096) as engine:
        assert len(engine.pools[0]._arena.buffers) > 1
        assert answer(engine, prompt, 20).bits() == want.bits()
        assert engine.memory.weights == whole.weights
        assert by_purpose(device)["kv"] == engine.memory.kv
    assert np.isfinite(want.last).all()


def test_a_context_above_the_models_is_a_warning(
    compiled: Compiled, kernels: None, caplog: pytest.LogCaptureFixture
) -> None:
    package = compiled("llama-tiny")
    with hornito.load(package) as llm:
        own = llm.context
        assert llm.context_warning == "" and "warning" not in llm.plan_summary()
        sizes = re.search(
            r"memory: ([\d.]+) MB \(weights ([\d.]+), KV ([\d.]+), activations ([\d.]+), "
            r"state and results ([\d.]+)\)",
            llm.plan_summary(),
        )
        assert sizes is not None
        total, *parts = map(float, sizes.groups())
        assert abs(total - sum(parts)) < 0.3
    caplog.clear()
    with hornito.load(package, context=own + 64) as llm:
        assert f"more than the {own} positions" in llm.context_warning
        assert f"warning: {llm.context_warning}" in llm.plan_summary()
        assert llm.context_warning in caplog.messages


def test_advice_is_only_what_helps(
    device: Device, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "heap_budget", lambda self: (1000, 5000))

    def refused(**options: Any) -> str:
        with (
            pytest.raises(DeviceMemoryError) as caught,
            open_engine(device, compiled("llama-tiny"), **options),
        ):
            raise AssertionError("it was loaded")
        return str(caught.value)

    half = refused(kv_half=True, context=256)
    assert "fp16" not in half and "context below 256 (--context)" in half and "slots" not in half
    full = refused(kv_half=False, slots=3, context=64)
    assert "--kv fp16, or kv='fp16'" in full and "context" not in full.split("What helps")[1]
    assert "fewer than 3 slots" in full and "has 1,000 bytes left" in full


def test_sizes_for_people() -> None:
    sizes = [999_999, 1_000_000, 812_600_000, 6_440_000_000]
    assert [size_text(size) for size in sizes] == ["999,999 bytes", "1.0 MB", "812.6 MB", "6.44 GB"]


def test_room_is_advised_up_to_the_models_own_maximum(compiled: Compiled, kernels: None) -> None:
    with hornito.load(compiled("llama-tiny"), context=64) as llm:
        most = llm.model_context
        assert (
            room_advice(llm.engine, 65)
            == "Load with a larger context (--context 128, or context=128)"
        )
        assert room_advice(llm.engine, most + 1) == (
            f"The model was made for {most} at most (--context {most}, or context={most})"
        )
        with pytest.raises(ContextOverflowError, match=r"--context 384.*--overflow truncate"):
            llm.generate([5] * 70)
    with hornito.load(compiled("llama-tiny")) as llm:
        assert room_advice(llm.engine, most + 1) == f"The model was made for {most} at most"
