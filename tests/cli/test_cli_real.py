"""The command line on real devices, with real packages, and on a machine without a driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_samples import HF, tiny_vocabulary, write_checkpoint
from hornito.cli.main import main
from hornito.vk import api
from tiny import golden
from tree import own_cache

GOLDEN = golden("llama-tiny")
IDS = ",".join(map(str, GOLDEN.prompt))
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with own_cache(tmp_path_factory):
        yield


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("package") / "tiny.vxm"
    assert main(["compile", str(HF / "llama-tiny"), str(path), "--weights", "fp32"]) == 0
    return str(path)


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """llama-tiny as GGUF with a byte-level vocabulary and a chat template, compiled."""
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("text")
    source = write_checkpoint(folder / "m.gguf", "llama-tiny", vocabulary=tiny_vocabulary())
    assert main(["compile", str(source), str(folder / "m.vxm"), "--weights", "fp32"]) == 0
    return str(folder / "m.vxm")


def test_compile_reports_what_it_covered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "m.vxm", tmp_path / "report.json"
    command = ["compile", str(HF / "llama-tiny"), str(out), "--json"]
    assert main([*command, "--support-report", str(report)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tensors_used"] == data["tensors_in_file"] == 29
    assert data["bytes"] == out.stat().st_size and data["path"] == str(out)
    written = json.loads(report.read_text())
    assert written.items() >= data.items()
    nodes = written["support"]["nodes"]
    assert len(nodes) == data["nodes"] and {node["backend"] for node in nodes} == {"vulkan"}
    assert main(["verify", str(out)]) == 0


@pytest.mark.gpu
def test_ids_in_ids_out(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", package, "--ids", IDS, "--max-tokens", "32", "--ignore-eos"]
    command += ["--precision", "high", "--context", "512"]
    assert main(command) == 0
    assert capsys.readouterr().out == ",".join(map(str, GOLDEN.tokens)) + "\n"
    assert main([*command, "--show-ids", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["token_ids"] == GOLDEN.tokens and data["finish_reason"] == "length"
    assert data["prompt_tokens"] == 24 and data["decode_tokens"] == 31
    assert data["text"] == "" and data["model"] == package and data["device"]


@pytest.mark.gpu
def test_a_source_runs_as_its_package_does(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(HF / "llama-tiny"), "--ids", IDS, "--max-tokens", "5", "--ignore-eos"]
    assert main([*command, "--weights", "fp32", "--precision", "high"]) == 0
    assert capsys.readouterr().out == ",".join(map(str, GOLDEN.tokens[:5])) + "\n"


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_tokens(package: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", package, "--ids", IDS, "--max-tokens", str(count), "--ignore-eos"]
    assert main([*command, "--precision", "high"]) == 0
    assert capsys.readouterr().out == ",".join(map(str, GOLDEN.tokens[:count])) + "\n"


@pytest.mark.gpu
def test_stats_name_device_and_memory(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", package, "--ids", "5,6,7", "--max-tokens", "3", "--ignore-eos", "--stats"]
    assert main([*command, "--context", "128"]) == 0
    lines = capsys.readouterr().err.splitlines()
    text = "\n".join(lines)
    for part in ("device: ", "prompt: 3 tokens in ", "decode: 2 tokens in ", "(finish: length)"):
        assert part in text
    assert "context: 128 positions, precision normal, KV in fp16, 1 slot" in lines
    assert any(line.startswith("memory: ") and "KV 0." in line for line in lines)
    assert any("every tensor operation on the device" in line for line in lines)


@pytest.mark.gpu
def test_text_and_stop_strings(with_tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's weights are random, so its text is odd; a stop string cuts it all the same."""
    command = ["run", with_tokenizer, "hello world", "--precision", "high", "--ignore-eos"]
    command += ["--max-tokens", "24", "--json"]
    assert main(command) == 0
    chat = json.loads(capsys.readouterr().out)
    assert main([*command, "--raw"]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert len(chat["token_ids"]) == len(raw["token_ids"]) == 24
    assert chat["prompt_tokens"] > raw["prompt_tokens"] > 0
    text = raw["text"]
    stop = next(text[i : i + 2] for i in range(3, len(text)) if "\ufffd" not in text[i : i + 2])
    assert main([*command, "--raw", "--stop", "never in it", "--stop", stop]) == 0
    cut = json.loads(capsys.readouterr().out)
    assert cut["text"] == text[: text.index(stop)] and cut["finish_reason"] == "stop"
    assert cut["token_ids"] == raw["token_ids"][: len(cut["token_ids"])]
    assert len(cut["token_ids"]) < 24


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--ids", "512"], 2, "token id 512 is outside the vocabulary of 512"),
        (["hello"], 2, "has no tokenizer: give the prompt as token ids with --ids"),
        (["--ids", "1,2", "--weights", "fp16"], 2, "holds fp32 weights; compile its source again"),
        (["--ids", "1,2", "--stop", "x"], 2, "stop strings need a tokenizer"),
        (["--ids", "1,2", "--device", "no such gpu"], 4, "no such gpu"),
        (["--ids", "1,2,3,4,5", "--context", "4"], 1, "5 tokens; the context holds 4"),
    ],
)
def test_mistakes(
    package: str, more: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", package, *more]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


@pytest.mark.gpu
def test_options_may_stand_anywhere(
    with_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [["--max-tokens", "3"], ["--precision", "high"], ["--raw"]]
    found = set()
    for a, b, c in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        command = ["run", *options[a], with_tokenizer, *options[b], "hello", *options[c]]
        assert main([*command, "--show-ids"]) == 0
        found.add(capsys.readouterr().out)
    assert len(found) == 1


# -- SmolLM2 --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("smollm2") / "m.vxm"
    assert main(["compile", str(smollm2_gguf), str(path)]) == 0
    return str(path)


@pytest.mark.gpu
@pytest.mark.model
def test_an_answer_in_text(smollm2: str, kernels: None) -> None:
    """As a user types it: a process, its two streams, its exit code."""
    command = [sys.executable, "-m", "hornito", "run", smollm2, QUESTION, "--max-tokens", "24"]
    done = subprocess.run(
        [*command, "--context", "256", "--show-ids"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    text, ids, _ = done.stdout.split("\n")
    assert text == "The capital of France is Paris."
    assert ids.endswith(",2")
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
@pytest.mark.model
def test_stop_and_raw_text(smollm2: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", smollm2, "--max-tokens", "16", "--context", "256"]
    assert main([*command, QUESTION, "--stop", "Paris"]) == 0
    assert capsys.readouterr().out == "The capital of France is \n"
    assert main([*command, "The capital of France is", "--raw", "--stop", "."]) == 0
    assert capsys.readouterr().out.strip("\n").startswith(" Paris")


@pytest.mark.gpu
@pytest.mark.model
def test_interrupt(smollm2: str, kernels: None) -> None:
    """Ctrl-C in the middle of an answer ends with code 130 and no traceback."""
    import signal

    command = [sys.executable, "-m", "hornito", "run", smollm2, "Tell me a story."]
    process = subprocess.Popen(
        [*command, "--context", "512"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None and process.stdout.read(10)  # it is streaming
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"Traceback" not in stderr and b"rror" not in stderr


# -- no driver ------------------------------------------------------------------------------------


def without_driver(arguments: list[str], tmp_path: Path, variable: str) -> tuple[int, str, str]:
    """Runs a command whose loader finds no driver."""
    empty = tmp_path / "none.json"
    empty.write_text("{}")
    drop = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES", "HORNITO_DEVICE")
    env = {name: value for name, value in os.environ.items() if name not in drop}
    env[variable] = str(empty)
    done = subprocess.run(
        [sys.executable, "-m", "hornito", *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("variable", ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"])
@pytest.mark.parametrize("verb", ["devices", "devices --json", "run", "run --device software"])
def test_no_driver(package: str, tmp_path: Path, variable: str, verb: str) -> None:
    arguments = verb.split()
    if arguments[0] == "run":
        arguments += [package, "--ids", "1,2,3"]
    code, out, err = without_driver(arguments, tmp_path, variable)
    assert code == 4 and out == ""
    (line,) = err.splitlines()
    assert line.startswith("hornito: error: ") and "apt-get install" in line


def test_what_needs_no_driver(package: str, tmp_path: Path) -> None:
    """Compiling, inspecting and verifying touch no device."""
    out = tmp_path / "m.vxm"
    for arguments in (
        ["compile", str(HF / "llama-tiny"), str(out)],
        ["inspect", str(out)],
        ["verify", str(out)],
        ["--help"],
        ["run", "--help"],
    ):
        code, text, _ = without_driver(arguments, tmp_path, "VK_DRIVER_FILES")
        assert code == 0 and text, arguments


@pytest.mark.parametrize("verb", ["devices", "run"])
def test_no_loader(
    package: str,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not even libvulkan.so.1 is there."""
    monkeypatch.setitem(api._LIBRARIES, sys.platform, ("libvulkan-none.so.1",))
    monkeypatch.setattr("hornito.vk.instance._shared", {})
    more = [package, "--ids", "1,2,3"] if verb == "run" else []
    assert main([verb, *more]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "no Vulkan loader found (tried libvulkan-none.so.1)" in line
