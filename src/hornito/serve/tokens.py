"""Tokens as OpenAI's API shows them: texts, bytes, log-probabilities, places in the text."""

from __future__ import annotations

import codecs
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


class CompletionLogprobs:
    """`logprobs` of a choice of a completion, whose tokens come in parts.

    Args:
        top: most likely tokens of each place; the chosen one is always among them.
        offset: characters of the choice's text before its first token.
    """

    def __init__(self, tokenizer: Tokenizer | None, top: int, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

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
        offsets = []
        for token, shown in zip(ids, spelled, strict=True):
            offsets.append(self._offset)
            self._offset += self._length(token, shown)
        return {
            "tokens": [token_text(self._tokenizer, token) for token in ids],
            "token_logprobs": list(logprobs),
            "top_logprobs": None if tops is None else list(tops),
            "text_offset": offsets,
        }

    def _length(self, token: int, shown: bool) -> int:
        if self._tokenizer is None or (not shown and self._tokenizer.is_special(token)):
            return 0
        return len(self._utf8.decode(self._tokenizer.token_bytes(token)))


def join_completion_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The parts of a choice as one."""
    joined: dict[str, Any] = {}
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        lists = [part[name] for part in parts]
        joined[name] = None if None in lists else [item for one in lists for item in one]
    return joined
