"""The other end of `hornito runner`: a command's stdin and stdout as a sequence of tokens."""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hornito.errors import HornitoError, UsageError
from hornito.runner import END, ERROR, MODEL, REWIND

MOST_LINES = 8
"""Lines of stderr that an error shows."""

MOST_GREETING = 200
"""Lines on stdout before the first answer, which are a greeting of a machine in between."""

MOST_LINE_BYTES = 4096
"""Of a line on stdout: what is longer is none of a runner."""


_MODEL = re.compile(rf"{MODEL} vocabulary=(\d{{1,10}}) sha256=(-|[0-9a-f]{{64}}) name=(.*)")


@dataclass(frozen=True, slots=True)
class RunnerModel:
    """What a runner says of its model.

    Attributes:
        name: what it calls it.
        vocabulary: size of its vocabulary.
        sha256: of its words (`hornito.text.vocabulary`); '' where it has only ids.
    """

    name: str
    vocabulary: int
    sha256: str


class RemoteRefusal(HornitoError):
    """The runner can't do what a line asks; the next one works."""


class ConnectionLostError(HornitoError):
    """The runner is gone, or writes what is no line of the protocol."""


class RemoteRunner:
    """A runner that a command starts; ended by `close()` or `with`.

    Attributes:
        position: tokens of the runner's sequence, given and generated.
    """

    def __init__(self, command: str, note: Callable[[str], object] = lambda line: None) -> None:
        """Start the command.

        Args:
            command: words as in a shell, which is not used to run it.
            note: called with each line of its stderr, from another thread, and with what it writes
                to stdout before its first answer.

        Raises:
            UsageError: there is no such command.
        """
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"--via {command!r}: {error}") from error
        if not words:
            raise UsageError("--via needs a command, such as 'ssh pi hornito runner model.vxm'")
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise UsageError(f"--via: {words[0]} can't be started: {error.strerror}") from error
        self.position = 0
        self._note = note
        self._answered = False
        self._busy = False
        self._said: deque[str] = deque(maxlen=MOST_LINES)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> RemoteRunner:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """End the runner: its input ends, and it has a moment to leave."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:  # it went first, with a line that it never read
            self._process.kill()
        try:
            self._process.wait(timeout=0.1 if self._busy else 5)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._listener.join(timeout=5)
        self._process.stdout.close()

    def turn(self, ids: Sequence[int]) -> Iterator[int]:
        """Send ids and give what is generated, as it comes.

        Raises:
            RemoteRefusal: the runner can't; the sequence is what it was.
            ConnectionLostError: it is gone.
        """
        self._send(" ".join(map(str, ids)))
        count = 0
        for line in self._answer():
            if not line.isascii() or not line.isdigit():
                raise self._lost(f"wrote {line[:80]!r}, which is no line of the protocol")
            count += 1
            yield int(line)
        self.position += len(ids) + count

    def model(self) -> RunnerModel | None:
        """The model that the runner has; None: one of an older version, which can't say.

        Raises:
            ConnectionLostError: it is gone, or writes something else.
        """
        self._send(MODEL)
        try:
            lines = list(self._answer())
        except RemoteRefusal:
            return None
        found = _MODEL.fullmatch(lines[0]) if len(lines) == 1 else None
        if found is None:
            raise self._lost(f"answered {MODEL} with {' / '.join(lines)[:80]!r}")
        return RunnerModel(found[3], int(found[1]), found[2].removeprefix("-"))

    def rewind(self, position: int) -> None:
        """Keep the first `position` tokens of the sequence.

        Raises:
            RemoteRefusal, ConnectionLostError: as for `turn`.
        """
        self._send(f"{REWIND} {position}")
        for line in self._answer():
            raise self._lost(f"answered {REWIND} with {line[:80]!r}")
        self.position = position

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._busy = True
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._lost("hung up") from error

    def _answer(self) -> Iterator[str]:
        """The lines of an answer, without the last."""
        source = self._process.stdout
        assert source is not None
        refusal: str | None = None
        greeting = 0
        while raw := source.readline(MOST_LINE_BYTES):
            line = _printable(raw)
            if len(raw) == MOST_LINE_BYTES:
                raise self._lost(f"wrote a line that begins with {line[:40]!r} and has no end")
            if not raw.endswith(b"\n"):
                break  # cut in the middle of a line
            if line == END:
                self._answered, self._busy = True, False
                if refusal is not None:
                    raise RemoteRefusal(f"the runner says: {refusal}")
                return
            if refusal is not None:
                raise self._lost(f"wrote {line[:80]!r} behind an error")
            if line.startswith(f"{ERROR} "):
                refusal = line.removeprefix(f"{ERROR} ")
            elif self._answered or line.isdigit() or _MODEL.fullmatch(line):
                self._answered = True
                yield line
            elif greeting == MOST_GREETING:
                raise self._lost(
                    f"wrote {line[:80]!r} and {greeting} more lines that no runner has"
                )
            elif line:
                greeting += 1
                self._note(line)
        raise self._lost("hung up")

    def _listen(self) -> None:
        """Pass on what the command says to people."""
        assert self._process.stderr is not None
        with self._process.stderr as source:
            for raw in source:
                if line := _printable(raw):
                    self._said.append(line)
                    self._note(line)

    def _lost(self, what: str) -> ConnectionLostError:
        try:
            code: int | None = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            code = None
        self._listener.join(timeout=0.2)
        ended = "" if code is None else f" (exit code {code})"
        said = "".join(f"\n  {line}" for line in self._said)
        return ConnectionLostError(
            f"the connection to the runner is lost: the command {what}{ended}"
            + (f"; it said:{said}" if said else "; it said nothing")
        )


def _printable(raw: bytes) -> str:
    """A line without what steers a terminal: another machine wrote it."""
    text = raw.decode("utf-8", "replace").replace("\t", " ")
    return "".join(c for c in text if c.isprintable()).strip()
