"""Build hook: compiles the GLSL kernels to SPIR-V, for wheels and for editable installs alike."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def load_tool(root: Path) -> ModuleType:
    """Imports tools/build_kernels.py of the tree at `root` without putting tools/ on sys.path."""
    spec = importlib.util.spec_from_file_location(
        "hornito_build_kernels", root / "tools" / "build_kernels.py"
    )
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{root / 'tools' / 'build_kernels.py'} is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


class KernelBuildHook(BuildHookInterface[Any]):
    """Runs before the wheel is packed; `artifacts` in pyproject.toml adds what it made."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles all kernels; a kernel that doesn't compile fails the build."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        result = load_tool(root).build(root)
        if result.errors:
            raise RuntimeError("kernels don't compile:\n" + "\n".join(result.errors))
        build_data["pure_python"] = True
        build_data["tag"] = "py3-none-any"
