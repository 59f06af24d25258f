"""What a caller wants of one answer: the keyword arguments of `generate`, `stream` and `chat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hornito.arguments import texts, whole
from hornito.errors import UsageError
from hornito.runtime.overflow import DEFAULT_MAX_TOKENS, REFUSE, Overflow
from hornito.runtime.sampler import SamplingKeywords, SamplingParams, sampling_params
from hornito.structured.formats import ResponseFormat, choose_format

_FORM = ("response_format", "regex", "grammar")
_ELSEWHERE = {
    "json_schema": "response_format={'type': 'json_schema', 'json_schema': {'schema': ...}}",
    "schema": "response_format={'type': 'json_schema', 'json_schema': {'schema': ...}}",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "top_logprobs": "logprobs",
    "tools": "chat(messages, tools=...)",
    "tool_choice": "chat(messages, tools=..., tool_choice=...)",
    "system": "chat([{'role': 'system', 'content': ...}, ...])",
}
"""Names from other programs, or of other methods, and what to give instead."""


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
        response_format: the form of the answer, as OpenAI's API describes it: `json_object`, or
            `json_schema` with a schema (docs/structured.md). Needs the extra `structured`, as do
            the next two, of which one may be given instead.
        regex: a regular expression that the whole answer matches.
        grammar: a context-free grammar of the answer, as Lark or GBNF.
    """

    max_tokens: int
    stop: Sequence[str] | None
    ignore_eos: bool
    continuation: bool
    overflow: Overflow | str | None
    response_format: Mapping[str, Any] | ResponseFormat | None
    regex: str | None
    grammar: str | None


@dataclass(frozen=True, slots=True)
class Request:
    """The checked form of `AnswerKeywords`."""

    params: SamplingParams
    max_tokens: int = DEFAULT_MAX_TOKENS
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    continuation: bool = True
    overflow: Overflow = REFUSE
    form: ResponseFormat | None = None

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
            UsageError: a value is out of its range; names the argument and the range. Or there is
                no argument of that name.
        """
        given: dict[str, Any] = dict(keywords)
        _check_names(given)
        own = {
            name: given.pop(name)
            for name in ("max_tokens", "stop", "ignore_eos", "continuation", "overflow")
            if name in given
        }
        form = choose_format(*(given.pop(key, None) for key in _FORM))
        params = sampling_params(given, generation_config)  # type: ignore[arg-type]
        params.check_vocabulary(vocabulary)
        own["max_tokens"] = whole("max_tokens", own.get("max_tokens", DEFAULT_MAX_TOKENS), 1)
        own["overflow"] = Overflow.of(own.get("overflow"))
        own["stop"] = texts("stop", own.get("stop"))
        if own["stop"] and not has_tokenizer:
            raise UsageError("stop strings need a tokenizer, which this package lacks")
        if form is not None and not has_tokenizer:
            raise UsageError("answers of a given form need a tokenizer, which this package lacks")
        if form is not None and own.get("ignore_eos"):
            raise UsageError("an answer of a given form ends where the form does: no ignore_eos")
        return cls(params, form=form, **own)


def _check_names(given: Mapping[str, Any]) -> None:
    """Raise UsageError for a name that is none of `AnswerKeywords`; says which may be meant."""
    known = [*AnswerKeywords.__annotations__]
    for name in given:
        if name in known:
            continue
        close = get_close_matches(name, known, 1)
        if name in _ELSEWHERE:
            hint = f"give {_ELSEWHERE[name]}. "
        else:
            hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(
            f"there is no argument {name!r}; {hint}The arguments of an answer are "
            f"{', '.join(sorted(known))}"
        )
