"""The command line of a tool that writes one page of the docs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(page: Path, render: Callable[[], str], purpose: str | None) -> int:
    """Writes the page; with --check compares it instead, and returns 1 where it differs."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    arguments = parser.parse_args()
    text = render()
    if arguments.check:
        same = page.exists() and page.read_text() == text
        if not same:
            print(f"{page} is out of date: run python {sys.argv[0]}", file=sys.stderr)
        return int(not same)
    page.write_text(text)
    print(f"wrote {page}")
    return 0
