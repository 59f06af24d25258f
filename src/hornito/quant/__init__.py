"""Weight formats: how blocks of GGUF files become float32."""

from __future__ import annotations

from hornito.quant.ggml import (
    GGML_TYPE_NAMES,
    GGML_TYPES,
    BlockFormat,
    dequantise_rows,
    format_by_name,
)

__all__ = [
    "GGML_TYPES",
    "GGML_TYPE_NAMES",
    "BlockFormat",
    "dequantise_rows",
    "format_by_name",
]
