"""The sampling options: one declaration for all verbs, environment twins, what they print."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hornito.cli.main import main
from hornito.cli.options import (
    SAMPLING,
    Parser,
    add_logprobs,
    add_sampling,
    sampling_keywords,
    spell_options,
)
from hornito.errors import UsageError
from text_model import write_text_model

FLAGS = {
    "--temp": ("0.7", 0.7),
    "--top-k": ("40", 40),
    "--top-p": ("0.95", 0.95),
    "--min-p": ("0.05", 0.05),
    "--repeat-penalty": ("1.1", 1.1),
    "--presence-penalty": ("-0.5", -0.5),
    "--frequency-penalty": ("0.25", 0.25),
    "--seed": ("18446744073709551615", (1 << 64) - 1),
    "--sampling": ("model", "model"),
}


def read(*words: str) -> dict[str, object]:
    parser = Parser("test", "test")
    add_sampling(parser)
    add_logprobs(parser)
    return dict(sampling_keywords(parser.parse_args(list(words))))


def test_nothing_given_is_nothing_said() -> None:
    assert read() == {}


def test_every_flag_and_its_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(FLAGS) == {flag for flag, *_ in SAMPLING}
    words = [word for flag, (text, _) in FLAGS.items() for word in (flag, text)]
    want = {keyword: FLAGS[flag][1] for flag, keyword, *_ in SAMPLING}
    assert read(*words) == want
    for flag, (text, _) in FLAGS.items():
        monkeypatch.setenv("HORNITO_" + flag[2:].replace("-", "_").upper(), text)
    assert read() == want
    assert read("--temp", "0.1")["temperature"] == 0.1, "the command line wins"


def test_biases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("--logit-bias", "5=1.5", "--logit-bias", "7=-100,8=2") == {
        "logit_bias": {5: 1.5, 7: -100.0, 8: 2.0}
    }
    monkeypatch.setenv("HORNITO_LOGIT_BIAS", "5=1,6=2")
    assert read("--logit-bias", "5=3") == {"logit_bias": {5: 3.0, 6: 2.0}}
    monkeypatch.setenv("HORNITO_LOGIT_BIAS", "5")
    with pytest.raises(UsageError, match="HORNITO_LOGIT_BIAS: '5' is not ID=VALUE"):
        read()


def test_f6_ranges_are_checked_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["--temp", "nan"], "--temp must be from 0 to 100, not nan"),
        (["--temp", "1", "--top-p", "1.5"], "--top-p must be above 0 and at most 1, not 1.5"),
        (["--min-p", "0.5"], "--min-p needs a temperature"),
        (["--logprobs", "21"], "logprobs must be from 0 to 20, not 21"),
        (["--seed", "1.5"], "'1.5' is no whole number from 0"),
        (["--logit-bias", "5=inf"], "--logit-bias of token 5 must be from -10000 to 10000"),
    ):
        assert main(["run", "no/such/model", "hi", *words]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["run", "no/such/model", "--logprobs", "0"]) == 2
    assert "--logprobs needs a prompt" in capsys.readouterr().err


@pytest.mark.gpu
def test_run_with_seed_and_logprobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HORNITO_CACHE", str(tmp_path / "cache"))
    model = str(write_text_model(tmp_path / "tiny.gguf"))
    words = ["run", model, "--ids", "5,6,7", "--max-tokens", "4", "--ignore-eos", "--temp", "1"]
    if "HORNITO_DEVICE" not in os.environ:
        words += ["--device", "software"]
    answers = []
    for seed in ([], ["--seed", "7"], ["--seed", "7"]):
        assert main([*words, *seed, "--logprobs", "2", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    free, one, two = answers
    assert one["token_ids"] == two["token_ids"] and one["seed"] == 7
    assert 0 <= free["seed"] < 1 << 32
    assert [entry["token_id"] for entry in one["logprobs"]] == one["token_ids"]
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in one["logprobs"])
    assert main([*words, "--seed", str(free["seed"]), "--logprobs", "0", "--show-ids"]) == 0
    captured = capsys.readouterr()
    assert ",".join(map(str, free["token_ids"])) in captured.out
    listed = [line for line in captured.err.splitlines() if ": -" in line]
    assert [int(line.split()[0]) for line in listed] == free["token_ids"]
    assert "log-probability of each token:" in captured.err


def test_errors_name_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m.vxm", "Hi", "--top-k", "5"]) == 2
    err = capsys.readouterr().err
    assert "--top-k needs a temperature" in err and "give --temp 1\n" in err and "top_k" not in err
    assert main(["run", "m.vxm", "Hi", "--temp", "-1"]) == 2
    assert "--temp must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "spelled"),
    [
        ("keep_first 9 and keep_last 8 leave no", "--keep-first 9 and --keep-last 8 leave no"),
        ("the temperature of top_p", "the temperature of --top-p"),
        ("a_top_p and top_p_x", "a_top_p and top_p_x"),
        ("repetition_penalty must be", "--repeat-penalty must be"),
    ],
)
def test_spelling_of_options(message: str, spelled: str) -> None:
    assert spell_options(message) == spelled
