"""Cold and warm starts, each in a process of its own, from `load` to the first token."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from hornito.errors import HornitoError

SCRIPT = """
import sys, time
began = time.perf_counter()
import hornito
with hornito.load(
    sys.argv[1], device=sys.argv[2] or None, context=int(sys.argv[3]), precision=sys.argv[4]
) as llm:
    next(iter(llm.stream([0], max_tokens=1, ignore_eos=True)))
    print(time.perf_counter() - began)
"""

DRIVER_CACHES = ("MESA_SHADER_CACHE_DIR", "__GL_SHADER_DISK_CACHE_PATH", "AMD_SHADER_CACHE_PATH")
"""Where drivers keep compiled shaders, by the variables that move it."""


def measure_starts(
    package: str | os.PathLike[str], *, device: str, context: int, precision: str
) -> tuple[float, float]:
    """Seconds of a start with empty pipeline and driver caches, and of one with what that left.

    Args:
        package: a compiled model; its weights are in the page cache or not, as they are.
        device: UUID of the device.

    Raises:
        HornitoError: a start failed; with the process's own words.
    """
    with tempfile.TemporaryDirectory(prefix="hornito-start-") as folder:
        environment = {**os.environ, "HORNITO_CACHE": folder}
        for name in DRIVER_CACHES:
            environment[name] = folder
        first, second = (
            _start([str(package), device, str(context), precision], environment) for _ in range(2)
        )
    return first, second


def _start(arguments: list[str], environment: dict[str, str]) -> float:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise HornitoError(f"a start in a process of its own failed: {last or done.returncode}")
    return float(done.stdout.strip().rpartition("\n")[2])
