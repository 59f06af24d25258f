"""`hornito runner`: token ids in, token ids out (docs/runner.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from hornito.errors import DeviceLostError, HornitoError, UsageError

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.request import AnswerKeywords

END = "END"
ERROR = "ERR"
REWIND = "REWIND"
MODEL = "MODEL"


def model_line(name: str, llm: LLM) -> str:
    """The answer to `MODEL`: size and hash of the vocabulary, and what the model is called."""
    from hornito.text.vocabulary import vocabulary_of

    words = vocabulary_of(llm.tokenizer) if llm.has_tokenizer else None
    size = llm.engine.vocabulary if words is None else words.size
    digest = "-" if words is None else words.sha256
    shown = " ".join(name.split()).encode("ascii", "backslashreplace").decode()
    return f"{MODEL} vocabulary={size} sha256={digest} name={shown}"


class Runner:
    """One sequence of tokens, driven by lines of text.

    Attributes:
        position: tokens of the sequence, given and generated.
    """

    def __init__(self, llm: LLM, out: TextIO, keywords: AnswerKeywords, name: str = "") -> None:
        """Begin an empty sequence; it takes a slot of the model until `close`.

        Args:
            out: where answers are written, a line at a time.
            keywords: length and choice of tokens, as for `LLM.stream`.
            name: what the model is called, for a driver that asks.
        """
        self._llm = llm
        self._out = out
        self._keywords = keywords
        self._name = name
        self._session = llm.session()
        self._last: int | None = None  # generated, and not evaluated yet

    def close(self) -> None:
        """Give the slot back."""
        self._session.close()

    @property
    def position(self) -> int:
        """Tokens of the sequence, the newest generated one included."""
        return self._session.position + (self._last is not None)

    def serve(self, lines: Iterable[bytes]) -> None:
        """Answer every line until the input ends.

        Raises:
            DeviceLostError: the device is gone; the line was answered.
        """
        for line in lines:
            try:
                self._line(line)
            except HornitoError as error:
                self._write(f"{ERROR} {' '.join(str(error).split())}")
                self._write(END)
                if isinstance(error, DeviceLostError):
                    raise
            else:
                self._write(END)

    def _write(self, line: str) -> None:
        self._out.write(f"{line}\n")
        self._out.flush()

    def _line(self, line: bytes) -> None:
        words = line.split()
        if words[:1] == [REWIND.encode()]:
            self._rewind(words[1:])
        elif words == [MODEL.encode()]:
            self._write(model_line(self._name, self._llm))
        else:
            self._turn(_numbers(words, "a turn"))

    def _turn(self, ids: list[int]) -> None:
        """Evaluate ids behind the sequence and write what follows, token by token."""
        session, last = self._session, self._last
        start = session.position
        if not ids:
            raise UsageError("a turn is a line of token ids, and this one is empty")
        given = ids if last is None else [last, *ids]
        try:
            for chunk in self._llm.stream_session(session, given, **self._keywords):
                for token in chunk.token_ids:
                    self._write(str(token))
            self._last = session.pending
        except DeviceLostError:
            raise
        except HornitoError:
            # As if the turn had not been, whatever of it was evaluated.
            session.rewind(start, refill=True)
            self._last = last
            raise

    def _rewind(self, words: list[bytes]) -> None:
        """Forget everything from a position on."""
        numbers = _numbers(words, REWIND)
        if len(numbers) != 1:
            raise UsageError(f"{REWIND} takes one position")
        position = numbers[0]
        if position > self.position:
            raise UsageError(f"can't rewind to {position}: the sequence has {self.position} tokens")
        if position == self.position:
            return
        self._session.rewind(position, refill=True)
        self._last = None


def _numbers(words: list[bytes], what: str) -> list[int]:
    for word in words:
        if not word.isdigit() or len(word) > 10:
            shown = word[:40].decode("utf-8", "replace")
            raise UsageError(f"{what} takes whole numbers, not {shown!r}")
    return [int(word) for word in words]
