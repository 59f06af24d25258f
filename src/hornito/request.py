"""What a caller wants of one answer: the keyword arguments of `generate`, `stream` and `chat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hornito.arguments import texts, whole
from hornito.errors import UsageError
from hornito.runtime.overflow import REFUSE, Overflow
from hornito.runtime.sampler import SamplingKeywords, SamplingParams, sampling_params

DEFAULT_MAX_TOKENS = 256


class AnswerKeywords(SamplingKeywords, total=False):
    """The keyword arguments of an answer; those that choose tokens are in `SamplingKeywords`.

    Keys:
        max_tokens: new tokens at most (256).
        stop: strings that end the answer; they are not part of it.
        ignore_eos: go on past end tokens.
        continuation: the text goes on from the prompt, so that its first space counts (the
            default); False for an answer that stands alone, as in a chat.
        overflow: what happens at the context's end: an error before anything is evaluated (the
            default; an answer ends there with `length`), or `Overflow("truncate", ...)`, or just
            `"truncate"`.
    """

    max_tokens: int
    stop: Sequence[str] | None
    ignore_eos: bool
    continuation: bool
    overflow: Overflow | str | None


@dataclass(frozen=True, slots=True)
class Request:
    """The checked form of `AnswerKeywords`."""

    params: SamplingParams
    max_tokens: int = DEFAULT_MAX_TOKENS
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    continuation: bool = True
    overflow: Overflow = REFUSE

    @classmethod
    def of(
        cls,
        keywords: AnswerKeywords,
        generation_config: Mapping[str, Any],
        *,
        vocabulary: int,
        has_tokenizer: bool,
    ) -> Request:
        """Check what a caller gave.

        Raises:
            UsageError: a value is out of its range; names the argument and the range.
        """
        given: dict[str, Any] = dict(keywords)
        own = {
            name: given.pop(name)
            for name in ("max_tokens", "stop", "ignore_eos", "continuation", "overflow")
            if name in given
        }
        params = sampling_params(given, generation_config)  # type: ignore[arg-type]
        params.check_vocabulary(vocabulary)
        own["max_tokens"] = whole("max_tokens", own.get("max_tokens", DEFAULT_MAX_TOKENS), 1)
        own["overflow"] = Overflow.of(own.get("overflow"))
        own["stop"] = texts("stop", own.get("stop"))
        if own["stop"] and not has_tokenizer:
            raise UsageError("stop strings need a tokenizer, which this package lacks")
        return cls(params, **own)
