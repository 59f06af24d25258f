"""Kernels that join sums by shuffles, in wider subgroups than the software device usually has."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hornito.vk.device import list_devices
from tree import ROOT, without_pytest

BITS, SUBGROUP = 512, 16
"""Width of Mesa's software device, which may differ from the processor's, and what comes of it."""

FILES = ("test_digits.py", "test_attention.py")
"""Integer dot products, and attention, whose prompts (`chunk`) take other kernels."""

SIZE = """
from hornito.vk.device import open_device

with open_device("software") as device:
    caps = device.caps
    print(caps.subgroup_min, caps.subgroup_size, caps.subgroup_max)
"""


def python(environment: Mapping[str, str], *arguments: str) -> str:
    """What Python prints in the source tree."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(environment), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.software
def test_one_row_with_subgroups_of_sixteen(tmp_path: Path) -> None:
    """Groups of sixteen threads lie in one subgroup, and those of eight share one."""
    if not any("llvmpipe" in device.name for device in list_devices()):
        pytest.skip("the width of another software device can't be chosen")
    environment = {
        **without_pytest(),
        "LP_NATIVE_VECTOR_WIDTH": str(BITS),
        "HORNITO_DEVICE": "software",
        "HORNITO_CACHE": str(tmp_path),
    }
    assert python(environment, "-c", SIZE).split() == [str(SUBGROUP)] * 3
    files = (str(ROOT / "tests" / "ops" / name) for name in FILES)
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist")
    told = python(environment, "-m", "pytest", "-q", *plugins, "-k", "not chunk", *files)
    summary = told.splitlines()[-1]
    assert re.match(r"\d+ passed", summary) and "skipped" not in summary, told[-2000:]
