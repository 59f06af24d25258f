"""tests/CHECKS.md names tests that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tree import ROOT

TABLE = (ROOT / "tests/CHECKS.md").read_text(encoding="utf-8")
REFERENCES = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE)


@pytest.mark.parametrize(("path", "name"), sorted(set(REFERENCES)))
def test_the_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_has_a_test() -> None:
    rows = [line for line in TABLE.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]
    assert len(rows) >= 14 and all("::test_" in row for row in rows)
