"""The names of precisions and of KV cache types, and how they go together."""

from __future__ import annotations

PRECISIONS = ("high", "normal", "low")
KV_TYPES = ("fp32", "fp16")


def default_kv(precision: str) -> str:
    """The KV cache type of a precision where nobody chooses one."""
    return "fp32" if precision == "high" else "fp16"
