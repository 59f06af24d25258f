"""Shared by all tests: validation layer on, kernels up to date, devices named in the header."""

from __future__ import annotations

import os
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from tree import ROOT, kernel_tool

BEGAN = time.monotonic()
BUDGET_SECONDS = 600
"""What a run of all tests that are not slow should take on a software device."""

LONGEST = (
    "ops/test_quants.py",
    "ops/test_attention.py",
    "ops/test_digits.py",
    "ops/test_linear.py",
    "runtime/test_compare.py",
    "e2e/test_smollm2_golden.py",
    "e2e/test_families.py",
    "vk/test_other_mesa.py",
    "cli/test_cli_documents.py",
)
"""Files that come first: a worker that began one of them last would work on alone."""


def validation_layer_installed() -> bool:
    """Whether the loader would find the Khronos validation layer."""
    folders = [Path(p) for p in os.environ.get("VK_LAYER_PATH", "").split(os.pathsep) if p]
    folders += [Path(p) for p in os.environ.get("VK_ADD_LAYER_PATH", "").split(os.pathsep) if p]
    shares = os.environ.get("XDG_DATA_DIRS", "/usr/local/share:/usr/share").split(os.pathsep)
    shares += ["/etc", str(Path.home() / ".local" / "share")]
    folders += [Path(share) / "vulkan" / "explicit_layer.d" for share in shares]
    return any((folder / "VkLayer_khronos_validation.json").is_file() for folder in folders)


@cache
def device_lines() -> tuple[tuple[str, ...], str]:
    """Usable devices as text, and the reason when there are none."""
    from hornito.errors import HornitoError

    try:
        from hornito.vk.device import list_devices

        devices = [device for device in list_devices() if device.usable]
    except HornitoError as error:
        return (), str(error)
    lines = tuple(f"{d.name} ({d.kind}), {d.driver_name} {d.driver_info}" for d in devices)
    return lines, "" if lines else "no usable Vulkan device"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    # Mesa's software device computes a dispatch of a tiny model in less time than it takes to hand
    # its workgroups to threads; workers of the suite share the processor anyway.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    if validation_layer_installed():
        os.environ.setdefault("HORNITO_VALIDATE", "1")


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines, reason = device_lines()
    validate = "on" if os.environ.get("HORNITO_VALIDATE") == "1" else "off"
    return [f"vulkan: {'; '.join(lines) or reason}", f"validation layer: {validate}"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says where the time went when a run took longer than the suite may on a software device."""
    seconds: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                seconds[file] = seconds.get(file, 0.0) + report.duration
    total = time.monotonic() - BEGAN
    if total > BUDGET_SECONDS:
        terminalreporter.section(f"{total:.0f} s, over the budget of {BUDGET_SECONDS} s")
        for file in sorted(seconds, key=lambda file: -seconds[file])[:10]:
            terminalreporter.write_line(f"{seconds[file]:6.0f} s {file}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run on demand only (--slow, or a -m expression that names them).

    GPU tests get built kernels. Without a device they are skipped, or fail where one is a must
    (HORNITO_REQUIRE_DEVICE=1, as scripts/test.sh sets it), so that nothing is skipped unseen.
    """
    if not config.getoption("--slow") and "slow" not in config.getoption("markexpr"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    places = {ROOT / "tests" / file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    lines, reason = device_lines()
    software = any("(software)" in line for line in lines)
    for item in gpu_items:
        if item.get_closest_marker("software") and lines and not software:
            item.add_marker(pytest.mark.skip(reason="no software device beside the GPU"))
        elif lines or os.environ.get("HORNITO_REQUIRE_DEVICE") == "1":
            # First in line: other fixtures of the test may load kernels already.
            item.fixturenames.insert(0, "kernels")  # type: ignore[attr-defined]
        else:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def kernels() -> None:
    """Compiles kernels that changed. A failed one has no SPIR-V, so the tests that use it fail by
    name; tests/unit/test_project_kernels.py holds the whole folder to compiling."""
    for message in kernel_tool().build(ROOT).errors:
        print(message, file=sys.stderr)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF, for tests marked `model`."""
    path = os.environ.get("HORNITO_TEST_SMOLLM2")
    if not path:
        pytest.skip("HORNITO_TEST_SMOLLM2 is not set (scripts/test.sh fetches the file)")
    return Path(path)


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M as GGUF, for tests marked `model`."""
    path = os.environ.get("HORNITO_TEST_GEMMA3")
    if not path:
        pytest.skip("HORNITO_TEST_GEMMA3 is not set (a GGUF file of Gemma 3 270M)")
    return Path(path)
