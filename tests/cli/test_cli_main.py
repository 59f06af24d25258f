"""The command as a process and in process: help, exit codes, errors, streams."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hornito
from hornito.cli.main import VERBS, main
from hornito.cli.options import positive_int, token_ids
from hornito.package import write_package


def command(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "hornito", *arguments], input=stdin, capture_output=True, check=False
    )


def test_module_and_help() -> None:
    done = command("--help")
    assert done.returncode == 0 and done.stderr == b""
    for verb in VERBS:
        assert f"  {verb}".encode() in done.stdout
    assert command("--version").stdout.decode() == f"hornito {hornito.__version__}\n"


def test_help_imports_no_verb_and_no_heavy_module() -> None:
    code = (
        "import sys; from hornito.cli.main import main; main(['--help']);"
        "print([m for m in ('numpy', 'rich', 'tokenizers', 'jinja2', 'safetensors', 'ctypes')"
        " if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: hornito {verb}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rum"], "unknown verb 'rum': did you mean 'run'?"),
        (["zzzz"], "unknown verb 'zzzz': verbs are compile, run"),
        (["run"], "the following arguments are required: MODEL; see `hornito run --help`"),
        (["run", "no/such/m"], "there is no file or folder no/such/m"),
        (["run", "m", "hi", "--ids", "1"], "give one of PROMPT"),
        (["run", "m", "hi", "--prompt-file", "f"], "give one of PROMPT"),
        (["run", "m", "--json"], "--json needs a prompt"),
        (["rm"], "give either NAMEs or --all"),
        (["rm", "a", "--all"], "give either NAMEs or --all"),
        (["pull", "nonsense"], "'nonsense' is no repository name"),
        (["run", "m", "hi", "--temp", "-1"], "--temp must be from 0 to 100, not -1"),
        (["run", "m", "hi", "--temp", "nan"], "--temp must be from 0 to 100, not nan"),
        (["run", "m", "hi", "--top-k", "40"], "--top-k needs a temperature"),
        (["chat", "m", "--temp", "1", "--top-p", "0"], "--top-p must be above 0 and at most 1"),
        (["run", "m", "hi", "--logit-bias", "5"], "'5' is not ID=VALUE"),
        (["run", "m", "hi", "--seed", "-1"], "'-1' is no whole number from 0"),
        (["run", "m", "hi", "--kv", "int8"], "'int8' is none of fp32, fp16"),
        (["run", "m", "hi", "--max-tokens", "0"], "'0' is no whole number from 1"),
        (["run", "m", "--ids", "1,x"], "'x' is no token id"),
        (["run", "m", "hi", "--no-such"], "unrecognized arguments: --no-such"),
        (["inspect", "/nonexistent.vxm"], "can't open /nonexistent.vxm: No such file"),
    ],
)
def test_usage_errors(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hornito: error: ") and message in captured.err
    assert captured.err.count("\n") == 1


def test_no_verb_prints_help_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("usage: hornito VERB")


def test_environment_twins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HORNITO_MAX_TOKENS", "many")
    assert main(["run", "m", "hi"]) == 2
    assert "variable HORNITO_MAX_TOKENS: 'many' is no whole number" in capsys.readouterr().err


def test_stdin_must_be_utf8() -> None:
    done = command("run", "m", "-", stdin=b"caf\xe9")
    assert done.returncode == 2 and b"stdin is not UTF-8" in done.stderr


def test_interrupt_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(path: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hornito.cli.inspect.open_package", interrupt)
    assert main(["inspect", "m.vxm"]) == 130
    assert capsys.readouterr().err == "\nhornito: interrupted\n"


def test_closed_pipe_is_quiet(tmp_path: Path) -> None:
    tensors = [(f"w{i}", "U8", (1,), lambda: b"x") for i in range(3000)]
    path = tmp_path / "m.vxm"
    write_package(path, {}, {}, tensors, {}, {}, {}, {}, {})
    process = subprocess.Popen(
        [sys.executable, "-m", "hornito", "inspect", "--json", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1


def test_value_types() -> None:
    assert token_ids("1,2 3, 4") == [1, 2, 3, 4]
    assert positive_int("17") == 17


def test_unknown_options_get_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m.vxm", "hi", "--max-token", "5"]) == 2
    assert "did you mean --max-tokens?" in capsys.readouterr().err
    assert main(["run", "m.vxm", "hi", "--xyzzy"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_names_keep_their_case_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, text in (
        ("profile", "Show where the GPU's time goes, by kernel."),
        ("chat", "Talk to a model, keeping the conversation in its KV cache."),
    ):
        assert main([verb, "--help"]) == 0
        assert text in " ".join(capsys.readouterr().out.split())
