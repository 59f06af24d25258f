"""What generation returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds of an answer: evaluating the prompt, and everything after.

    `reused_tokens` of the `prompt_tokens` were not evaluated: a live snapshot held them.
    """

    prompt_tokens: int
    prompt_seconds: float
    decode_tokens: int
    decode_seconds: float
    reused_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found a token of its answer: natural logarithms of probabilities.

    They are of the model's own distribution, before bias, penalties, temperature and filters.
    `top` are the most likely tokens of that place and their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer.

    `text` is whole characters; the last chunk has `finish_reason` (`stop` at an end token or stop
    string, `length` at max_tokens or the context's end) and `timings`. `logprobs`, when they were
    asked for, belong to `token_ids`; `seed`, in the last chunk, is that of the draws (None when
    there were none).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    timings: Timings | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer. `token_ids` hold the end token when there was one; `text` does not.

    `logprobs`, when they were asked for, belong to `token_ids`. `seed` is that of the draws; giving
    it again gives the same answer.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] | None = None
    seed: int | None = None
