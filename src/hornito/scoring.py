"""The log-probability that a model gives to a text after another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hornito.arguments import token_ids
from hornito.errors import ContextOverflowError, UsageError
from hornito.runtime.overflow import room_advice
from hornito.runtime.prefix import common_prefix

if TYPE_CHECKING:
    from hornito.api import LLM


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is.

    Attributes:
        logprob: natural log of its probability, the sum of `token_logprobs`.
        token_logprobs: of each token, given everything before it.
        token_ids: the tokens that were scored.
    """

    logprob: float
    token_logprobs: tuple[float, ...]
    token_ids: tuple[int, ...]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability of a token."""
        return math.exp(-self.logprob / len(self.token_ids))


def score(llm: LLM, prompt: str | Sequence[int], continuation: str | Sequence[int]) -> Score:
    """See `LLM.score`."""
    before, scored = _split(llm, prompt, continuation)
    if not before:
        raise UsageError(
            "the prompt is empty, and nothing precedes the first token of the continuation; give "
            "a prompt, or the model's BOS id"
        )
    if not scored:
        raise UsageError("the continuation is empty")
    total = len(before) + len(scored)
    if total > llm.context:
        raise ContextOverflowError(
            f"prompt and continuation have {total} tokens; the context holds {llm.context}. "
            f"{room_advice(llm.engine, total)}, or shorten them",
            tokens=total,
            context=llm.context,
        )
    with llm.session() as session:
        session.prefill(before)
        values = [float(value) for value in session.logprobs(scored)]
    return Score(math.fsum(values), tuple(values), tuple(scored))


def _split(
    llm: LLM, prompt: str | Sequence[int], continuation: str | Sequence[int]
) -> tuple[list[int], list[int]]:
    """Ids before the continuation, and its own.

    Two texts are encoded as one, as the model would see them. Where a token reaches across the
    seam, it counts to the continuation.
    """
    if isinstance(prompt, str) != isinstance(continuation, str):
        raise UsageError("prompt and continuation must both be text, or both be token ids")
    if not isinstance(prompt, str) or not isinstance(continuation, str):
        return token_ids("the prompt", prompt), token_ids("the continuation", continuation)
    if not continuation:
        return [0], []
    alone = llm.tokenizer.encode(prompt)
    whole = llm.tokenizer.encode(prompt + continuation)
    shared = common_prefix(alone, whole[:-1])
    return whole[:shared], whole[shared:]
