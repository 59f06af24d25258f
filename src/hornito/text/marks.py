"""Characters that no text holds, to mark places in text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hornito.errors import UsageError

#: Non-characters of Unicode: text for interchange holds none of them.
NONCHARACTERS = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))


def free_marks(texts: Iterable[str], count: int) -> str:
    """`count` characters that occur in none of `texts`; UsageError when there are not enough."""
    used: set[str] = set()
    for text in texts:
        used.update(char for char in NONCHARACTERS if char in text)
    free = "".join(char for char in NONCHARACTERS if char not in used)
    if len(free) < count:
        raise UsageError("the text holds Unicode non-characters (U+FDD0 to U+FDEF); remove them")
    return free[:count]


def special_pattern(texts: Iterable[str], unless_before: str = "") -> re.Pattern[str]:
    """Matches any of `texts`, the longest first; matches nothing when there are none.

    A match that `unless_before` follows does not count.
    """
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    if not ordered:
        return re.compile(r"(?!)")
    tail = f"(?!{re.escape(unless_before)})" if unless_before else ""
    return re.compile(f"(?:{'|'.join(map(re.escape, ordered))}){tail}")


def unmarked(mark: str, texts: Iterable[str]) -> re.Pattern[str]:
    """Matches those of `texts` that do not hold `mark` after their first character.

    Longer ones hold it inside and so are other text; one of a single character is followed by it.
    """
    return special_pattern(texts, unless_before=mark)
