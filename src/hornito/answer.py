"""One answer while its tokens come in: text, stop strings, end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hornito.runtime.results import Chunk, Generation, Timings, TokenLogprob
from hornito.runtime.sampler import Sampler

if TYPE_CHECKING:
    from hornito.runtime.emitted import Record
    from hornito.text.tokenizer import Tokenizer


class Answer:
    """Text and end of one answer.

    Attributes:
        count: tokens taken.
        reason: why it ended, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        ends: Iterable[int] = (),
        continuation: bool = True,
        sampler: Sampler | None = None,
    ) -> None:
        """Begin an answer.

        Args:
            tokenizer: None for a model without one; the text stays empty then.
            max_tokens: tokens at most.
            stop: strings that end it.
            ends: ids that end it.
            continuation: the text goes on from a prompt; see `StreamDecoder`.
            sampler: what chooses its tokens, for the log-probabilities and the seed to report, and
                the constraint that may end it.
        """
        from hornito.text.stream import StreamDecoder

        self._ends = frozenset(ends)
        self._max_tokens = max_tokens
        self._decoder = (
            StreamDecoder(tokenizer, stop=stop, continuation=continuation)
            if tokenizer is not None
            else None
        )
        self._logprobs = sampler is not None and sampler.params.logprobs is not None
        self._constraint = None if sampler is None else sampler.constraint
        self._seed = None if sampler is None or sampler.params.greedy else sampler.seed
        self.count = 0
        self.reason: str | None = None

    def ended(self) -> bool:
        """Whether the answer has ended."""
        return self.reason is not None

    @property
    def stopped_by_text(self) -> bool:
        """Whether a stop string ended it, of which the device knows nothing."""
        return self._decoder is not None and self._decoder.stopped is not None

    def end(self, reason: str) -> None:
        """End it from outside, unless it has ended already."""
        self.reason = self.reason or reason

    def take(self, records: Sequence[Record]) -> Chunk:
        """The piece that these tokens add; tokens past the end are dropped."""
        kept: list[Record] = []
        text = ""
        for record in records:
            token = record.token
            self.count += 1
            kept.append(record)
            if token in self._ends:
                self.reason = "stop"
            elif self._decoder is not None:
                text += self._decoder.push(token)
                if self._decoder.stopped is not None:
                    self.reason = "stop"
            if self.reason is None and self.count >= self._max_tokens:
                self.reason = "length"
            if self.reason is not None:
                break
        # A constraint has taken just the tokens of these records and before.
        if self.reason in (None, "length") and self._constraint and self._constraint.complete:
            self.reason = "stop"
        logprobs = tuple(TokenLogprob(*record) for record in kept) if self._logprobs else None
        return Chunk(text, tuple(record.token for record in kept), logprobs=logprobs)

    def last(self, timings: Timings) -> Chunk:
        """What was held back, the reason and the timings."""
        text = self._decoder.finish() if self._decoder is not None else ""
        logprobs = () if self._logprobs else None
        return Chunk(text, (), self.reason or "length", timings, logprobs, self._seed)


def join(chunks: Iterable[Chunk]) -> Generation:
    """A whole answer from its pieces, of which the last has reason and timings."""
    pieces = list(chunks)
    last = pieces[-1]
    assert last.finish_reason is not None and last.timings is not None
    return Generation(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.token_ids),
        last.finish_reason,
        last.timings,
        join_logprobs(pieces),
        last.seed,
    )


def join_logprobs(pieces: Sequence[Chunk]) -> tuple[TokenLogprob, ...] | None:
    """The log-probabilities of all pieces; None when they were not asked for."""
    if pieces[-1].logprobs is None:
        return None
    return tuple(one for piece in pieces for one in piece.logprobs or ())
