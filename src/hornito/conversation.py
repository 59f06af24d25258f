"""A conversation that stays in the KV cache: each turn evaluates only what is new."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hornito.dialogue import ChatSettings as ChatSettings
from hornito.dialogue import Dialogue, Turn, turn_timings
from hornito.errors import (
    ContextOverflowError,
    DeviceMemoryError,
    FormatError,
    SessionError,
    UsageError,
)
from hornito.runtime.overflow import Overflow, room_advice
from hornito.runtime.prefix import start_from_prefix
from hornito.runtime.results import Chunk
from hornito.streaming import telling

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.runtime.snapshot import Snapshot


class Conversation(Dialogue):
    """A chat with a model, in one session of it; ended by `close()` or `with`.

    The template turns all messages into token ids at every turn. What these have in common with the
    session stays in the KV cache, the rest is evaluated. So a template may change earlier turns
    (drop the thinking of old answers, say) and the result is still that of a fresh start.

    Attributes:
        llm: the model.
        messages, system, settings, stats: as of `hornito.dialogue.Dialogue`.
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
        super().__init__(llm.tokenizer, llm.chat_template, settings)
        self.llm = llm
        self._prefix = prefix  # while it lives, turns start from it
        self._prompt: Snapshot | None = None
        given = _prefix_messages(prefix)
        if given and given[0]["role"] == "system":
            if system is not None:
                raise UsageError("the prefix has a system message already")
            system = given.pop(0)["content"]
        self.messages += given
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
        ids = self._chat_ids(text)
        context = self.llm.context
        overflow = Overflow.of(self.settings.overflow)
        if len(ids) >= context and overflow.policy == "error":
            advice = room_advice(self.llm.engine, len(ids) + 1, self.settings.max_tokens)
            raise ContextOverflowError(
                f"with this message the conversation has {len(ids)} tokens; the context holds "
                f"{context}, answer included. {advice}; or start over "
                "(/reset), shorten the message, or have the conversation shortened (--overflow "
                "truncate, or overflow=Overflow('truncate'))",
                tokens=len(ids),
                context=context,
            )
        overflow.check(context)
        self._interrupted.clear()
        return self._answer(text, ids)

    def _answer(self, text: str, ids: list[int]) -> Iterator[Chunk]:
        turn = Turn(text, time.monotonic())
        try:
            yield from self._pieces(turn, ids)
        finally:
            self._record(turn)

    def _pieces(self, turn: Turn, ids: list[int]) -> Iterator[Chunk]:
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
                    yield replace(chunk, timings=turn_timings(turn))
                    return
                yield chunk
                if self._interrupted.is_set():
                    break
        yield Chunk("", (), "interrupted", turn_timings(turn))

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

    def _prefill_all_but_last_chunk(self, turn: Turn, ids: list[int]) -> list[int]:
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

    # -- what the conversation holds --------------------------------------------------------

    def reset(self) -> None:
        """Forget all turns and the KV cache; the system message stays."""
        self.messages.clear()
        self._session.rewind(0)
        self._forget_prompt()

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write system message and turns as JSON, and the KV cache beside it, in `path`.kv.

        Returns:
            the bytes of the KV cache's file; 0 when nothing is evaluated yet, and there is none.
        """
        if not self._session.position:
            self._write(path, {})
            return 0
        where = _kv_file(path)
        with self._session.snapshot() as snapshot:
            size = snapshot.save(where)
        self._write(path, {"kv": where.name})
        return size

    def load(self, path: str | os.PathLike[str]) -> str:
        """Take over system message and turns from a file of `save`, or a JSON list of messages.

        With the KV cache that `save` wrote beside it, the next turn evaluates only what is new;
        without, all of it. When something is wrong, the conversation stays as it was.

        Returns:
            why the KV cache is not used, when the file names one; else an empty text.

        Raises:
            FormatError: the file is damaged.
            UsageError: there is no such file, or this model's template refuses the messages.
        """
        more = self._read(path)
        self._forget_prompt()
        return self._load_kv(path, more)

    def _load_kv(self, path: str | os.PathLike[str], more: Mapping[str, Any]) -> str:
        if "kv" not in more:
            return ""
        where = _kv_file(path)
        if not where.is_file():
            return f"there is no file {where}"
        try:
            self._session.load(where)
        except (SessionError, FormatError, DeviceMemoryError, UsageError) as error:
            return str(error)
        return ""


def _kv_file(path: str | os.PathLike[str]) -> Path:
    """Where the KV cache of a saved conversation lies."""
    where = Path(path).expanduser()
    return where.with_name(f"{where.name}.kv")


def _prefix_messages(prefix: Snapshot | None) -> list[dict[str, str]]:
    if prefix is None:
        return []
    prefix.check()
    if not prefix.messages:
        raise UsageError(
            "this prefix was made from plain text, or of calls of functions; a chat needs one of "
            "messages (`hornito cache save MODEL FILE --system-file FILE`, LLM.prefill_chat)"
        )
    return [dict(message) for message in prefix.messages]
