"""A conversation that stays in the KV cache: each turn evaluates only what is new."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hornito.errors import ContextOverflowError, FormatError, UsageError
from hornito.plan_summary import room_advice
from hornito.runtime.overflow import REFUSE, Overflow
from hornito.runtime.prefix import start_from_prefix
from hornito.runtime.results import Chunk, Timings
from hornito.runtime.sampler import SamplingKeywords
from hornito.streaming import telling

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.runtime.snapshot import Snapshot

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
    """

    turns: int = 0
    reused_tokens: int = 0
    evaluated_tokens: int = 0
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(slots=True)
class _Turn:
    """What one turn has brought so far."""

    user: str
    began: float
    prefilled: float | None = None
    text: list[str] = field(default_factory=list)
    tokens: int = 0
    evaluated: int = 0
    reused: int = 0
    started: bool = False


class Conversation:
    """A chat with a model, in one session of it; ended by `close()` or `with`.

    The template turns all messages into token ids at every turn. What these have in common with the
    session stays in the KV cache, the rest is evaluated. So a template may change earlier turns
    (drop the thinking of old answers, say) and the result is still that of a fresh start.

    Attributes:
        llm: the model.
        messages: user and assistant turns in order; the system message is `system`.
        system: text of the system message, or None for the template's own default.
        settings: may be changed between turns.
        stats: counters.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        settings: ChatSettings | None = None,
        prefix: Snapshot | None = None,
    ) -> None:
        """Start a conversation; it takes a slot of the model until `close`.

        Args:
            prefix: of `LLM.prefill_chat`, or loaded from a file that was made from one: the
                conversation begins with its messages, and needs not evaluate them.

        Raises:
            UsageError: the model has no chat template, its template takes no system message, or the
                prefix has no messages or a system message beside `system`.
            SessionError: no slot is free.
        """
        if not llm.has_chat_template:
            raise UsageError(
                "this model has no chat template, so it can't chat; complete text with "
                '`hornito run MODEL "text"` or generate()'
            )
        self.llm = llm
        self.settings = settings or ChatSettings()
        self.stats = ChatStats()
        self.messages: list[dict[str, str]] = []
        self._prefix = prefix  # while it lives, turns start from it
        self._prompt: Snapshot | None = None
        given = _prefix_messages(prefix)
        if given and given[0]["role"] == "system":
            if system is not None:
                raise UsageError("the prefix has a system message already")
            system = given.pop(0)["content"]
        self.messages += given
        self.system: str | None = None
        self._interrupted = threading.Event()
        self._session = llm.session()
        try:
            self.set_system(system)
        except BaseException:
            self._session.close()
            raise

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the slot back; a second call does nothing."""
        self._session.close()
        self._forget_prompt()

    @property
    def position(self) -> int:
        """Tokens in the KV cache."""
        return self._session.position

    # -- turns ------------------------------------------------------------------------------

    def say(self, text: str) -> Iterator[Chunk]:
        """Answer a message, piece by piece.

        The last piece has the finish reason: `stop`, `length` or `interrupted`. An answer that is
        cut short (`interrupt`, or closing the iterator) stays in the conversation as far as it got;
        when nothing had come yet, the message is dropped too.

        Raises:
            ContextOverflowError: the conversation does not fit; it is as it was before.
            UsageError: the template refuses it, or the text is not valid Unicode.
        """
        ids = self.llm.chat_ids(self._all({"role": "user", "content": text}))
        context = self.llm.context
        overflow = Overflow.of(self.settings.overflow)
        if len(ids) >= context and overflow.policy == "error":
            raise ContextOverflowError(
                f"with this message the conversation has {len(ids)} tokens; the context holds "
                f"{context}, answer included. {room_advice(self.llm, len(ids) + 1)}; or start over "
                "(/reset), shorten the message, or have the conversation shortened (--overflow "
                "truncate, or overflow=Overflow('truncate'))",
                tokens=len(ids),
                context=context,
            )
        overflow.check(context)
        self._interrupted.clear()
        return self._answer(text, ids)

    def interrupt(self) -> None:
        """End the answer in progress at its next piece; may be called from a signal handler."""
        self._interrupted.set()

    def _answer(self, text: str, ids: list[int]) -> Iterator[Chunk]:
        turn = _Turn(text, time.monotonic())
        try:
            yield from self._pieces(turn, ids)
        finally:
            self._record(turn)

    def _pieces(self, turn: _Turn, ids: list[int]) -> Iterator[Chunk]:
        session, settings = self._session, self.settings
        overflow = Overflow.of(settings.overflow)
        if overflow.applies(len(ids), self.llm.context):
            ids = [ids[at] for at in overflow.kept(len(ids), self.llm.context)]
        turn.reused = reused = start_from_prefix(session, ids)
        rest = self._prefill_all_but_last_chunk(turn, ids[reused:])
        if not self._interrupted.is_set():
            chunks = self.llm.stream_session(
                session,
                rest,
                max_tokens=settings.max_tokens,
                stop=settings.stop,
                ignore_eos=settings.ignore_eos,
                continuation=False,
                overflow=overflow,
                **settings.sampling,
            )
            turn.evaluated += len(rest)
            for chunk in chunks:
                if turn.prefilled is None:
                    turn.prefilled = time.monotonic()
                    self._keep_prompt()
                turn.started = True
                turn.tokens += len(chunk.token_ids)
                turn.text.append(chunk.text)
                if chunk.finish_reason is not None:
                    yield replace(chunk, timings=_timings(turn))
                    return
                yield chunk
                if self._interrupted.is_set():
                    break
        yield Chunk("", (), "interrupted", _timings(turn))

    def _keep_prompt(self) -> None:
        """Where windows free keys, hold on to the prompt's end: the next turn starts there when the
        template gives the answer other ids than the model did."""
        if any(pool.kind.window for pool in self.llm.engine.pools):
            self._forget_prompt()
            self._prompt = self._session.snapshot()

    def _forget_prompt(self) -> None:
        before, self._prompt = self._prompt, None
        if before is not None:
            before.release()

    def _prefill_all_but_last_chunk(self, turn: _Turn, ids: list[int]) -> list[int]:
        """Evaluate a long prompt in calls that an interrupt can come between; returns the rest."""
        session = self._session
        buckets = self.llm.engine.plan.buckets
        most = max((rows for kind, rows in buckets if kind == "chunk"), default=1)
        many = len(ids) > most - session.position % most
        with telling(self.llm.prompt_progress if many else None, len(ids)) as tell:
            while not self._interrupted.is_set():
                # The same cuts that one call would make, so that the bits are the same.
                size = most - session.position % most
                if len(ids) <= size:
                    break
                session.prefill(ids[:size], evaluated=tell)
                turn.evaluated += size
                ids = ids[size:]
        return ids

    def _record(self, turn: _Turn) -> None:
        """Keep what the turn brought."""
        ended = time.monotonic()
        prefilled = turn.prefilled if turn.prefilled is not None else ended
        self.stats.reused_tokens += turn.reused
        self.stats.evaluated_tokens += turn.evaluated
        self.stats.generated_tokens += turn.tokens
        self.stats.prompt_seconds += prefilled - turn.began
        self.stats.decode_seconds += ended - prefilled
        if turn.started:
            self.stats.turns += 1
            self.messages.append({"role": "user", "content": turn.user})
            self.messages.append({"role": "assistant", "content": "".join(turn.text)})

    def _all(self, *more: dict[str, str]) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.messages, *more]

    # -- what the conversation holds --------------------------------------------------------

    def reset(self) -> None:
        """Forget all turns and the KV cache; the system message stays."""
        self.messages.clear()
        self._session.rewind(0)
        self._forget_prompt()

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
        self.llm.render_chat(self._all({"role": "user", "content": "."}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write system message and turns as JSON."""
        data = {"format": FORMAT, "version": VERSION, "messages": self._all()}
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        Path(path).expanduser().write_text(text, encoding="utf-8")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over system message and turns from a file of `save`, or a JSON list of messages.

        The next turn evaluates them. When something is wrong, the conversation stays as it was.

        Raises:
            FormatError: the file is damaged.
            UsageError: there is no such file, or this model's template refuses the messages.
        """
        messages = read_messages(Path(path).expanduser())
        before = self.system, self.messages
        first = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        self.system, self.messages = first, messages[first is not None :]
        try:
            self._check_template()
        except BaseException:
            self.system, self.messages = before
            raise


def _prefix_messages(prefix: Snapshot | None) -> list[dict[str, str]]:
    if prefix is None:
        return []
    prefix.check()
    if not prefix.messages:
        raise UsageError(
            "this prefix was made from plain text; a chat needs one of messages (`hornito cache "
            "save MODEL FILE --system-file FILE`, LLM.prefill_chat)"
        )
    return [dict(message) for message in prefix.messages]


def read_messages(path: Path) -> list[dict[str, str]]:
    """The messages of a saved conversation; see `Conversation.load`."""
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
        data = data.get("messages")
    if not isinstance(data, list):
        raise FormatError(f"{path} holds no list of messages")
    for i, message in enumerate(data):
        parts = [message.get(k) for k in ("role", "content")] if isinstance(message, dict) else []
        if len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise FormatError(f"{path}: message {i} is not {{'role': text, 'content': text}}")
    return [{"role": message["role"], "content": message["content"]} for message in data]


def _timings(turn: _Turn) -> Timings:
    now = time.monotonic()
    prefilled = turn.prefilled if turn.prefilled is not None else now
    return Timings(
        turn.reused + turn.evaluated,
        prefilled - turn.began,
        max(turn.tokens - 1, 0),
        now - prefilled,
        turn.reused,
    )
