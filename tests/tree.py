"""The source tree that the tests run in, and its build tool as a module."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


@cache
def kernel_tool() -> ModuleType:
    """tools/build_kernels.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "hornito_build_kernels", ROOT / "tools" / "build_kernels.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
