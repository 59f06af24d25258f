"""`hornito chat MODEL`: a conversation on a terminal, or line by line from a pipe.

With `--via COMMAND` the model runs behind a command, and only its words are on this machine.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from hornito.cli.files import SNAPSHOT, expect
from hornito.cli.model import add_model, load_model
from hornito.cli.options import (
    add_option,
    add_overflow,
    add_prefix,
    add_sampling,
    overflow_keywords,
    positive_int,
    sampling_keywords,
)
from hornito.cli.output import rate
from hornito.cli.screen import Screen
from hornito.cli.settings import describe_settings, set_setting, setting_named
from hornito.errors import DeviceLostError, HornitoError, UsageError, size_text
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.conversation import Conversation
    from hornito.remote_conversation import RemoteConversation
    from hornito.runtime.results import Chunk

HELP = """\
/reset            forget the conversation (the system message stays)
/system [TEXT]    show or replace the system message; /system - removes it
/set [NAME VALUE] list all settings, or change one: temp (or temperature), top-k, seed ...
/stats            tokens reused, evaluated and generated; speed; device
/save FILE        write the conversation as JSON, and its KV cache to FILE.kv
/load FILE        take over a saved conversation, without evaluating it again
/help             this list
/bye              leave (as does Ctrl-D)
A message may span lines: between \"\"\" and \"\"\", or with a \\ at the end of a line.
Ctrl-C stops an answer; what has come of it stays in the conversation."""

FENCE = '"""'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    add_model(parser)
    add_option(parser, "--system", help="system message", metavar="TEXT")
    add_option(
        parser,
        "--max-tokens",
        type=positive_int,
        default=1024,
        help="tokens of an answer at most (default 1024)",
        metavar="N",
    )
    add_sampling(parser)
    add_overflow(parser)
    add_prefix(parser)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at TEXT; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end token")
    parser.add_argument(
        "--stats", action="store_true", help="print the speed of each answer on stderr"
    )
    add_option(
        parser,
        "--via",
        help="run the model behind COMMAND, such as 'ssh pi hornito runner m.vxm' (docs/runner.md)",
        metavar="COMMAND",
    )


#: Options that count with --via; the others are for the runner's command.
_VIA = {"model", "via", "system", "max_tokens", "stop", "stats"}


def run(arguments: argparse.Namespace) -> int:
    """Loads the model and talks until the input ends; 1 when a message got no answer."""
    from hornito.conversation import ChatSettings, Conversation
    from hornito.runtime.idle import IdleProof

    if getattr(arguments, "via", None) is not None:
        return _run_via(arguments)
    if arguments.prefix is not None:
        expect(arguments.prefix, SNAPSHOT)
    settings = ChatSettings(
        arguments.max_tokens,
        tuple(arguments.stop),
        arguments.ignore_eos,
        sampling_keywords(arguments),
        **overflow_keywords(arguments),
    )
    with TerminalProgress() as progress, load_model(arguments, progress) as llm:
        progress.finish()
        llm.prompt_progress = progress
        prefix = None if arguments.prefix is None else llm.load_prefix(arguments.prefix)
        with Conversation(
            llm, system=arguments.system, settings=settings, prefix=prefix
        ) as conversation:
            screen = Screen(sys.stdin, sys.stdout, sys.stderr, stats=arguments.stats)
            if screen.interactive:
                screen.note(f"{arguments.model} on {llm.device_line}")
                screen.note(f"context {llm.context} tokens; /help shows the commands")
            with IdleProof(llm.engine) as proof:
                return Chat(conversation, screen, proof.meanwhile).loop()


def _run_via(arguments: argparse.Namespace) -> int:
    """The model is elsewhere: tokenizer and template are read here, tokens come over the wire."""
    from hornito.dialogue import ChatSettings
    from hornito.remote import RemoteRunner
    from hornito.remote_conversation import RemoteConversation
    from hornito.text.side import open_text_side

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, value in vars(arguments).items():
        if name not in _VIA and value != parser.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is for the runner: give it in the command of --via")
    text = open_text_side(arguments.model)
    screen = Screen(sys.stdin, sys.stdout, sys.stderr, stats=arguments.stats)
    settings = ChatSettings(arguments.max_tokens, tuple(arguments.stop))
    runner = RemoteRunner(arguments.via, lambda line: screen.note(f"runner: {line}"))
    with RemoteConversation(
        text, runner, system=arguments.system, settings=settings, note=screen.note
    ) as conversation:
        if screen.interactive:
            screen.note(f"{arguments.model} via {arguments.via}; /help shows the commands")
        return Chat(conversation, screen).loop()


