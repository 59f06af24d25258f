"""A software driver of another version: its own compiler, its own faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hornito.vk.device import list_devices
from tree import ROOT, without_pytest

SCRIPT = ROOT / "scripts" / "check_stock_mesa.sh"
OLD = "Mesa 22.3"
CHOSEN = "every_prompt_row or 32_tokens or precision or two_at_a_time"
"""Tests of test_tiny_llama.py that take every kernel in every bucket; others have no more."""


def debian_12() -> bool:
    release = Path("/etc/os-release")
    return release.exists() and 'VERSION_ID="12"' in release.read_text(encoding="utf-8")


@pytest.mark.gpu
@pytest.mark.software
@pytest.mark.skipif(not debian_12(), reason="the other driver is Debian 12's own Mesa")
def test_d18_two_mesa_versions_give_the_reference_tokens() -> None:
    """Every kernel that a tiny model takes there compiles and computes, in all its buckets.

    scripts/check_stock_mesa.sh runs all device tests there, when it is called by hand.
    """
    here = [device.driver_info for device in list_devices() if device.kind == "software"]
    if any(OLD in info for info in here):
        pytest.skip("this is the other driver")
    unpacked = any(ROOT.glob(".cache/stock-mesa-*/icd.json"))
    if not unpacked and os.environ.get("HORNITO_REQUIRE_DEVICE") != "1":
        pytest.skip(f"{SCRIPT.name} fetches the driver (or HORNITO_REQUIRE_DEVICE=1)")
    environment = {
        **without_pytest(),
        "TESTS": "tests/e2e/test_tiny_llama.py",
        "PYTHON": sys.executable,
    }
    command = ["bash", str(SCRIPT), "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", CHOSEN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert OLD in done.stdout and " passed" in done.stdout and "skipped" not in done.stdout
