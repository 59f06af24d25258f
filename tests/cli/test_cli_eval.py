"""`hornito eval tool-calls` on a tiny model: every number is there and of its type. (Its answers
are noise.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gguf_samples import TEMPLATE
from hornito.cli.main import main
from hornito.compiler import compile_source
from hornito.diag.eval_tools import BUILTIN, read_suite
from text_model import write_text_model

LOAD = ["--context", "4096", "--max-tokens", "6", "--no-reference"]


@pytest.fixture(autouse=True)
def private_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.gpu
def test_the_builtin_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_text_model(tmp_path / "m.gguf")
    assert main(["eval", "tool-calls", "builtin", str(model), *LOAD, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    suite = read_suite(BUILTIN)
    assert len(found["results"]) == 8 and found["catalogue_tokens"] > 840
    assert found["identity"] is None
    for rate in (found["complete"], found["exact"]):
        assert type(rate) is float and 0 <= rate <= 1
    assert 0 < found["p50_seconds"] <= found["max_seconds"]
    for one, case in zip(found["results"], suite.cases, strict=True):
        assert one["utterance"] == case.utterance
        assert one["expected"] == {"name": case.name, "arguments": case.arguments}
        assert 0 < len(one["token_ids"]) <= 6 and one["seconds"] > 0
        # Only the utterance's own tokens, never the catalogue's.
        assert 0 < one["evaluated"] < 150


@pytest.mark.gpu
@pytest.mark.parametrize("template", [True, False])
def test_tables_and_references(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: bool
) -> None:
    data = {
        "format": "hornito-tool-calls",
        "version": 1,
        "system": "Call one.",
        "tools": [{"name": "a"}, {"name": "b"}],
        "cases": [{"utterance": f"u{i}", "call": {"name": "a", "arguments": {}}} for i in "12"],
    }
    (tmp_path / "suite.json").write_text(json.dumps(data))
    source = write_text_model(tmp_path / "m.gguf", template=TEMPLATE if template else None)
    compile_source(source, tmp_path / "m.vxm", weights="fp16")
    command = ["eval", "tool-calls", str(tmp_path / "suite.json"), str(tmp_path / "m.vxm")]
    options = ["--context", "512", "--max-tokens", "8"]
    assert main([*command, *options]) == 2
    assert "give the model's source with --reference" in capsys.readouterr().err
    assert main([*command, *options, "--reference", "x", "--no-reference"]) == 2
    assert "contradict" in capsys.readouterr().err
    assert main([*command, *options, "--no-reference"]) == 0
    assert "not compared" in capsys.readouterr().out
    assert main([*command, *options, "--reference", str(source), "--json"]) == 0
    identity = json.loads(capsys.readouterr().out)["identity"]
    assert identity.keys() == {"answers", "tokens"}
    assert all(type(rate) is float and 0 <= rate <= 1 for rate in identity.values())
    assert main([*command, *options, "--reference", str(source)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("same as fp32") and "% of answers" in line for line in lines)
    assert sum(line.endswith(("u1", "u2")) for line in lines) == 2
    assert any("p50" in line and "max" in line for line in lines)


@pytest.mark.model
def test_the_catalogue_has_the_promised_length(smollm2_gguf: Path) -> None:
    from hornito.importers import open_source
    from hornito.text.tokenizer import Tokenizer

    source = open_source(smollm2_gguf)
    assert source.tokenizer_json is not None
    tokenizer = Tokenizer(source.tokenizer_json, add_bos=False, bos_id=None, eos_ids=())
    assert 820 <= len(tokenizer.encode(read_suite(BUILTIN).system)) <= 860
