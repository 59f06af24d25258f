"""A conversation apart from what answers it: messages, settings, files."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hornito.errors import FormatError, UsageError
from hornito.runtime.overflow import REFUSE, Overflow
from hornito.runtime.results import Timings
from hornito.runtime.sampler import SamplingKeywords

if TYPE_CHECKING:
    from hornito.text.template import ChatTemplate
    from hornito.text.tokenizer import Tokenizer

FORMAT = "hornito-chat"
VERSION = 1


@dataclass(slots=True)
class ChatSettings:
    """How answers are made; each turn takes the values of its time.

    Attributes:
        max_tokens: new tokens of an answer at most.
        stop: strings that end an answer.
        ignore_eos: go on past end tokens.
        sampling: how tokens are chosen, as for `LLM.stream`; earlier turns count as prompt.
        overflow: what happens when the conversation outgrows the context; with `truncate` only the
            first and last tokens of its rendering are evaluated.
    """

    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    sampling: SamplingKeywords = field(default_factory=SamplingKeywords)
    overflow: Overflow | str = REFUSE


@dataclass(slots=True)
class ChatStats:
    """Sums over the turns of a conversation.

    Attributes:
        turns: answers, interrupted ones included.
        reused_tokens: prompt tokens that were in the KV cache already.
        evaluated_tokens: prompt tokens that had to be evaluated.
        generated_tokens: of the answers.
        last_tokens: of the last answer.
    """

    turns: int = 0
    reused_tokens: int = 0
    evaluated_tokens: int = 0
    generated_tokens: int = 0
    last_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(slots=True)
class Turn:
    """What one turn has brought so far."""

    user: str
    began: float
    prefilled: float | None = None
    text: list[str] = field(default_factory=list)
    tokens: int = 0
    evaluated: int = 0
    reused: int = 0
    started: bool = False


class Dialogue:
    """Messages in order, and the template that makes token ids of them.

    Attributes:
        messages: user and assistant turns in order; the system message is `system`.
        system: text of the system message, or None for the template's own default.
        settings: may be changed between turns.
        stats: counters.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, settings: ChatSettings | None
    ) -> None:
        self.settings = settings or ChatSettings()
        self.stats = ChatStats()
        self.messages: list[dict[str, str]] = []
        self.system: str | None = None
        self._tokenizer = tokenizer
        self._template = template
        self._interrupted = threading.Event()

    def interrupt(self) -> None:
        """End the answer in progress at its next piece; may be called from a signal handler."""
        self._interrupted.set()

    def _chat_ids(self, text: str) -> list[int]:
        """Token ids of the conversation with one more message of the user."""
        from hornito.text.template import encode_chat

        messages = self._all({"role": "user", "content": text})
        return encode_chat(self._tokenizer, self._template, messages)

    def _all(self, *more: dict[str, str]) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.messages, *more]

    def _record(self, turn: Turn) -> None:
        """Keep what a turn brought."""
        ended = time.monotonic()
        prefilled = turn.prefilled if turn.prefilled is not None else ended
        self.stats.reused_tokens += turn.reused
        self.stats.evaluated_tokens += turn.evaluated
        self.stats.generated_tokens += turn.tokens
        self.stats.last_tokens = turn.tokens
        self.stats.prompt_seconds += prefilled - turn.began
        self.stats.decode_seconds += ended - prefilled
        if turn.started:
            self.stats.turns += 1
            self.messages.append({"role": "user", "content": turn.user})
            self.messages.append({"role": "assistant", "content": "".join(turn.text)})

    def set_system(self, text: str | None) -> None:
        """Replace the system message; the next turn evaluates the conversation under it.

        Raises:
            UsageError: the model's template takes none; the old one stays.
        """
        before, self.system = self.system, text
        try:
            self._check_template()
        except BaseException:
            self.system = before
            raise

    def _check_template(self) -> None:
        """Whether the template takes the conversation with one more message."""
        self._template.render(self._all({"role": "user", "content": "."}))

    def _write(self, path: str | os.PathLike[str], more: Mapping[str, Any]) -> None:
        """Write system message and turns as JSON, and more fields beside them."""
        data = {"format": FORMAT, "version": VERSION, "messages": self._all(), **more}
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        Path(path).expanduser().write_text(text, encoding="utf-8")

    def _read(self, path: str | os.PathLike[str]) -> Mapping[str, Any]:
        """Take over system message and turns from a file, and return its other fields.

        When something is wrong, the conversation stays as it was.

        Raises:
            FormatError: the file is damaged.
            UsageError: there is no such file, or this model's template refuses the messages.
        """
        messages, more = read_conversation(Path(path).expanduser())
        before = self.system, self.messages
        first = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        self.system, self.messages = first, messages[first is not None :]
        try:
            self._check_template()
        except BaseException:
            self.system, self.messages = before
            raise
        return more


def read_conversation(path: Path) -> tuple[list[dict[str, str]], Mapping[str, Any]]:
    """The messages of a saved conversation or of a JSON list, and what else the file has."""
    from hornito.text.template import checked_messages, text_messages

    more: Mapping[str, Any] = {}
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}") from error
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no saved conversation: {error}") from error
    if isinstance(data, dict):
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise FormatError(
                f"{path} is no saved conversation of version {VERSION}: format "
                f"{data.get('format')!r}, version {data.get('version')!r}"
            )
        more, data = data, data.get("messages")
    if not isinstance(data, list):
        raise FormatError(f"{path} holds no list of messages")
    try:
        messages = text_messages(checked_messages(data)) if data else []
    except UsageError as error:
        raise FormatError(f"{path}: {error}") from error
    return messages, more


def turn_timings(turn: Turn) -> Timings:
    """Of a turn that ends now."""
    now = time.monotonic()
    prefilled = turn.prefilled if turn.prefilled is not None else now
    return Timings(
        turn.reused + turn.evaluated,
        prefilled - turn.began,
        max(turn.tokens - 1, 0),
        now - prefilled,
        turn.reused,
    )
