"""Rows of tests/CHECKS.md that need a whole model or the command line; named for their row."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hornito
from gguf_samples import HF, tiny_vocabulary
from hornito.api import LLM
from hornito.cli.main import main
from hornito.errors import UsageError
from hornito.package import open_package
from hornito.text.template import ChatTemplate, encode_chat
from hornito.text.tokenizer import Tokenizer
from text_model import (
    DEFAULT_SYSTEM,
    STRICT_TEMPLATE,
    SYSTEM_TEMPLATE,
    tokenizer_json,
    write_text_directory,
    write_text_model,
)
from tiny import golden

#: How the families write the start: (template, whether the tokenizer adds BOS, BOS in the result).
STARTS = {
    "llama3": (
        "{% for m in messages %}{% set content = '<|im_start|>' + m['role'] + '\n\n' "
        "+ m['content'] | trim + '<|im_end|>' %}{% if loop.index0 == 0 %}"
        "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}",
        True,
        1,
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' "
        "+ m['content'] | trim + '<|im_end|>\n' }}{% endfor %}",
        True,
        1,
    ),
    "mistral": (
        "{{- bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{- '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}",
        True,
        1,
    ),
    "mistral without bos in the template": ("[INST] {{ messages[0]['content'] }}[/INST]", True, 1),
    "qwen": (SYSTEM_TEMPLATE, False, 0),
}


@pytest.mark.parametrize("family", STARTS)
def test_g1_the_right_number_of_bos(family: str) -> None:
    template, add_bos, count = STARTS[family]
    keys = {**tiny_vocabulary(), "tokenizer.ggml.bos_token_id": 0}
    tokenizer = Tokenizer(tokenizer_json(keys), add_bos=add_bos, bos_id=0, eos_ids=(2,))
    chat = ChatTemplate(template, {"bos_token": "<|endoftext|>"})
    for content in ("hello", "<|endoftext|>hello"):
        ids = encode_chat(tokenizer, chat, [{"role": "user", "content": content}])
        assert ids.count(0) == count and ids[:count] == [0] * count


@pytest.mark.gpu
def test_g2_every_end_token_stops(tmp_path: Path, private_cache: Path) -> None:
    """Three ids from two files; the model is led to where each of them is the most likely one."""
    want = golden("llama-tiny")
    first = {token: k for k, token in reversed(list(enumerate(want.tokens)))}
    places = sorted(first.values())[1:4]
    ends = [want.tokens[k] for k in places]
    folder = tmp_path / "model"
    shutil.copytree(HF / "llama-tiny", folder)
    for file, ids in (("config.json", ends[0]), ("generation_config.json", ends[1:])):
        data = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**data, "eos_token_id": ids}))
    with hornito.load(folder, device=device(), weights="fp32", precision="high") as llm:
        assert set(llm.engine.eos_ids) == set(ends)
        for k, end in zip(places, ends, strict=True):
            prompt = [*want.prompt, *want.tokens[:k]]
            out = llm.generate(prompt, max_tokens=8)
            assert (out.token_ids, out.finish_reason) == ((end,), "stop")
            out = llm.generate(prompt, max_tokens=8, ignore_eos=True)
            assert out.token_ids[0] == end and len(out.token_ids) == 8


def device() -> str | None:
    return os.environ.get("HORNITO_DEVICE")


def test_g6_and_g8_a_refusing_template_is_an_error(tmp_path: Path) -> None:
    """The template's own words; no other format is tried, no message is folded or dropped."""
    template = ChatTemplate(STRICT_TEMPLATE)
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
    with pytest.raises(UsageError, match="chat template says: System role not supported"):
        template.render([system, user])
    with pytest.raises(UsageError, match="must alternate"):
        template.render([user, user])
    assert "a<|im_end|>" in template.render([user])
    # Qwen's puts a system message first where there is none, and takes the one that there is.
    qwen = ChatTemplate(SYSTEM_TEMPLATE)
    assert DEFAULT_SYSTEM in qwen.render([user])
    assert qwen.render([system, user]).startswith("<|im_start|>system\nb<|im_end|>")


