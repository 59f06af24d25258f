"""What generation returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds of an answer: evaluating the prompt, and everything after."""

    prompt_tokens: int
    prompt_seconds: float
    decode_tokens: int
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer.

    `text` is whole characters; the last chunk has `finish_reason` (`stop` at an end token or stop
    string, `length` at max_tokens or the context's end) and `timings`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer. `token_ids` hold the end token when there was one; `text` does not."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    timings: Timings
