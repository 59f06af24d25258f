"""What the documents name exists, and what exists is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hornito
from hornito import errors
from hornito.api import LLM, Chunk, Generation, Score, Timings, TokenLogprob
from hornito.cli.main import VERBS
from hornito.conversation import ChatSettings, Conversation
from tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
API = (ROOT / "docs/api.md").read_text(encoding="utf-8")
TROUBLE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")


def in_code(text: str) -> set[str]:
    """Every identifier in backticks, or in a fenced block."""
    spans = re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
    return {word for span in spans for word in re.findall(r"[A-Za-z_]\w*", span)}


def public(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


@pytest.mark.parametrize("name", hornito.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert hasattr(hornito, name)
    assert name in in_code(API)


@pytest.mark.parametrize(
    "kind", [LLM, Conversation, ChatSettings, Generation, Chunk, Timings, Score, TokenLogprob]
)
def test_every_public_member_is_documented(kind: type) -> None:
    words = in_code(API)
    hidden = {"position", "messages", "system", "llm"} if kind is Conversation else set()
    missing = [n for n in public(kind) if n not in words and n not in hidden]
    assert kind.__name__ in words and missing == []


def test_every_error_is_documented() -> None:
    kinds = [v for v in vars(errors).values() if isinstance(v, type)]
    assert [k.__name__ for k in kinds if k.__name__ not in in_code(API)] == []
    for kind in kinds:
        row = next((r for r in API.splitlines() if r.startswith(f"| `{kind.__name__}`")), None)
        if row is not None:
            assert f"| {kind.exit_code} |" in row


def test_the_readme_lists_every_verb() -> None:
    rows = re.findall(r"^\| `hornito (\w+)", README, re.MULTILINE)
    assert sorted(rows) == sorted(VERBS)


@pytest.mark.parametrize("path", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"])
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_options_in_the_documents_exist() -> None:
    import argparse
    import importlib

    known = {"--help", "--version"}
    for verb in VERBS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"hornito.cli.{verb}").add_arguments(parser)
        known |= {flag for action in parser._actions for flag in action.option_strings}
    for text in (README, API, TROUBLE, (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")):
        text = re.sub(r"docker[^`\n]*|--group-add|\.venv/bin/pytest[^\n]*", "", text)
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
        assert used - known == set()