def test_g9_a_gguf_template_gives_what_the_directory_gives(
    tmp_path: Path, private_cache: Path
) -> None:
    """The same template and vocabulary in both formats, through whole packages."""
    gguf = write_text_model(tmp_path / "m.gguf", template=SYSTEM_TEMPLATE)
    folder = write_text_directory(tmp_path / "folder", "llama-tiny", template=SYSTEM_TEMPLATE)
    rendered = []
    for source in (gguf, folder):
        out = tmp_path / f"{source.stem}.vxm"
        hornito.compile_source(source, out)
        with open_package(out) as package:
            facts = package.manifest.facts
            template = ChatTemplate(
                package.blob("chat_template.jinja").decode(), facts["token_strings"]
            )
            tokenizer = Tokenizer(
                package.blob("tokenizer.json"),
                add_bos=facts["add_bos"],
                bos_id=facts["bos_id"],
                eos_ids=facts["eos_ids"],
            )
            messages = [{"role": "user", "content": "hello <|im_end|> world"}]
            rendered.append((template.render(messages), encode_chat(tokenizer, template, messages)))
    assert rendered[0] == rendered[1]
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    want = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered[0][0] == want


@pytest.mark.gpu
def test_g11_the_default_system_message_is_shown_and_overridable(
    tmp_path: Path, private_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_text_model(tmp_path / "m.gguf", template=SYSTEM_TEMPLATE)
    command = ["run", str(model), "hello", "--max-tokens", "2", "--context", "128", "--verbose"]
    assert main(command) == 0
    shown = capsys.readouterr().err
    assert f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>" in shown and "tokens):" in shown
    assert main([*command, "--system", "Be kind"]) == 0
    shown = capsys.readouterr().err
    assert DEFAULT_SYSTEM not in shown and "<|im_start|>system\nBe kind<|im_end|>" in shown


@pytest.mark.gpu
def test_i2_statistics_show_what_runs_where(
    text_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(text_model), "hello", "--max-tokens", "64", "--ignore-eos", "--stats"]
    assert main([*command, "--context", "256"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().err.splitlines())
    from hornito.vk.device import list_devices

    assert any(info.name in lines["device"] for info in list_devices())
    assert "(software)" in lines["device"] or "software" not in lines["device"]
    assert lines["features"].startswith("subgroups of ")
    assert "every tensor operation on the device" in lines["dispatches"]
    assert "weights " in lines["memory"] and "KV " in lines["memory"]
    busy = lines["device busy"]
    assert "by the device's timestamps" in busy or "no timestamps" in busy
    if "timestamps" in lines["features"]:
        share = int(busy.split("(")[1].split("%")[0])
        assert 1 <= share <= 100


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"


@pytest.mark.gpu
def test_i4_the_second_start_finds_package_and_pipelines(
    text_model: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a start leaves is there for the next one, and damage to it costs only time."""
    from hornito import compiler, loading
    from hornito.vk.device import open_device

    monkeypatch.setattr(loading, "open_device", open_device)  # none that another start leaves
    made: list[Path] = []
    real = compiler.compile_source

    def compile_source(src: Path, out: Path, **more: Any) -> object:
        made.append(out)
        return real(src, out, **more)

    monkeypatch.setattr(compiler, "compile_source", compile_source)

    def start() -> tuple[int, ...]:
        with hornito.load(text_model, device=device(), context=128) as llm:
            return llm.generate([5, 6, 7], max_tokens=4, ignore_eos=True).token_ids

    first = start()
    (package,) = (fresh_cache / "models").glob("*.vxm")
    (pipelines,) = fresh_cache.glob("pipelines-*.bin")
    assert start() == first
    assert len(made) == 1  # not compiled again
    written = package.stat().st_mtime_ns
    pipelines.write_bytes(b"nonsense" * 9)
    assert start() == first
    assert pipelines.read_bytes()[:8] != b"nonsense"
    assert package.stat().st_mtime_ns == written


@pytest.mark.gpu
def test_i6_waiting_costs_no_processor_time(llm: LLM) -> None:
    """Whole answers on a GPU: the host sleeps while the device works."""
    if "(software)" in llm.device_line:
        pytest.skip("a software device computes on this processor; tests/vk covers the wait itself")
    llm.generate([5, 6, 7], max_tokens=200, ignore_eos=True)
    wall, used = time.perf_counter(), time.process_time()
    llm.generate([5, 6, 7], max_tokens=400, ignore_eos=True)
    used, wall = time.process_time() - used, time.perf_counter() - wall
    assert used < 0.3 * wall + 0.05, (used, wall)
