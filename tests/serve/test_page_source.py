"""What the page at / is made of."""

from __future__ import annotations

import re
from pathlib import Path

from hornito.serve import app

PAGE = Path(app.__file__).parent / "page" / "index.html"


def test_the_page_asks_nobody_else() -> None:
    """One file, without a source from elsewhere; its own policy forbids any."""
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert not re.findall(r"https?://", text)
    assert "default-src 'none'; connect-src 'self'" in text
    assert len(text) < 20_000 and "innerHTML" not in text
