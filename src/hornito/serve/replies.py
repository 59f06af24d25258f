"""Answers in OpenAI's words: what one request has got so far, streamed or whole."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hornito.runtime.results import Chunk, TokenLogprob
from hornito.runtime.sampler import SEED_LIMIT
from hornito.serve.calls import Spoken
from hornito.serve.requests import ChatRequest, CompletionRequest, Request
from hornito.serve.tokens import CompletionLogprobs, chat_logprobs, join_completion_logprobs
from hornito.serve.work import Event, Scores, Started, Work
from hornito.structured.formats import ResponseFormat
from hornito.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Model:
    """What replies say of the model.

    Attributes:
        name, fingerprint: of it.
        tokenizer: None when its package has none.
        ends: ids that end an answer.
        context: positions of a session.
    """

    name: str
    fingerprint: str
    tokenizer: Tokenizer | None
    ends: frozenset[int]
    context: int


def works(
    common: Request,
    prompts: Sequence[list[int]],
    model: Model,
    *,
    scores: int | None,
    chat: bool,
    form: ResponseFormat | None,
) -> list[Work]:
    """The answers that are wanted: `n` to each prompt, in order.

    With a seed, the n-th answer to a prompt has the seed plus n.
    """
    made = []
    for ids in prompts:
        for choice in range(common.n):
            params, seed = common.params, common.params.seed
            if seed is not None and choice:
                params = replace(params, seed=(seed + choice) % SEED_LIMIT)
            made.append(
                Work(
                    ids,
                    params,
                    model.context + 1 if common.max_tokens is None else common.max_tokens,
                    common.stop,
                    common.ignore_eos,
                    continuation=not chat,
                    form=form,
                    scores=scores,
                )
            )
    return made


@dataclass(slots=True)
class _Choice:
    """One answer so far."""

    prompt_tokens: int
    cached_tokens: int = 0
    tokens: int = 0
    finish_reason: str | None = None


class Reply:
    """What all replies have in common: identity, usage, the answers' texts."""

    prefix = ""
    kind = ""

    def __init__(self, model: Model, common: Request, made: Sequence[Work]) -> None:
        self.model = model
        self.common = common
        self.choices = [_Choice(len(work.ids)) for work in made]
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts (each counted once), of answers, and of prompts found in the cache."""
        prompts = self.choices[:: self.common.n]
        prompt = sum(choice.prompt_tokens for choice in prompts)
        made = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.cached_tokens for choice in prompts)
            },
        }

    def note(self, index: int, event: Event) -> None:
        """Count what an event brings."""
        choice = self.choices[index]
        if isinstance(event, Started):
            choice.cached_tokens = event.cached_tokens
        elif isinstance(event, Chunk):
            choice.tokens += len(event.token_ids)
            choice.finish_reason = event.finish_reason

    def spoken(self, chunk: Chunk) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of a chunk, without that of an end token."""
        ends = frozenset() if self.common.ignore_eos else self.model.ends
        return tuple(place for place in chunk.logprobs or () if place.token_id not in ends)

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An event of a stream."""
        data = {**self._head, "object": self.kind, "choices": choices, **more}
        if self.common.include_usage:
            data.setdefault("usage", None)
        return data

    def last_chunks(self) -> list[Any]:
        """What ends a stream."""
        if self.common.include_usage:
            return [self.chunk([], usage=self.usage()), "[DONE]"]
        return ["[DONE]"]


class ChatReply(Reply):
    """The reply to a chat request."""

    prefix = "chatcmpl"
    kind = "chat.completion.chunk"

    def __init__(
        self, model: Model, request: ChatRequest, made: Sequence[Work], spoken: Sequence[Spoken]
    ) -> None:
        super().__init__(model, request.common, made)
        self._spoken = spoken
        self._places: list[list[TokenLogprob]] = [[] for _ in made]

    def take(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The events of a stream that an event of the scheduler is."""
        self.note(index, event)
        if isinstance(event, Started):
            return [self._delta(index, {"role": "assistant", "content": ""})]
        if not isinstance(event, Chunk):
            return []
        places = self.spoken(event)
        self._places[index] += places
        ended = event.finish_reason is not None
        spoken = self._spoken[index]
        deltas = spoken.take(event.text, last=ended)
        if places and not deltas:
            deltas = [{"content": ""}]
        found = [self._delta(index, delta, () if at else places) for at, delta in enumerate(deltas)]
        if ended:
            reason = spoken.reason(event.finish_reason)
            found.append(self._delta(index, {}, finish_reason=reason))
        return found

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        places: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(self.model.tokenizer, places) if places else None,
            "finish_reason": finish_reason,
        }
        return self.chunk([choice])

    def whole(self) -> dict[str, Any]:
        """All of it at once."""
        choices = [
            {
                "index": index,
                "message": spoken.message(),
                "logprobs": None
                if self.common.params.logprobs is None
                else chat_logprobs(self.model.tokenizer, places),
                "finish_reason": spoken.reason(choice.finish_reason),
            }
            for index, (choice, spoken, places) in enumerate(
                zip(self.choices, self._spoken, self._places, strict=True)
            )
        ]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self.usage(),
        }


