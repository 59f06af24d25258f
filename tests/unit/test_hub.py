"""`hornito pull` against a stand-in of the hub on loopback."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gguf_samples import HF
from hornito.cache import MARKER, hub_directory, list_models, resolve_model
from hornito.cli.main import main
from hornito.errors import HornitoError, UsageError
from hornito.hub import choose_files, pull
from hub_server import COMMIT, Hub, serve

pytest.importorskip("huggingface_hub")

TINY = {path.name: path.read_bytes() for path in (HF / "llama-tiny").iterdir()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    repositories = {
        "org/tiny": {
            **TINY,
            "README.md": b"#",
            "pytorch_model.bin": b"x",
            "onnx/model.safetensors": b"x",
        },
        "org/gguf": {"a-Q4.gguf": b"GGUF4", "a-Q8.gguf": b"GGUF8", "README.md": b"#"},
        "org/one": {"m.gguf": b"GGUF"},
        "org/none": {"README.md": b"#"},
    }
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with serve(repositories) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_pull_and_find(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "org/tiny"]) == 0
    captured = capsys.readouterr()
    folder = hub_directory() / "org/tiny"
    wanted = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(name for _, name in hub.downloads) == wanted
    for name in wanted:
        assert (folder / name).read_bytes() == TINY[name]
    assert captured.out.splitlines()[1] == "next: hornito run org/tiny"
    assert "fetching 3/3 model.safetensors" in captured.err
    assert json.loads((folder / MARKER).read_text())["revision"] == COMMIT
    assert resolve_model("org/tiny") == folder
    (entry,) = list_models()
    assert (entry.name, entry.kind) == ("org/tiny", "downloaded")
    assert main(["compile", "org/tiny", str(folder / "x.vxm")]) == 0
    assert main(["compile", "org/nothing", str(folder / "x.vxm")]) == 2
    assert "hornito pull org/nothing" in capsys.readouterr().err


@pytest.mark.gpu
def test_run_what_was_pulled(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "org/tiny"]) == 0
    capsys.readouterr()
    assert main(["run", "org/tiny", "--ids", "1,2,3", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.count(",") == 2
    assert {m.name for m in list_models()} == {"org/tiny", "tiny"}


def test_nothing_is_fetched_twice(hub: Hub) -> None:
    pull("org/tiny")
    first = len(hub.downloads)
    pulled = pull("org/tiny", revision=COMMIT)
    assert len(hub.downloads) == first and pulled.revision == COMMIT


def test_one_gguf_file(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull("org/one").files == ["m.gguf"]
    with pytest.raises(UsageError, match=r"2 GGUF files; choose one with --file: a-Q4\.gguf, a-Q8"):
        pull("org/gguf")
    assert main(["pull", "org/gguf", "--file", "a-Q4.gguf", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["name"] == "org/gguf/a-Q4.gguf" and data["bytes"] == 5
    assert resolve_model("org/gguf").name == "a-Q4.gguf"
    pull("org/gguf", file="a-Q8.gguf")
    assert resolve_model("org/gguf/a-Q4.gguf").read_bytes() == b"GGUF4"
    note = json.loads((hub_directory() / "org/gguf" / MARKER).read_text())
    assert note["files"] == ["a-Q4.gguf", "a-Q8.gguf"]


def test_what_can_not_be_pulled(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["org/nothing"], "has no repository org/nothing that you can see"),
        (["org/none"], "neither safetensors with a config.json nor a GGUF file"),
        (["org/gguf", "--file", "z.gguf"], "has no file z.gguf; GGUF files: a-Q4.gguf, a-Q8.gguf"),
        (["org/tiny", "--file", "config.json"], "--file takes a GGUF file"),
        (["org/tiny", "--revision", "v9"], "has no revision v9"),
        (["../x/y"], "is no repository name"),
    ):
        assert main(["pull", *arguments]) == 2
        assert message in capsys.readouterr().err
    hub.gated.add("org/tiny")
    assert main(["pull", "org/tiny"]) == 2
    assert "is gated: accept its licence at" in capsys.readouterr().err
    assert list_models() == []


def test_a_download_that_breaks_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits before it retries
    hub.broken.add("model.safetensors")
    with pytest.raises(HornitoError, match="run `hornito pull org/tiny` again") as caught:
        pull("org/tiny")
    assert caught.value.exit_code == 1
    (entry,) = list_models()
    assert entry.source == "org/tiny (incomplete)"
    with pytest.raises(UsageError, match="incomplete"):
        resolve_model("org/tiny")
    hub.broken.clear()
    pull("org/tiny")
    assert (resolve_model("org/tiny") / "model.safetensors").read_bytes() == TINY[
        "model.safetensors"
    ]


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HornitoError, match=r"could not be fetched from http://127\.0\.0\.1:9"):
        pull("org/tiny")


def test_the_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.split(".")[0] == "huggingface_hub":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'hornito\[hub\]'"):
        pull("org/tiny")


def test_files_of_a_checkpoint() -> None:
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "flax_model.msgpack",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
        "LICENSE",
    ]
    assert choose_files("o/r", files, None) == sorted(files[:7])
    many = [f"m-{i}.gguf" for i in range(30)]
    with pytest.raises(UsageError, match="and 10 more"):
        choose_files("o/r", many, None)
