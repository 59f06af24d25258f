"""The source tree that the tests run in, and its tools as modules."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@cache
def load_tool(name: str) -> ModuleType:
    """tools/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"hornito_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def kernel_tool() -> ModuleType:
    """tools/build_kernels.py as a module."""
    return load_tool("build_kernels")


def without_pytest() -> dict[str, str]:
    """The environment of a process that runs tests of its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


@contextmanager
def own_cache(folders: pytest.TempPathFactory) -> Iterator[Path]:
    """Hornito's cache in a new folder, so that tests meet nothing that others left there."""
    folder = folders.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HORNITO_CACHE", str(folder))
        yield folder
