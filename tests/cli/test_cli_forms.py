"""The options that give an answer a form."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from hornito.cli.forms import add_form, form_keywords
from hornito.cli.main import main
from hornito.cli.options import Parser
from hornito.errors import UsageError
from hornito.structured.formats import ResponseFormat


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser("hornito run", "")
    add_form(parser)
    return parser.parse_args(words)


def test_forms_from_files_and_text(tmp_path: Path) -> None:
    schema, lark = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text('{"type": "integer"}')
    lark.write_text('start: "é"', encoding="utf-8")
    assert form_keywords(parsed()) == {}
    assert form_keywords(parsed("--json-schema", str(schema))) == {
        "response_format": ResponseFormat("json_schema", '{"type": "integer"}')
    }
    assert form_keywords(parsed("--regex", "a|b"))["response_format"].text == "a|b"
    assert form_keywords(parsed("--grammar", str(lark))) == {
        "response_format": ResponseFormat("grammar", 'start: "é"')
    }


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    with pytest.raises(UsageError, match="one form"):
        form_keywords(parsed("--regex", "a", "--grammar", "b"))
    with pytest.raises(UsageError, match=r"s\.json"):
        form_keywords(parsed("--json-schema", str(path)))
    path.write_text("{")
    with pytest.raises(UsageError, match="no JSON"):
        form_keywords(parsed("--json-schema", str(path)))
    path.write_text("[1]")
    with pytest.raises(UsageError, match="is an object"):
        form_keywords(parsed("--json-schema", str(path)))


def test_a_chat_has_no_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["run", "m.vxm", "--regex", "a"]) == 2
    assert "--regex needs a prompt" in capsys.readouterr().err
