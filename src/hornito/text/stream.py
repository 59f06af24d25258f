"""Text of a growing sequence of token ids: never a partial character, never a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from hornito.errors import UsageError


class Decodes(Protocol):
    """What the decoder asks of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that an id adds to the text."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a control token, not text."""
        ...

    @property
    def strips_first_space(self) -> bool:
        """Whether the first space of a decoded sequence belongs to the vocabulary's spelling."""
        ...


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string that is complete first begins in `text`, and which it is.

    Of those that end at the same place the longest counts. So what is found does not depend on
    where tokens begin and end.
    """
    best: tuple[int, int, str] | None = None
    for stop in stops:
        at = text.find(stop)
        if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
            best = (at + len(stop), at, stop)
    return (best[1], best[2]) if best is not None else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that may still become a stop string."""
    longest = max((len(stop) for stop in stops), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(stop) > size and stop.startswith(tail) for stop in stops):
            return size
    return 0


class StreamDecoder:
    """Turns token ids into text as they come.

    `push` returns the text that is final: whole characters, and nothing that may still turn out to
    be the start of a stop string. `finish` returns what was held back. The pieces joined are the
    text of the whole sequence, cut before the first stop string.

    Attributes:
        text: all text returned so far.
        stopped: the stop string that ended the text, or None.
    """

    def __init__(
        self,
        tokenizer: Decodes,
        *,
        stop: Sequence[str] = (),
        skip_special: bool = True,
        continuation: bool = False,
    ) -> None:
        """Start a stream.

        Args:
            tokenizer: gives the bytes of each id.
            stop: strings that end the text; they are not part of it.
            skip_special: leave control tokens out of the text.
            continuation: the ids go on from earlier text, so that a first space is text even
                where the vocabulary spells the start of a sequence with one.

        Raises:
            UsageError: a stop string is empty or not text.
        """
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise UsageError(f"stop must be a list of non-empty strings, not {stop!r}")
        self._tokenizer = tokenizer
        self._stops = tuple(dict.fromkeys(stop))
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_first_space and not continuation
        self._held = ""
        self.text = ""
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        """Add an id; returns new final text, often empty. After a stop it returns nothing."""
        if self.stopped is not None:
            return ""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._add(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """End the stream; returns text that was held back.

        A character that never became whole is U+FFFD, as in decoding all bytes at once.
        """
        if self.stopped is not None:
            return ""
        out = self._add(self._utf8.decode(b"", final=True))
        rest, self._held = self._held, ""
        self.text += rest
        return out + rest

    def _add(self, new: str) -> str:
        if self._strip and new:
            new, self._strip = new.removeprefix(" "), False
        self._held += new
        found = find_stop(self._held, self._stops)
        if found is not None:
            at, self.stopped = found
            final, self._held = self._held[:at], ""
        else:
            keep = held_back(self._held, self._stops)
            cut = len(self._held) - keep
            final, self._held = self._held[:cut], self._held[cut:]
        self.text += final
        return final
