"""docs/onnx-ops.md says what the code has."""

from __future__ import annotations

import importlib.util
import re

import onnx

from hornito.importers.onnx_generic.table import handlers
from tree import ROOT

PAGE = ROOT / "docs" / "onnx-ops.md"


def test_every_op_has_a_row() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == list(handlers()), "run python tools/gen_onnx_ops.py"


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location(
        "hornito_gen_onnx_ops", ROOT / "tools" / "gen_onnx_ops.py"
    )
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = PAGE.read_text()
    if f"onnx {onnx.__version__} " in text.replace("\n", " "):  # other releases have other tests
        assert text == tool.render(), "run python tools/gen_onnx_ops.py"
