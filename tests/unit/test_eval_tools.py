"""The tool-call evaluation: its files, what counts as a call, and its sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hornito.diag.eval_tools import (
    BUILTIN,
    CallResult,
    compare,
    find_call,
    read_suite,
    report,
    whole_object,
)
from hornito.errors import FormatError, UsageError

NAMES = frozenset({"a", "b"})


def test_the_set_that_comes_along() -> None:
    suite = read_suite(BUILTIN)
    assert len(suite.cases) == 8 and len(suite.names) == 8
    tools = [json.loads(line) for line in suite.system.splitlines() if line.startswith("{")]
    assert {tool["name"] for tool in tools} == suite.names
    by_name = {tool["name"]: tool["parameters"] for tool in tools}
    for case in suite.cases:
        parameters = by_name[case.name]
        assert set(parameters["required"]) <= set(case.arguments) <= set(parameters["properties"])
        for name, value in case.arguments.items():
            kind = parameters["properties"][name]
            assert isinstance(value, {"string": str, "integer": int}[kind["type"]])
            assert value in kind.get("enum", [value])
    assert len({case.name for case in suite.cases}) == 8
    assert 2800 < len(suite.system) < 3200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "format and version must be"),
        ({"format": "x"}, "format and version must be"),
        ({"system": 1}, "'system' must be text"),
        ({"tools": []}, "lists of objects"),
        ({"cases": ["x"]}, "lists of objects"),
        ({"tools": [{"name": "a"}, {"name": "a"}]}, "a name of its own"),
        ({"tools": [{"name": 3}]}, "a name of its own"),
        ({"cases": [{"utterance": "u"}]}, "case 0 needs"),
        ({"cases": [{"utterance": "u", "call": {"name": "z", "arguments": {}}}]}, "case 0 needs"),
        ({"cases": [{"utterance": "u", "call": {"name": "a", "arguments": 1}}]}, "case 0 needs"),
    ],
)
def test_files_that_are_none(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    data = {
        "format": "hornito-tool-calls",
        "version": 1,
        "system": "s",
        "tools": [{"name": "a"}],
        "cases": [{"utterance": "u", "call": {"name": "a", "arguments": {}}}],
    }
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(data))
    assert read_suite(str(path)).system == 's\n{"name": "a"}'
    path.write_text(json.dumps({**data, **change}))
    with pytest.raises(FormatError, match=message):
        read_suite(str(path))
    path.write_text("{")
    with pytest.raises(FormatError, match="no JSON file"):
        read_suite(str(path))
    with pytest.raises(UsageError, match="there is no file"):
        read_suite(str(tmp_path / "none"))


def test_what_a_call_is() -> None:
    call = {"name": "a", "arguments": {"x": {"y": [1, "}"]}}}
    text = json.dumps(call)
    assert find_call(f"Sure: {text} and more }}", NAMES) == call
    for cut in range(len(text)):
        assert find_call(text[:cut], NAMES) is None and not whole_object(text[:cut])
    assert whole_object(text) and whole_object(f"x{text}y") and not whole_object("none")
    for other in ('{"name": "z", "arguments": {}}', '{"name": "a"}', "[1]", '{"name": ["a"]}'):
        assert find_call(other, NAMES) is None
    assert find_call('{"name": "a", "arguments": []}', NAMES) is None


def result(
    tokens: tuple[int, ...], seconds: float = 1.0, *, call: bool = True, exact: bool = False
) -> CallResult:
    found = {"name": "a", "arguments": {}} if call else None
    return CallResult("u", "t", found, {}, exact, seconds, 3, tokens)


def test_sums() -> None:
    results = [
        result((1, 2, 3), 0.1, exact=True),
        result((1, 2), 0.3, call=False),
        result((5,), 0.2),
        result((7, 8, 9), 0.9),
    ]
    reference = [result((1, 2, 3)), result((1, 2, 4, 5)), result((6, 7)), result((7, 9, 9))]
    found = report(("m", "d", "high"), 840, results, reference)
    assert (found.complete, found.exact) == (0.75, 0.25)
    assert (found.p50_seconds, found.max_seconds) == (0.25, 0.9)
    assert found.identity is not None
    assert found.identity.answers == 0.25 and found.identity.tokens == (3 + 2 + 0 + 1) / 12
    assert report(("m", "d", "high"), 840, results, None).identity is None
    assert compare(results, results).tokens == 1.0
    assert found.to_dict()["results"][0]["token_ids"] == (1, 2, 3)