@dataclass(frozen=True, slots=True)
class Entry:
    """What was typed; a `command` is one line that begins with a slash, outside quotes."""

    text: str
    command: bool = False


def read_entry(read: Callable[[str], str | None]) -> Entry | None:
    """One message or command; None when the input has ended.

    A backslash at the end of a line joins the next one to it; everything between triple quotes is
    one message. Where the input ends inside a message, the message is what has come.
    """
    line = read(">>> ")
    if line is None:
        return None
    if line.lstrip().startswith(FENCE):
        return Entry(_fenced(line.lstrip()[len(FENCE) :], read))
    if line.startswith("/"):
        return Entry(line.strip(), command=True)
    lines = []
    while line is not None and line.endswith("\\"):
        lines.append(line[:-1])
        line = read("... ")
    return Entry("\n".join([*lines, *([] if line is None else [line])]))


def _fenced(first: str, read: Callable[[str], str | None]) -> str:
    lines: list[str] = []
    line: str | None = first
    while line is not None:
        if line.rstrip().endswith(FENCE):
            lines.append(line.rstrip().removesuffix(FENCE))
            break
        lines.append(line)
        line = read("... ")
    # The lines of the quotes themselves are no lines of the message.
    if lines and not lines[0]:
        lines.pop(0)
    if lines and not lines[-1]:
        lines.pop()
    return "\n".join(lines)