class CompletionReply(Reply):
    """The reply to a completion request."""

    prefix = "cmpl"
    kind = "text_completion"

    def __init__(self, model: Model, request: CompletionRequest, made: Sequence[Work]) -> None:
        super().__init__(model, request.common, made)
        self._echo = request.echo
        prompts = [prompt for prompt in request.prompts for _ in range(request.common.n)]
        # Of token ids all are spelled out; a text is given back as it came.
        self._spelled = [not isinstance(prompt, str) for prompt in prompts]
        self._prompts = [self._text(prompt) for prompt in prompts]
        self._ids = [work.ids for work in made]
        top = request.common.params.logprobs or 0
        self._logprobs = [CompletionLogprobs(model.tokenizer, top, echo=request.echo) for _ in made]
        self._parts: list[list[dict[str, Any]]] = [[] for _ in made]
        self._texts: list[list[str]] = [[] for _ in made]

    def _text(self, prompt: str | list[int]) -> str:
        if not self._echo or isinstance(prompt, str) or self.model.tokenizer is None:
            return prompt if self._echo and isinstance(prompt, str) else ""
        return self.model.tokenizer.decode(prompt)

    def take(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The events of a stream that an event of the scheduler is."""
        self.note(index, event)
        spelled = self._spelled[index]
        if isinstance(event, Scores):
            parts = self._parts[index] or [self._first(index)]
            part = self._logprobs[index].part(event.places, spelled=spelled)
            self._parts[index] = [*parts, part]
            return []
        if isinstance(event, Started):
            if not self._echo:
                return []
            logprobs = None
            if self.common.params.logprobs is not None:
                scores, self._parts[index] = self._parts[index] or [self._first(index)], []
                logprobs = join_completion_logprobs(scores)
                self._logprobs[index].begin_answer(len(self._prompts[index]))
            return [self._piece(index, self._prompts[index], logprobs)]
        if not isinstance(event, Chunk):
            return []
        places = self.spoken(event)
        logprobs = self._logprobs[index].part(places) if places else None
        found = []
        if event.text or logprobs:
            found.append(self._piece(index, event.text, logprobs))
        if event.finish_reason is not None:
            found.append(self._piece(index, "", None, event.finish_reason))
        return found

    def _first(self, index: int) -> dict[str, Any]:
        token = self._ids[index][0]
        return self._logprobs[index].first(token, spelled=self._spelled[index])

    def _piece(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        self._texts[index].append(text)
        if logprobs is not None:
            self._parts[index].append(logprobs)
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self.chunk([choice])

    def whole(self) -> dict[str, Any]:
        """All of it at once."""
        choices = [
            {
                "index": index,
                "text": "".join(self._texts[index]),
                "logprobs": None
                if self.common.params.logprobs is None
                else join_completion_logprobs(self._parts[index]),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self.choices)
        ]
        return {
            **self._head,
            "object": "text_completion",
            "choices": choices,
            "usage": self.usage(),
        }
