"""Tokens as OpenAI's API shows them: texts, bytes, log-probabilities, places in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hornito.runtime.results import TokenLogprob

if TYPE_CHECKING:
    from hornito.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for less, down to minus infinity, which is no JSON; OpenAI's own number."""


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """The text of a token; one that is a part of a character is spelled `bytes:\\xe2\\x82`.

    Without a tokenizer it is the id.
    """
    if tokenizer is None:
        return str(token)
    data = tokenizer.token_bytes(token)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text or f"<{token}>"


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)


def likely(place: TokenLogprob) -> list[tuple[int, float]]:
    """The most likely tokens of a place; the chosen one has the same number in both."""
    return [
        (token, place.logprob if token == place.token_id else logprob)
        for token, logprob in place.top
    ]


def chat_logprobs(tokenizer: Tokenizer | None, places: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a choice of a chat."""
    return {
        "content": [
            {
                **_entry(tokenizer, place.token_id, place.logprob),
                "top_logprobs": [_entry(tokenizer, *one) for one in likely(place)],
            }
            for place in places
        ],
        "refusal": None,
    }


def _entry(tokenizer: Tokenizer | None, token: int, logprob: float) -> dict[str, Any]:
    data = None if tokenizer is None else list(tokenizer.token_bytes(token))
    return {"token": token_text(tokenizer, token), "logprob": finite(logprob), "bytes": data}


class Places:
    """Where tokens begin in the text that they spell, by its characters.

    A token's place is that of the character which its first byte is of, so tokens that share a
    character share a place. Bytes that are no UTF-8 are U+FFFD, as often as the text has it. A
    token that adds nothing has the place where text goes on.

    Args:
        strip: the first space is not in the text; see `StreamDecoder`.
    """

    def __init__(self, *, strip: bool = False) -> None:
        self._begun = b""  # of a character that may still go on
        self._at = 0  # the place of that character, or of the next
        self._strip = strip

    def take(self, data: bytes) -> int:
        """The place of a token of these bytes, which come next."""
        places = [self._take_byte(data[at : at + 1]) for at in range(len(data))]
        return places[0] if places else self._at

    def go_on(self, at: int) -> None:
        """What comes now begins a text of its own, at that place."""
        self._begun, self._at, self._strip = b"", at, False

    def _take_byte(self, byte: bytes) -> int:
        """The place of a byte that comes next."""
        character = self._begun + byte
        goes_on = _goes_on(character)
        if goes_on is None and self._begun:
            # It is not of the character begun before, which stays U+FFFD.
            self._end(self._begun)
            character, goes_on = byte, _goes_on(byte)
        place = self._at
        if goes_on:
            self._begun = character
        else:
            self._end(character)
        return place

    def _end(self, character: bytes) -> None:
        """A character is complete, or will never be."""
        if not (self._strip and character == b" "):
            self._at += 1
        self._begun, self._strip = b"", False


def _goes_on(character: bytes) -> bool | None:
    """Whether these bytes are the beginning of a character rather than all of it; None: neither."""
    try:
        character.decode()
    except UnicodeDecodeError as error:
        # Not of the incremental decoder, which waits for the end of an encoded surrogate, too.
        return True if error.reason == "unexpected end of data" else None
    return False


class CompletionLogprobs:
    """`logprobs` of a choice of a completion, whose tokens come in parts.

    Args:
        top: most likely tokens of each place; the chosen one is always among them.
        echo: the prompt's tokens come first.
    """

    def __init__(self, tokenizer: Tokenizer | None, top: int, *, echo: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._places = Places(strip=echo and tokenizer is not None and tokenizer.strips_first_space)

    def begin_answer(self, at: int) -> None:
        """The prompt was `at` characters of the choice's text; what comes now is the answer."""
        self._places.go_on(at)

    def first(self, token: int, *, spelled: bool) -> dict[str, Any]:
        """A prompt's first token, which nothing precedes."""
        return self._object([token], [None], [None], [spelled])

    def part(self, places: Sequence[TokenLogprob], *, spelled: bool = False) -> dict[str, Any]:
        """Tokens that come next.

        Args:
            spelled: control tokens are in the text.
        """
        tops = []
        for place in places:
            # What shares its text with a more likely token is left out.
            top: dict[str, float] = {}
            for token, logprob in (*likely(place), (place.token_id, place.logprob)):
                top.setdefault(token_text(self._tokenizer, token), finite(logprob))
            tops.append(top)
        ids = [place.token_id for place in places]
        logprobs = [finite(place.logprob) for place in places]
        return self._object(ids, logprobs, tops if self._top else None, [spelled] * len(ids))

    def _object(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[dict[str, float] | None] | None,
        spelled: Sequence[bool],
    ) -> dict[str, Any]:
        offsets = [
            self._places.take(self._bytes(token, shown))
            for token, shown in zip(ids, spelled, strict=True)
        ]
        return {
            "tokens": [token_text(self._tokenizer, token) for token in ids],
            "token_logprobs": list(logprobs),
            "top_logprobs": None if tops is None else list(tops),
            "text_offset": offsets,
        }

    def _bytes(self, token: int, shown: bool) -> bytes:
        """What a token adds to the text."""
        if self._tokenizer is None or (not shown and self._tokenizer.is_special(token)):
            return b""
        return self._tokenizer.token_bytes(token)


def join_completion_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The parts of a choice as one."""
    joined: dict[str, Any] = {}
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        lists = [part[name] for part in parts]
        joined[name] = None if None in lists else [item for one in lists for item in one]
    return joined