class Chat:
    """Reads messages and commands, prints answers.

    Args:
        meanwhile: what goes on while a message is typed; it ends before the model is used.
    """

    def __init__(
        self,
        conversation: Conversation | RemoteConversation,
        screen: Screen,
        meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._conversation = conversation
        self._screen = screen
        self._meanwhile = meanwhile
        self._failed = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/system": self._system,
            "/set": self._set,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
            "/help": self._help,
        }

    def loop(self) -> int:
        """Until the input ends or /bye; returns the exit code."""
        from hornito.remote import ConnectionLostError

        while True:
            try:
                with self._meanwhile():
                    entry = read_entry(self._screen.read)
            except KeyboardInterrupt:
                if not self._screen.interactive:
                    raise
                self._screen.note("\nCtrl-D or /bye leaves")
                continue
            if entry is None or (entry.command and entry.text in ("/bye", "/exit", "/quit")):
                return self._failed
            try:
                self._one(entry)
            except (DeviceLostError, ConnectionLostError):
                raise
            except HornitoError as error:
                self._screen.error(str(error))
                self._failed = error.exit_code
            except OSError as error:
                self._screen.error(str(error))
                self._failed = 1

    def _one(self, entry: Entry) -> None:
        if not entry.command:
            if entry.text.strip():
                self._answer(entry.text)
            return
        word, _, rest = entry.text.partition(" ")
        if word in self._commands:
            self._commands[word](rest.strip())
            return
        setting = setting_named(word.removeprefix("/"))
        close = difflib.get_close_matches(word, [*self._commands, "/bye"], 1)
        hint = "/help lists them"
        if setting is not None:
            hint = f"it is a setting: /set {setting} {rest.strip() or 'VALUE'}"
        elif close:
            hint = f"did you mean {close[0]}? {hint}"
        raise UsageError(
            f"unknown command {word}; {hint}. (To send a text that begins with /, put it "
            'between """)'
        )

    def _answer(self, text: str) -> None:
        conversation, screen = self._conversation, self._screen
        last: Chunk | None = None
        chunks = conversation.say(text)
        try:
            with interrupting(conversation.interrupt), screen.metered() as count:
                for last in chunks:
                    screen.write(last.text)
                    count(len(last.token_ids))
        finally:
            if last is not None:  # what has come ends in a line of its own
                screen.write("\n")
        if last is None or last.timings is None:
            raise HornitoError("the answer ended without a finish reason")
        if last.finish_reason == "interrupted":
            screen.note("(stopped)")
        elif last.finish_reason == "length":
            screen.note(self._why_cut())
        if screen.stats:
            timings = last.timings
            evaluated = timings.prompt_tokens - timings.reused_tokens
            screen.note(
                f"{rate(timings.decode_tokens, timings.decode_seconds)}; prompt: "
                f"{timings.reused_tokens} reused, {rate(evaluated, timings.prompt_seconds)}"
            )

    def _why_cut(self) -> str:
        conversation = self._conversation
        limit = conversation.settings.max_tokens
        if conversation.stats.last_tokens < limit:
            return self._context_full()
        return f"(cut at {limit} tokens; /set max-tokens {2 * limit} allows more)"

    def _context_full(self) -> str:
        local = self._local
        if local is None:
            return (
                "(the runner ended it: at its --max-tokens, or where its context is full; /reset "
                "starts over)"
            )
        context = local.llm.context
        more = ", --context holds more" if context < local.llm.model_context else ""
        return (
            f"(the context of {context} tokens is full; /reset starts over{more}, and --overflow "
            "truncate goes on with the end)"
        )

    @property
    def _local(self) -> Conversation | None:
        """The conversation, when its model runs here."""
        from hornito.conversation import Conversation

        found = self._conversation
        return found if isinstance(found, Conversation) else None

    # -- commands ---------------------------------------------------------------------------

    def _reset(self, rest: str) -> None:
        _nothing("/reset", rest)
        self._conversation.reset()
        self._screen.note("the conversation is empty")

    def _system(self, rest: str) -> None:
        if not rest:
            text = self._conversation.system
            self._screen.note("no system message of yours is set" if text is None else text)
            return
        self._conversation.set_system(None if rest == "-" else rest)
        self._screen.note("system message removed" if rest == "-" else "system message set")

    def _set(self, rest: str) -> None:
        settings = self._conversation.settings
        only = () if self._local is not None else ("max-tokens", "stop")
        name, _, value = rest.partition(" ")
        if name:
            set_setting(settings, name, value.strip(), only)
        for line in describe_settings(settings, only):
            self._screen.note(line)

    def _stats(self, rest: str) -> None:
        _nothing("/stats", rest)
        conversation, stats, local = self._conversation, self._conversation.stats, self._local
        held = f"{conversation.position} of {local.llm.context}" if local else conversation.position
        lines = [
            f"turns: {stats.turns}; {held} tokens in the KV cache",
            f"prompt: {stats.reused_tokens} tokens reused, "
            f"{rate(stats.evaluated_tokens, stats.prompt_seconds)} evaluated",
            f"answers: {rate(stats.generated_tokens, stats.decode_seconds)}",
        ]
        if local is not None:
            lines += [f"device: {local.llm.device_line}", local.llm.plan_summary()]
        self._screen.note("\n".join(lines))

    def _save(self, rest: str) -> None:
        path = _file("/save", rest)
        size = self._conversation.save(path)
        count = len(self._conversation.messages)
        held = f", and their KV cache ({size_text(size)}) to {path}.kv" if size else ""
        if self._local is None:
            held = "; their KV cache stays with the runner"
        self._screen.note(f"saved {count} messages{held}")

    def _load(self, rest: str) -> None:
        reason = self._conversation.load(_file("/load", rest))
        self._screen.note(f"loaded {len(self._conversation.messages)} messages")
        if reason:
            self._screen.note(
                f"the next message evaluates them again, for their KV cache can't be used: {reason}"
            )

    def _help(self, rest: str) -> None:
        self._screen.note(HELP)


def _nothing(command: str, rest: str) -> None:
    if rest:
        raise UsageError(f"{command} takes nothing behind it, not '{rest}'")


def _file(command: str, rest: str) -> str:
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise UsageError(f"{command} FILE: {error}") from error
    if len(words) != 1:
        raise UsageError(f"{command} takes one FILE (in quotes when it has spaces)")
    return words[0]


@contextmanager
def interrupting(interrupt: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `interrupt` in here; a second one is a KeyboardInterrupt after all."""

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        interrupt()

    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, handler)
    except ValueError:  # not the main thread: signals go elsewhere
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
