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


def special_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `texts`, the longest first; matches nothing when there are none."""
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
