"""`hornito tune --precision`: all tiers are measured, one is recommended, none is switched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hornito.cli.main import main
from hornito.diag import tune_precision
from hornito.diag.quality import Quality
from hornito.diag.tune_precision import Amounts, Tier, recommend
from text_model import write_text_model

CLOSE = Quality(10.0, 10.0, 1e-5, 1e-4, 1e-3, 0.999)
HIGH = Tier("high", "fp32", (100.0,), (50.0,), None)
NORMAL = Tier("normal", "fp16", (300.0,), (50.0,), CLOSE)
LOW = Tier("low", "fp16", (300.0,), (50.0,), CLOSE)


@pytest.mark.gpu
def test_all_tiers_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    amounts = Amounts(prompt=16, answer=4, text=64, window=32, runs=1, rounds=2)
    monkeypatch.setattr(tune_precision, "SOFTWARE", amounts)
    monkeypatch.setattr(tune_precision, "DEFAULT", amounts)
    model = write_text_model(tmp_path / "m.gguf")
    assert main(["tune", str(model), "--precision", "--weights", "int8", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [(t["precision"], t["kv"]) for t in found["tiers"]] == [
        ("high", "fp32"),
        ("normal", "fp16"),
        ("low", "fp16"),
    ]
    assert all(tier["prompt"] > 0 and tier["decode"] > 0 for tier in found["tiers"])
    assert found["tiers"][0]["quality"] is None
    assert all(len(tier["prompts"]) == len(tier["decodes"]) == 2 for tier in found["tiers"])
    assert all(0 < tier["quality"]["kl_mean"] < 0.1 for tier in found["tiers"][1:])
    assert found["weights"] == "int8" and found["tokens"] == 30
    assert found["recommended"] in ("high", "normal", "low") and found["reason"]
    (tmp_path / "t.txt").write_text("one two three " * 40)
    assert main(["tune", str(model), "--precision", "--text", str(tmp_path / "t.txt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("recommended: --precision ")
    assert sum(line.startswith(("| high |", "| normal |", "| low |")) for line in lines) == 3


def test_arguments_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m.vxm", "x", "--precision", "lowest"]) == 2
    assert "'lowest' is none of high, normal, low" in capsys.readouterr().err
    assert main(["tune", "m.vxm", "--precision", "--fast"]) == 2
    assert "--fast is about kernels" in capsys.readouterr().err
    assert main(["tune", "m.vxm", "--text", "t.txt"]) == 2
    assert "--text goes with --precision" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("normal", "recommended", "why"),
    [
        (NORMAL, "normal", "prompts at 3.00"),
        (replace(NORMAL, prompts=(101.0,)), "high", "not faster"),
        (replace(NORMAL, decodes=(40.0,)), "high", "slower"),
        (replace(NORMAL, quality=replace(CLOSE, kl_mean=0.5)), "high", "changes too much"),
        (replace(NORMAL, quality=replace(CLOSE, kl_mean=float("nan"))), "high", "too much"),
    ],
)
def test_recommendations(normal: Tier, recommended: str, why: str) -> None:
    found, reason = recommend((HIGH, normal))
    assert found == recommended and why in reason


@pytest.mark.parametrize(
    ("normal", "low", "recommended", "why"),
    [
        (
            NORMAL,
            replace(LOW, decodes=(60.0,)),
            "low",
            "decoding at 1.20 times the speed of normal",
        ),
        (NORMAL, LOW, "normal", "low is not faster in every round: prompts at 1.00"),
        (NORMAL, replace(LOW, prompts=(200.0,)), "normal", "low is slower"),
        (
            replace(NORMAL, decodes=(40.0,)),
            replace(LOW, decodes=(52.0,)),
            "low",
            "the speed of high",
        ),
    ],
)
def test_low_must_beat_what_is_recommended_without_it(
    normal: Tier, low: Tier, recommended: str, why: str
) -> None:
    found, reason = recommend((HIGH, normal, low))
    assert found == recommended and why in reason


def test_what_differs_from_round_to_round_is_not_recommended() -> None:
    high = Tier("high", "fp32", (100.0, 100.0, 100.0), (50.0, 50.0, 50.0), None)
    normal = replace(high, precision="normal", prompts=(140.0, 99.0, 140.0), quality=CLOSE)
    found, reason = recommend((high, normal))
    assert found == "high" and "not faster in every round: prompts at 1.40" in reason
    assert recommend((high, replace(normal, prompts=(140.0, 104.0, 140.0))))[0] == "normal"


@pytest.mark.gpu
def test_a_text_that_is_too_short_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))

    def no_speed(*_: object) -> None:
        raise AssertionError("measured before the text was read")

    monkeypatch.setattr(tune_precision, "_speed", no_speed)
    (tmp_path / "t.txt").write_text("one two")
    model = write_text_model(tmp_path / "m.gguf")
    assert main(["tune", str(model), "--precision", "--text", str(tmp_path / "t.txt")]) == 2
    assert "tokens to evaluate" in capsys.readouterr().err
