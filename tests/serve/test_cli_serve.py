"""`hornito serve` as a process: what it prints, how it ends, what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from hornito.cli.main import main
from hornito.serve import server as server_module
from serving import parse_events, texts
from tree import ROOT

pytestmark = pytest.mark.gpu


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its URL, and the lines on stderr so far."""
    command = [sys.executable, "-m", "hornito", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                # Everything behind is read, so that the process never waits for us.
                rest = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
                rest.start()
                yield process, found[1], lines
                process.kill()
                rest.join()
                return
        raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.wait()


def test_sigterm_lets_answers_finish(text_model: Path, tmp_path: Path) -> None:
    """The running answer comes to its end, no new one begins, and the exit code is 0."""
    arguments = [str(text_model), "--context", "512", "--slots", "1", "--temp", "0"]
    prefix = tmp_path / "prefix.safetensors"
    system = tmp_path / "system.txt"
    system.write_text("You are a lamp. " * 3)
    command = ["cache", "save", str(text_model), str(prefix), "--system-file", str(system)]
    assert main([*command, "--context", "512"]) == 0
    arguments += ["--prefix", str(prefix), "--name", "mine"]
    with started(*arguments) as (process, url, lines):
        chat = [{"role": "system", "content": system.read_text()}]
        asked = {"model": "mine", "messages": [*chat, {"role": "user", "content": "hi"}]}
        usage = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 10
        assert httpx.get(f"{url}/health", timeout=60).json()["status"] == "ok"
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "mine"
        body = {"model": "mine", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60
        ) as answer:
            pieces = answer.iter_text()
            text = next(pieces)
            process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        events = parse_events(text)
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
        assert len(texts(events)) > 300
        assert process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    text = "".join(lines)
    assert "requests without a temperature: 0\n" in text
    assert "every tensor operation on the device" in text and "Traceback" not in text
    assert "warning: everyone" not in text and "/v1, model 'mine')" in text


def test_ctrl_c(text_model: Path) -> None:
    arguments = [str(text_model), "--host", "0.0.0.0", "--queue", "2", "--log"]
    with started(*arguments) as (process, url, lines):
        port = url.rpartition(":")[2]
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).raise_for_status()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stdout is not None and process.stdout.read() == ""
    assert any("--api-key KEY" in line for line in lines)
    assert any("GET /health" in line for line in lines)
    assert "requests without a temperature: 1 (`hornito run` has 0: --temp 0)\n" in lines
    assert "Traceback" not in "".join(lines)


def test_ctrl_c_again_and_again(text_model: Path) -> None:
    """It waits for no answer, but every client is told, and the device is closed in order."""
    with started(str(text_model), "--context", "4096", "--slots", "1") as (process, url, lines):
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}
        waiting: list[httpx.Response] = []
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60
        ) as answer:
            pieces = answer.iter_text()
            text = next(pieces)
            other = threading.Thread(
                target=lambda: waiting.append(
                    httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                )
            )
            other.start()
            while not httpx.get(f"{url}/health", timeout=60).json()["waiting"]:
                pass
            for _ in range(3):
                process.send_signal(signal.SIGINT)
                time.sleep(0.1)
            text += "".join(pieces)
        other.join()
        assert parse_events(text)[-1]["error"]["code"] == "unavailable"
        assert waiting[0].status_code == 503
        # The last one may come when Python has ended, and ends the process itself.
        assert process.wait(60) in (130, -signal.SIGINT)
    assert "Traceback" not in "".join(lines)


def test_an_interrupt_waits_for_the_service_to_close() -> None:
    """What comes next closes the device, which threads of the service may be using until then."""
    closed: list[bool] = []

    class Stub:
        def routes(self) -> list[object]:
            return []

        def close(self) -> None:
            signal.raise_signal(signal.SIGINT)
            closed.append(True)

    server = server_module.Server(Stub(), server_module.Address(port=0))  # type: ignore[arg-type]
    server.stop()
    with pytest.raises(KeyboardInterrupt):
        server.run()
    assert closed == [True]


def test_connections_before_the_loop_starts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is announced as listening refuses nobody, however late the loop starts."""
    monkeypatch.setattr(server_module, "make_app", lambda *_, **__: None)
    server = server_module.Server(None, server_module.Address(port=0))  # type: ignore[arg-type]
    try:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=5):
            assert not server.started
    finally:
        server._socket.close()


def test_errors_before_anything_is_loaded(
    text_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(text_model), "--port", str(port)]) == 2
    assert f"can't listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert main(["serve", str(text_model), "--port", "0", "--cors-origin", "*"]) == 2
    assert "not *" in capsys.readouterr().err
    assert main(["serve", str(text_model), "--port", "0", "--tokenizer", "t.json"]) == 2
    assert "--tokenizer is for encoders" in capsys.readouterr().err
    assert main(["serve", "no-such-model", "--port", "0"]) == 2
    assert main(["serve", str(text_model), "--port", "0", "--slots", "17"]) == 2
    assert "up to 16 answers" in capsys.readouterr().err
    assert main(["serve", str(text_model), "--port", "70000"]) == 2
    assert "from 0 to 65535" in capsys.readouterr().err


def test_without_the_extra(
    text_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "hornito.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(text_model)]) == 2
    shown = capsys.readouterr().err
    assert "uvicorn is missing" in shown and "pip install 'hornito[serve]'" in shown


def test_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A package of tensors that encodes text is served as one."""
    onnx = pytest.importorskip("onnx")
    assert onnx
    from serve_samples import write_encoder
    from tensor.models import bert_tiny, save

    assert main(["serve", str(save(bert_tiny(), tmp_path)), "--port", "0"]) == 2
    assert "served as a package" in capsys.readouterr().err
    write_encoder(tmp_path)
    package = str(tmp_path / "bert.vxm")
    assert main(["serve", package, "--port", "0", "--precision", "low"]) == 2
    assert "--precision low is for decoders" in capsys.readouterr().err
    with started(package) as (process, url, lines):
        answer = httpx.post(
            f"{url}/v1/embeddings", json={"model": "bert", "input": ["a cat", "a"]}, timeout=60
        )
        assert [len(one["embedding"]) for one in answer.json()["data"]] == [48, 48]
        process.terminate()
        assert process.wait(60) == 0
    assert any("encoder of 48 numbers" in line for line in lines)


def test_examples(text_model: Path) -> None:
    pytest.importorskip("openai")
    pytest.importorskip("llguidance")
    found = sorted((ROOT / "examples").glob("openai_*.py"))
    assert [path.stem for path in found] == [
        f"openai_{name}" for name in ("chat", "json_schema", "stream", "tools")
    ]
    with started(str(text_model), "--name", "model", "--context", "2048") as (_, url, _lines):
        for path in found:
            done = subprocess.run(
                [sys.executable, str(path), f"{url}/v1", "hello"],
                capture_output=True,
                text=True,
                timeout=120,
                env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip() and len(path.read_text().splitlines()) <= 40


def test_the_benchmark(text_model: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "serve_clients.py"), str(text_model)]
    command += ["--clients", "1", "3", "--tokens", "12", "--prompt", "20", "--context", "128"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["clients"] for row in report["rows"]] == [1, 3]
    assert all(row["tokens"] == 12 * row["requests"] for row in report["rows"])
