"""docs/models.md says what the code has."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

from hornito.graph.passes import ORDER
from hornito.importers import supported_model_types
from hornito.ops import registry
from tree import ROOT

PAGE = ROOT / "docs" / "models.md"


def tool() -> ModuleType:
    """tools/gen_tables.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "hornito_gen_tables", ROOT / "tools" / "gen_tables.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == tool().render(), "run python tools/gen_tables.py"


def test_every_name_has_a_row() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = {cell for row in rows for cell in re.findall(r"`([a-z0-9_]+)`", row)}
    assert set(supported_model_types()) | set(registry.names()) | set(ORDER) <= cells


def test_every_model_says_what_it_is() -> None:
    text = tool().models()
    for name in supported_model_types():
        row = next(line for line in text.splitlines() if f"| `{name}` |" in line)
        assert re.search(r"\| `\w+ForCausalLM` \|$|\| `\w+LMHeadModel` \|$", row), name
