"""Hornito: runs decoder LLMs on any Vulkan GPU, from one compiled file, in pure Python.

    import hornito
    llm = hornito.load("model.vxm")
    print(llm.generate("Hello", max_tokens=32).text)

Names are imported when first used, so that `import hornito` stays cheap and touches no GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hornito.api import LLM as LLM
    from hornito.compiler import compile_source as compile_source
    from hornito.conversation import Conversation as Conversation
    from hornito.errors import HornitoError as HornitoError
    from hornito.loading import load as load
    from hornito.runtime.overflow import Overflow as Overflow
    from hornito.runtime.session import Session as Session
    from hornito.runtime.snapshot import Snapshot as Snapshot

__version__ = "0.1.0.dev0"

_LAZY = {
    "LLM": "hornito.api",
    "load": "hornito.loading",
    "compile_source": "hornito.compiler",
    "Conversation": "hornito.conversation",
    "HornitoError": "hornito.errors",
    "Overflow": "hornito.runtime.overflow",
    "Session": "hornito.runtime.session",
    "Snapshot": "hornito.runtime.snapshot",
}

__all__ = [
    "LLM",
    "Conversation",
    "HornitoError",
    "Overflow",
    "Session",
    "Snapshot",
    "__version__",
    "compile_source",
    "load",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'hornito' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
