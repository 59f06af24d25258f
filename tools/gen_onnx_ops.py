#!/usr/bin/env python3
"""Writes docs/onnx-ops.md: the ONNX ops that models of tensors may use, with their node tests.

The ops are those with a handler; the counts are of the ONNX project's node tests that
`tests/tensor/test_nodes.py` runs on a device. `--check` compares only (exit code 1 when they
differ).
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "onnx-ops.md"

INTRO = """\
# ONNX ops of models of tensors

This page is made by `tools/gen_onnx_ops.py` from the code; change that, not this. It lists what
[models of tensors](tensors.md) may use; decoders have [a page of their own](onnx.md). Anything else
is refused by name before any work is done.

Element types: {types}. Opsets: {first} to {last}.

Node tests are those of onnx {version} whose ops and element types are all listed here: {passed} of
{total} pass on a device, the others are below. A test of several ops counts for each of them.

"""


def render() -> str:
    """The whole page."""
    import onnx

    sys.path.insert(0, str(ROOT / "tests"))
    from hornito.importers.onnx_generic import OPSETS
    from hornito.importers.onnx_generic.table import TYPE_NAMES, handlers

    cases = importlib.import_module("tensor.node_tests")
    claimed, exceptions = cases.claimed(), cases.EXCEPTIONS

    tests: Counter[str] = Counter()
    excepted: Counter[str] = Counter()
    for name in claimed:
        for op in cases.ops_of(cases.node_tests()[name].model):
            tests[op] += 1
            excepted[op] += name in exceptions
    missing = [name for name in exceptions if name in claimed]
    text = INTRO.format(
        types=", ".join(f"`{t}`" for t in sorted(TYPE_NAMES.values())),
        first=OPSETS.start,
        last=OPSETS.stop - 1,
        version=onnx.__version__,
        passed=len(claimed) - len(missing),
        total=len(claimed),
    )
    lines = ["| op | family | node tests | excepted |", "| --- | --- | --- | --- |"]
    for op, handler in handlers().items():
        family = handler.__module__.rsplit(".", 1)[1]
        lines.append(f"| `{op}` | {family} | {tests[op]} | {excepted[op] or ''} |")
    lines += ["", "## Excepted tests", ""]
    lines += [f"* `{name}`: {exceptions[name]}." for name in missing]
    return text + "\n".join(lines) + "\n"


if __name__ == "__main__":
    from generated_page import write_or_check

    raise SystemExit(write_or_check(PAGE, render, __doc__))
