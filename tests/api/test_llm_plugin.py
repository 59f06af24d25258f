"""Hornito's models in the `llm` command-line tool."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hornito
from hornito.compiler import compile_cached
from text_model import write_text_model
from tree import ROOT

llm = pytest.importorskip("llm", reason="the package llm is not installed")


def test_the_entry_point_names_the_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["llm"] == {"hornito": "hornito.llm_plugin"}


@pytest.fixture(scope="module")
def plugin(
    text_model: Path, private_cache: Path, kernels: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The module, registered, with the tiny model in the cache; models are closed at the end."""
    patch = pytest.MonkeyPatch()
    patch.setenv("LLM_USER_PATH", str(tmp_path_factory.mktemp("llm")))
    hornito.load(text_model, weights="fp32", precision="high", context=128).close()
    from llm.plugins import load_plugins, pm

    from hornito import llm_plugin

    load_plugins()
    if not pm.is_registered(llm_plugin):
        pm.register(llm_plugin)
    made: list[Any] = []
    start = llm_plugin.HornitoModel.__init__

    def noted(model: Any, name: str) -> None:
        start(model, name)
        made.append(model)

    patch.setattr(llm_plugin.HornitoModel, "__init__", noted)
    yield llm_plugin
    for model in made:
        model.close()
    patch.undo()


@pytest.fixture(scope="module")
def model(plugin: Any) -> Iterator[Any]:
    found = llm.get_model("hornito/tiny")
    yield found
    found.close()


def options(**more: Any) -> dict[str, Any]:
    return {"context": 1024, "max_tokens": 8, **more}


def weather(city: str) -> str:
    "The weather of a city."
    return f"rain in {city}"


@pytest.mark.gpu
def test_from_the_command_line(plugin: Any) -> None:
    from click.testing import CliRunner
    from llm.cli import cli

    run = CliRunner().invoke
    assert "hornito/tiny" in run(cli, ["models"]).output
    given = ["-m", "hornito/tiny", "hello", "--no-log", "-o", "context", "256"]
    done = run(cli, [*given, "-o", "max_tokens", "6"])
    assert done.exit_code == 0 and done.output.strip(), done.output
    wrong = run(cli, [*given, "-o", "top_p", "7", "-o", "temperature", "1"])
    assert wrong.exit_code == 1 and "top_p must be" in wrong.output


@pytest.mark.gpu
def test_a_conversation_stays_in_the_kv_cache(model: Any) -> None:
    talk = model.conversation()
    first = talk.prompt("hello world", system="be brief", **options())
    assert first.text() and first.usage().output == 8
    second = talk.prompt("and now?", **options())
    second.text()
    assert second.usage().details["cached_tokens"] > 20
    with hornito.load("tiny", context=1024) as alone:
        messages = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello world"},
            {"role": "assistant", "content": first.text()},
            {"role": "user", "content": "and now?"},
        ]
        assert alone.chat(messages, max_tokens=8).text == second.text()


@pytest.mark.gpu
def test_a_model_without_a_chat_template_completes(
    plugin: Any, private_cache: Path, tmp_path: Path
) -> None:
    """Plain text, as `hornito run` does it; what needs a template is refused by name."""
    source = write_text_model(tmp_path / "base.gguf", template=None)
    with hornito.load(source, context=256) as alone:
        expected = alone.generate("hello world", max_tokens=8)
        count = len(alone.tokenizer.encode("hello world"))
    base = plugin.HornitoModel("base")
    out = base.prompt("hello world", context=256, max_tokens=8)
    assert out.text() == expected.text and out.usage().input == count
    for more, what in (
        ({"system": "be brief"}, "a system prompt"),
        ({"tools": [weather]}, "tools"),
    ):
        with pytest.raises(llm.ModelError, match=f"no chat template: .* can't take {what}"):
            base.prompt("hello", context=256, **more).text()
    talk = base.conversation()
    talk.prompt("hello", context=256, max_tokens=2).text()
    with pytest.raises(llm.ModelError, match="can't take a conversation"):
        talk.prompt("again", context=256).text()


@pytest.mark.gpu
def test_names_beside_other_weights(plugin: Any, tmp_path: Path) -> None:
    """The name that worked goes on working when a second storage type appears."""
    source = write_text_model(tmp_path / "pair.gguf")

    def names() -> dict[str, str]:
        found: dict[str, str] = {}

        def register(model: Any, aliases: list[str]) -> None:
            found.update({name: model.model_id for name in (model.model_id, *aliases)})

        plugin.register_models(register)
        return {name: model for name, model in found.items() if "pair" in name}

    compile_cached(source, None)
    before = {"hornito/pair": "hornito/pair", "hornito/pair-default": "hornito/pair"}
    assert names() == before
    compile_cached(source, "fp32")
    assert names() == {**before, "hornito/pair-fp32": "hornito/pair-fp32"}


@pytest.mark.gpu
def test_schemas(model: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    out = model.prompt("x", schema=schema, **options(max_tokens=60, temperature=1.0, seed=1))
    assert json.loads(out.text())["ok"] in (True, False)


@pytest.mark.gpu
def test_tools(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call in the reply becomes one of `llm`; its result goes back to the model."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    real = model._load({"device": None, "context": 1024})[0]
    seen: list[str] = []

    def scripted(session: Any, ids: list[int], **keywords: Any) -> Iterator[Any]:
        seen.append(real.tokenizer.decode(ids))
        text = call if len(seen) == 1 else "It rains."
        yield hornito.api.Chunk(text[:20], (1,))
        yield hornito.api.Chunk(text[20:], (2,), "stop")

    monkeypatch.setattr(real, "stream_session", scripted)
    chain = model.chain("Weather?", tools=[weather], options=options())
    assert chain.text().strip() == "It rains."
    assert '"name": "weather"' in seen[0] and "rain in Oslo" in seen[1]
