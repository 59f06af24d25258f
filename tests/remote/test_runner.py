"""`hornito runner`: the protocol of docs/runner.md, in process, as a process, over an odd pipe."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hornito
from hornito.api import LLM
from hornito.cli.main import main
from hornito.errors import DeviceLostError
from hornito.remote import RemoteRefusal, RemoteRunner
from hornito.runner import Runner
from hornito.runtime.idle import IdleProof
from proofs import prove_while_waiting, wait_for
from text_model import write_text_model
from tree import own_cache

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, kernels: None) -> Iterator[Path]:
    with own_cache(tmp_path_factory):
        yield write_text_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with hornito.load(
        model, weights="fp32", precision="high", context=128, slots=2, eos_ids=[400]
    ) as loaded:
        yield loaded


class Driven:
    """A runner in this process."""

    def __init__(self, llm: LLM, **keywords: object) -> None:
        self.out = io.StringIO()
        self.runner = Runner(llm, self.out, {"max_tokens": 6, **keywords})  # type: ignore[typeddict-item]

    def __call__(self, line: str) -> list[str]:
        """The lines that answer a line, without END."""
        at = len(self.out.getvalue())
        self.runner.serve([line.encode()])
        lines = self.out.getvalue()[at:].split("\n")
        assert lines[-2:] == ["END", ""]
        return lines[:-2]


@pytest.fixture
def drive(llm: LLM) -> Iterator[Driven]:
    driven = Driven(llm)
    yield driven
    driven.runner.close()


def continued(llm: LLM, ids: list[int], count: int = 6) -> list[str]:
    return [str(t) for t in llm.generate(ids, max_tokens=count).token_ids]


def test_turns_go_on_from_each_other(llm: LLM, drive: Driven) -> None:
    """The second turn is that of one long prompt, of which only the new ids are evaluated."""
    first = drive("5 6  7\t8\r\n")
    assert first == continued(llm, [5, 6, 7, 8])
    assert drive.runner.position == 4 + len(first)
    before = llm.engine.counters.evaluated_tokens
    second = drive("9 10\n")
    assert llm.engine.counters.evaluated_tokens - before <= 3 + len(second)
    assert second == continued(llm, [5, 6, 7, 8, *map(int, first), 9, 10])


@pytest.mark.software
def test_kernels_are_proved_while_a_line_is_awaited(
    llm: LLM,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A load has no time for them; the answers are the same before, amid and after."""
    proofs: list[IdleProof] = []
    states: list[bool] = []

    def begun(proof: IdleProof) -> None:
        proofs.append(proof)
        states.append(proof.done)

    class Slow(io.BytesIO):
        """Waits before its third line."""

        lines = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            self.lines += 1
            if self.lines == 3:
                wait_for(proofs[0])
            return super().readline()

    prove_while_waiting(monkeypatch, tmp_path, begun)
    source = Slow(b"5 6 7\nREWIND 0\n5 6 7\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(source))
    command = ["runner", str(model), "--max-tokens", "6", "--context", "128", "--eos", "400"]
    assert main([*command, "--weights", "fp32", "--precision", "high"]) == 0
    first, rewound, again, rest = capsys.readouterr().out.split("END\n")
    assert first.split() == again.split() == continued(llm, [5, 6, 7])
    assert rewound == rest == ""
    assert states == [False] and proofs[0].done and proofs[0]._engine.trust.complete


@pytest.mark.parametrize(
    ("line", "reason"),
    (
        ("\n", "this one is empty"),
        ("5 x 6\n", "not 'x'"),
        ("-5\n", "not '-5'"),
        ("5,6\n", "not '5,6'"),
        ("5 99999\n", "outside the vocabulary of 512"),
        ("5 " * 200 + "\n", "context has 128"),
        ("\xff\n", "whole numbers"),
        ("REWIND\n", "takes one position"),
        ("REWIND 1 2\n", "takes one position"),
        ("REWIND 99\n", "has 10 tokens"),
    ),
)
def test_a_turn_that_cannot_run_changes_nothing(
    llm: LLM, drive: Driven, line: str, reason: str
) -> None:
    first = drive("5 6 7 8\n")
    answer = drive(line)
    assert len(answer) == 1 and answer[0].startswith("ERR ") and reason in answer[0]
    assert drive.runner.position == 10
    assert drive("9 10\n") == continued(llm, [5, 6, 7, 8, *map(int, first), 9, 10])


def test_a_turn_that_fails_half_way_is_taken_back(
    llm: LLM, drive: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = drive("5 6 7 8\n")
    real = llm.stream_session

    def failing(*arguments: object, **keywords: object) -> Iterator[object]:
        chunks = real(*arguments, **keywords)  # type: ignore[arg-type]
        yield next(chunks)
        raise hornito.HornitoError("two\nlines")

    with monkeypatch.context() as patch:
        patch.setattr(llm, "stream_session", failing)
        assert drive("9\n")[-1] == "ERR two lines"
    assert drive("9 10\n") == continued(llm, [5, 6, 7, 8, *map(int, first), 9, 10])


def test_a_lost_device_is_answered_and_ends_the_runner(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(llm)

    def lost(*arguments: object, **keywords: object) -> Iterator[object]:
        raise DeviceLostError("gone")
        yield

    monkeypatch.setattr(llm, "stream_session", lost)
    with pytest.raises(DeviceLostError):
        driven("5\n")
    assert driven.out.getvalue() == "ERR gone\nEND\n"
    driven.runner.close()


def test_a_driver_may_ask_for_the_model(llm: LLM) -> None:
    """Size, hash of the words, name; the sequence is what it was."""
    driven = Driven(llm)
    driven.runner._name = "my \udcff\nmodel"
    driven("5 6\n")
    (line,) = driven("MODEL\r\n")
    assert re.fullmatch(r"MODEL vocabulary=512 sha256=[0-9a-f]{64} name=my \\udcff model", line)
    assert driven("MODEL 1\n")[0].startswith("ERR ") and driven.runner.position == 8
    driven.runner.close()


def test_rewind(llm: LLM, drive: Driven) -> None:
    """Back into what was given, into what was generated, to the start, and nowhere."""
    first = drive("5 6 7 8\n")
    assert drive("REWIND 10\n") == [] and drive.runner.position == 10
    assert drive("REWIND 6\n") == [] and drive.runner.position == 6
    assert drive("9\n") == continued(llm, [5, 6, 7, 8, *map(int, first[:2]), 9])
    assert drive("REWIND 0\r\n") == [] and drive.runner.position == 0
    assert drive("5 6 7 8\n") == first


def test_the_end_of_the_context_ends_an_answer(llm: LLM) -> None:
    driven = Driven(llm, max_tokens=500)
    answer = driven(" ".join(str(5 + i) for i in range(100)))
    assert 0 < len(answer) <= 29 and driven.runner.position <= 129
    assert driven("5\n")[0].startswith("ERR ")
    driven.runner.close()


def test_end_ids_of_the_caller(model: Path, llm: LLM) -> None:
    """An id that the model emits may be made an end; it is part of the answer."""
    answer = continued(llm, [5, 6, 7, 8])
    end = int(answer[2])
    with hornito.load(model, weights="fp32", precision="high", context=128, eos_ids=[end]) as other:
        assert continued(other, [5, 6, 7, 8]) == answer[: answer.index(str(end)) + 1]
    with pytest.raises(hornito.HornitoError, match="eos_ids names token 512"):
        hornito.load(model, weights="fp32", context=128, eos_ids=[512])


def command(model: Path, *options: str) -> list[str]:
    run = [sys.executable, "-m", "hornito", "runner", str(model), "--weights", "fp32"]
    return [*run, "--precision", "high", "--context", "128", *options]


def test_as_a_process(model: Path, llm: LLM) -> None:
    """stdout has the protocol alone; stderr what is for people; the end of stdin is the end."""
    lines = "5 6 7 8\nnonsense\n9 10\n"
    options = ("--max-tokens", "6", "--eos", "400", "--fp32-tensors", "layer0*")
    done = subprocess.run(
        command(model, *options), input=lines, capture_output=True, text=True, check=False
    )
    first = continued(llm, [5, 6, 7, 8])
    second = continued(llm, [5, 6, 7, 8, *map(int, first), 9, 10])
    words = done.stdout.split("\n")
    assert words[:7] == [*first, "END"]
    assert words[7].startswith("ERR ") and words[8] == "END"
    assert words[9:] == [*second, "END", ""]
    assert done.returncode == 0 and "ready: " in done.stderr
    assert "fp32 operands: layer0" in done.stderr and "Traceback" not in done.stderr


def test_wrong_options_say_so(model: Path) -> None:
    for options, said in (
        (("--fp32-tensors", "nothing*"), "matches none"),
        (("--eos", "4000"), "names token 4000"),
        (("--top-k", "3"), "needs a temperature"),
    ):
        done = subprocess.run(
            command(model, *options), input="", capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and said in done.stderr and done.stdout == ""


def test_a_pipe_that_splits_lines_at_odd_places(model: Path, llm: LLM) -> None:
    """Pieces of a few bytes, carriage returns, a greeting: the tokens are the same."""
    notes: list[str] = []
    words = [sys.executable, str(HERE / "odd_pipe.py"), *command(model, "--max-tokens", "6")]
    first = continued(llm, [5, 6, 7, 8])
    with RemoteRunner(" ".join(words), notes.append) as remote:
        assert [str(t) for t in remote.turn([5, 6, 7, 8])] == first
        assert remote.position == 4 + len(first)
        with pytest.raises(RemoteRefusal, match="outside the vocabulary"):
            list(remote.turn([99999]))
        with pytest.raises(RemoteRefusal, match="has 10 tokens"):
            remote.rewind(99)
        remote.rewind(4)
        assert [str(t) for t in remote.turn([9])] == continued(llm, [5, 6, 7, 8, 9])
        assert remote.position == 11
    assert "Welcome to the board 7" in notes
    assert any("ready: " in note for note in notes)
    assert os.environ.get("HORNITO_CACHE")
