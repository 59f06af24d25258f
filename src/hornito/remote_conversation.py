"""A conversation whose model runs on another machine, behind `hornito runner`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

from hornito.answer import Answer
from hornito.dialogue import ChatSettings, Dialogue, Turn, turn_timings
from hornito.errors import UsageError
from hornito.remote import ConnectionLostError, RemoteRefusal, RemoteRunner
from hornito.runtime.emitted import Record
from hornito.runtime.prefix import common_prefix
from hornito.runtime.results import Chunk
from hornito.text.side import TextSide
from hornito.text.vocabulary import vocabulary_of


class RemoteConversation(Dialogue):
    """A chat over a `RemoteRunner`; ended by `close()` or `with`.

    The runner keeps keys and values. Before each turn it is rewound to what its sequence has in
    common with the conversation's rendering, so that only the rest is sent and evaluated.

    Attributes:
        messages, system, settings, stats: as of `hornito.dialogue.Dialogue`. Of the settings only
            `max_tokens` and `stop` count: the runner's options say how tokens are chosen. What it
            writes beyond them is dropped.
    """

    def __init__(
        self,
        text: TextSide,
        runner: RemoteRunner,
        *,
        system: str | None = None,
        settings: ChatSettings | None = None,
        note: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Start a conversation, which ends the runner with `close`; so does a failure to start.

        The runner is asked for its model, so this waits until the model is loaded.

        Args:
            note: called with a warning where the runner can't say which model it has.

        Raises:
            UsageError: the runner's model has other words, or the template takes no system message.
            ConnectionLostError: the runner is gone.
        """
        super().__init__(text.tokenizer, text.template, settings)
        self._name = text.name
        self._ends = text.eos_ids
        self._runner = runner
        self._ids: list[int] = []  # the runner's sequence
        self._rest: Iterator[int] | None = None  # of an answer that was cut
        self._start = 0  # what the runner goes back to when it gives up a turn
        try:
            self.set_system(system)
            self._check_model(note)
        except BaseException:
            self.close()
            raise

    def _check_model(self, note: Callable[[str], object]) -> None:
        """Whether the runner's ids mean here what they mean there."""
        theirs = self._runner.model()
        if theirs is None or not theirs.sha256:
            note(
                "warning: the runner can't say which words its model has "
                + ("(it is older than this version)" if theirs is None else "(it has none)")
                + f"; with any other model than {self._name} behind it, answers are garbage"
            )
            return
        mine = vocabulary_of(self._tokenizer)
        if (theirs.vocabulary, theirs.sha256) != (mine.size, mine.sha256):
            raise UsageError(
                f"the models don't match: the runner has {theirs.name}, with a vocabulary of "
                f"{theirs.vocabulary} tokens (sha256 {theirs.sha256[:12]}), and {self._name} here "
                f"has {mine.size} ({mine.sha256[:12]}). Give `chat` the runner's model, or a "
                "copy of its package; only its tokenizer and chat template are read"
            )

    def __enter__(self) -> RemoteConversation:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """End the runner; a second call does nothing."""
        self._runner.close()

    @property
    def position(self) -> int:
        """Tokens of the runner's sequence."""
        return len(self._ids)

    def say(self, text: str) -> Iterator[Chunk]:
        """Answer a message, piece by piece; as `Conversation.say`.

        Raises:
            UsageError: the template refuses it, or the text is not valid Unicode.
            RemoteRefusal: the runner can't take it; the conversation is as it was.
            ConnectionLostError: the runner is gone.
        """
        ids = self._chat_ids(text)
        self._interrupted.clear()
        return self._answer(Turn(text, time.monotonic()), ids)

    def _answer(self, turn: Turn, ids: list[int]) -> Iterator[Chunk]:
        try:
            yield from self._pieces(turn, ids)
        finally:
            self._record(turn)

    def _pieces(self, turn: Turn, ids: list[int]) -> Iterator[Chunk]:
        self._finish_rest()
        kept = min(common_prefix(self._ids, ids), len(ids) - 1)
        self._rewind(kept)
        turn.reused, turn.evaluated = kept, len(ids) - kept
        answer = Answer(
            self._tokenizer,
            max_tokens=self.settings.max_tokens,
            stop=self.settings.stop,
            ends=self._ends,
            continuation=False,
        )
        self._start, self._rest = kept, self._runner.turn(ids[kept:])
        while (token := self._next(ids[kept:])) is not None:
            turn.prefilled = turn.prefilled or time.monotonic()
            turn.started = True
            turn.tokens += 1
            piece = answer.take([Record(token, 0.0)])
            turn.text.append(piece.text)
            yield piece
            if answer.ended() or self._interrupted.is_set():
                break
        if self._interrupted.is_set() and not answer.ended():
            answer.end("interrupted")
        last = answer.last(turn_timings(turn))
        turn.text.append(last.text)
        yield last

    def _next(self, given: Sequence[int]) -> int | None:
        """The next token of the answer; `given` goes before the first."""
        assert self._rest is not None
        try:
            token = next(self._rest, None)
        except RemoteRefusal:
            del self._ids[self._start :]
            self._rest = None
            raise
        if token is not None and token >= self._tokenizer.vocab_size:
            raise ConnectionLostError(
                f"the runner wrote token {token}, which is outside the vocabulary of "
                f"{self._tokenizer.vocab_size} of {self._name}: it has another model"
            )
        if len(self._ids) == self._start:
            self._ids += given
        if token is None:
            self._rest = None
        else:
            self._ids.append(token)
        return token

    def _finish_rest(self) -> None:
        """Read what a runner still had to say when its last answer was cut."""
        while self._rest is not None:
            self._next(())

    def _rewind(self, position: int) -> None:
        if position < len(self._ids):
            self._runner.rewind(position)
            del self._ids[position:]

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages.clear()
        self._finish_rest()
        self._rewind(0)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write system message and turns as JSON; returns 0: the KV cache stays with the runner."""
        self._write(path, {})
        return 0

    def load(self, path: str | os.PathLike[str]) -> str:
        """Take over system message and turns from a file of `save` or of `Conversation.save`.

        The next turn sends them all; so no reason to do without a KV cache is ever returned.

        Raises:
            FormatError: the file is damaged.
            UsageError: there is no such file, or this model's template refuses the messages.
        """
        self._read(path)
        return ""
