"""The `.vxm` package: a safetensors file that holds a compiled model (docs/format.md)."""

from __future__ import annotations

from hornito.package.format import FORMAT_VERSION, Manifest, TensorInfo
from hornito.package.reader import Package, holds_package, is_package, open_package
from hornito.package.target import check_target
from hornito.package.writer import store_quality, write_package

__all__ = [
    "FORMAT_VERSION",
    "Manifest",
    "Package",
    "TensorInfo",
    "check_target",
    "holds_package",
    "is_package",
    "open_package",
    "store_quality",
    "write_package",
]
