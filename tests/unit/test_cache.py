"""Names of cached models, and what a MODEL argument means. No device."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hornito import cache, compiler
from hornito.cli.main import main
from hornito.errors import UsageError

A = "0" * 16
B = "1" * 16


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def add_package(name: str, age: float = 0.0, size: int = 1000) -> Path:
    path = cache.models_directory() / f"{name}.vxm"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    cache.note_use(path, Path("/models/x.gguf"))
    when = time.time() - age
    os.utime(path.with_name(path.name + ".json"), (when, when))
    return path


def add_download(name: str, *files: str, complete: bool = True) -> Path:
    folder = cache.hub_directory() / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file).write_bytes(b"x")
    if complete:
        (folder / cache.MARKER).write_text(json.dumps({"files": list(files)}))
    return folder


def test_the_shortest_name_that_means_one(root: Path) -> None:
    add_package(f"one-fp16-{A}", age=50)
    add_package(f"two-fp16-{A}", age=40)
    add_package(f"two-fp32-{A}", age=30)
    add_package(f"three-fp16-{A}", age=20)
    add_package(f"three-fp16-{B}", age=10)
    names = [model.name for model in cache.list_models()]
    # The one used last comes first.
    assert names == [f"three-fp16-{B}", f"three-fp16-{A}", "two-fp32", "two-fp16", "one"]
    for name in names:
        (found,) = cache.find(name)
        assert found.name == name
    assert len(cache.find("two")) == 2 and cache.find("nothing") == []
    (chosen,) = cache.find("two", "fp32")
    assert chosen.name == "two-fp32"
    with pytest.raises(
        UsageError, match=r"means 2 .*say which: two-fp32 \(from /models/x\.gguf\), two"
    ):
        cache.resolve_model("two")
    assert cache.resolve_model("two", "fp16").name == f"two-fp16-{A}.vxm"
    assert cache.resolve_model("one").name == f"one-fp16-{A}.vxm"


def test_the_bare_name_stays_with_the_default_weights(root: Path) -> None:
    """A package of other weights beside it, before or after, changes no name that worked."""
    add_package(f"m-default-{A}", age=30)
    assert [model.name for model in cache.list_models()] == ["m"]
    assert cache.resolve_model("m").name == f"m-default-{A}.vxm"
    add_package(f"m-fp32-{A}", age=20)
    assert [model.name for model in cache.list_models()] == ["m-fp32", "m"]
    assert cache.list_models()[1].other_names == ("m-default", f"m-default-{A}")
    for name in ("m", "m-default"):
        assert cache.resolve_model(name).name == f"m-default-{A}.vxm"
    assert cache.resolve_model("m", "fp32").name == f"m-fp32-{A}.vxm"
    assert [model.name for model in cache.remove(["m"])] == ["m"]
    # Now one alone has the name; the longer one goes on working.
    (left,) = cache.list_models()
    assert (left.name, left.other_names[0]) == ("m", "m-fp32")
    # Two sources with the default weights: nobody can tell.
    add_package(f"m-default-{A}")
    add_package(f"m-default-{B}")
    with pytest.raises(UsageError, match="means 3 cached models"):
        cache.resolve_model("m")
    assert cache.DEFAULT == compiler.DEFAULT


def test_a_path_comes_before_a_name(root: Path, tmp_path: Path) -> None:
    add_package(f"m-fp16-{A}")
    assert cache.resolve_model("m").parent == cache.models_directory()
    (tmp_path / "m").write_text("")
    assert cache.resolve_model("m") == Path("m")


def test_downloads(root: Path) -> None:
    folder = add_download("org/model", "config.json", "model.safetensors")
    assert cache.resolve_model("org/model") == folder
    single = add_download("org/gguf", "a.gguf")
    assert cache.resolve_model("org/gguf") == single / "a.gguf"
    both = add_download("org/both", "a.gguf", "b.gguf")
    with pytest.raises(UsageError, match=r"say which: org/both/a\.gguf, org/both/b\.gguf"):
        cache.resolve_model("org/both")
    assert cache.resolve_model("org/both/b.gguf") == both / "b.gguf"
    with pytest.raises(UsageError, match=r"hornito pull org/both --file c\.gguf"):
        cache.resolve_model("org/both/c.gguf")
    add_download("org/part", "config.json", complete=False)
    with pytest.raises(UsageError, match="incomplete; run `hornito pull org/part` again"):
        cache.resolve_model("org/part")


def test_what_is_not_there_says_what_to_do(root: Path) -> None:
    with pytest.raises(UsageError, match="run `hornito pull org/name`"):
        cache.resolve_model("org/name")
    with pytest.raises(UsageError, match=r"run `hornito pull org/name --file x\.gguf`"):
        cache.resolve_model("org/name/x.gguf")
    with pytest.raises(UsageError, match="the cache is empty"):
        cache.resolve_model("nothing")
    for path in ("../x", "folder/m.gguf", "/no/such", "org/../x"):
        with pytest.raises(UsageError, match="no file or folder") as caught:
            cache.resolve_model(path)
        assert "pull" not in str(caught.value)
    add_package(f"smollm-fp16-{A}")
    with pytest.raises(UsageError, match="did you mean 'smollm'"):
        cache.resolve_model("smolm")


def test_remove(root: Path) -> None:
    kept = add_package(f"kept-fp16-{A}")
    gone = add_package(f"gone-fp16-{A}")
    add_download("org/model", "config.json")
    with pytest.raises(UsageError, match="no cached model is called 'nothing'"):
        cache.remove(["gone", "nothing"])
    assert gone.exists()  # all or nothing
    removed = cache.remove(["gone", "org/model", "gone"])
    assert [model.name for model in removed] == ["gone", "org/model"]
    assert not gone.exists() and not gone.with_name(gone.name + ".json").exists()
    assert not (cache.hub_directory() / "org").exists()
    assert kept.exists() and [m.name for m in cache.list_models()] == ["kept"]


def test_removal_stays_inside_the_cache(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("")
    folder = add_download("org/link", "config.json")
    (folder / "linked").symlink_to(outside)
    cache.remove(["org/link"])
    assert (outside / "precious").exists()
    for name in ("../outside", str(outside)):
        with pytest.raises(UsageError):
            cache.remove([name])


def test_verbs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert capsys.readouterr().out.startswith(f"no models in {root}; ")
    add_package(f"m-fp16-{A}", age=7300, size=2_500_000)
    add_download("org/model", "config.json")
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "kind", "size", "weights", "last", "use", "source"]
    assert lines[1].split()[:2] == ["org/model", "downloaded"] and "just now" in lines[1]
    assert lines[2].split()[:5] == ["m", "compiled", "2.5", "MB", "fp16"]
    assert "2 hours ago" in lines[2] and lines[2].endswith("/models/x.gguf")
    assert lines[-1].endswith(f"in {root}; `hornito rm NAME` frees it")
    assert main(["list", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["cache"] == str(root) and [m["name"] for m in data["models"]] == ["org/model", "m"]
    assert main(["rm", "m"]) == 0
    assert capsys.readouterr().out == "removed m (2.5 MB)\n"
    assert main(["rm", "--all", "--json"]) == 0
    assert [m["name"] for m in json.loads(capsys.readouterr().out)["removed"]] == ["org/model"]
    assert main(["rm", "--all"]) == 0
    assert capsys.readouterr().out == "the cache holds no models\n"
    assert main(["rm", "m"]) == 2


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("org/name", True),
        ("Qwen/Qwen2.5-0.5B_x", True),
        ("name", False),
        ("a/b/c", False),
        ("../x", False),
        ("a/..", False),
        ("a/b..c", False),
        ("-a/b", False),
        ("a /b", False),
    ],
)
def test_repository_names(name: str, valid: bool) -> None:
    assert cache.is_repository(name) == valid


def test_a_damaged_note_is_said(root: Path) -> None:
    path = add_package(f"m-fp16-{A}")
    path.with_name(path.name + ".json").write_text("{")
    assert cache.list_models()[0].source == "unknown (damaged note)"
    path.with_name(path.name + ".json").unlink()
    assert cache.list_models()[0].source == "unknown"
