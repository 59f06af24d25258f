"""Parameters arrive under their own names, by every way in; no accepted field goes unread."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest

from hornito.cli.options import add_sampling, sampling_keywords
from hornito.runtime.sampler import SamplingParams, sampling_params
from hornito.serve import requests
from hornito.serve.fields import Fields
from hornito.serve.requests import Defaults, chat_request, completion_request

NAME = "tiny"
DEFAULTS = Defaults(NAME, 512)
CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": NAME, "prompt": "x"}

VALUES: dict[str, Any] = {
    "temperature": 0.75,
    "top_p": 0.625,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "seed": 11,
}
"""No two alike, so that none can stand in for another."""

WANTED = SamplingParams(**VALUES, logit_bias={5: 2.0})

FLAGS = {"temperature": "--temp", "repetition_penalty": "--repeat-penalty"}

EFFECTS = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "n", "stream", "stream_options", "user", "response_format", "logprobs"),
    *("model", "max_tokens", "tools", "tool_choice", "parallel_tool_calls"),
}
"""Accepted fields whose effect test_contract.py, test_refusals.py, test_clients.py or
tests/structured see. A field that is new belongs here when there is such a test."""


def test_f4_requests_give_every_parameter_its_own_value() -> None:
    body = {**VALUES, "logit_bias": {"5": 2.0}}
    chat = chat_request({**CHAT, **body}, DEFAULTS).common.params
    completion = completion_request({**COMPLETION, **body}, DEFAULTS).common.params
    assert chat == completion == WANTED
    # The server's own values stand in for each, one by one.
    for name, value in VALUES.items():
        server = Defaults(NAME, 512, sampling={"temperature": 1.0} | {name: value})
        found = chat_request(CHAT, server).common.params
        assert found == replace(SamplingParams(temperature=1.0), **{name: value}), name


def test_f4_options_give_every_parameter_its_own_value() -> None:
    parser = argparse.ArgumentParser()
    add_sampling(parser)
    words = [
        word
        for name, value in VALUES.items()
        for word in (FLAGS.get(name, f"--{name.replace('_', '-')}"), str(value))
    ]
    found = sampling_keywords(parser.parse_args([*words, "--logit-bias", "5=2"]))
    assert sampling_params(found, {}) == WANTED


def test_f4_a_models_own_parameters_keep_their_names() -> None:
    config = {**VALUES, "do_sample": True}
    del config["seed"]
    found = sampling_params({"sampling": "model"}, config)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        assert getattr(found, name) == VALUES[name], name


def test_f5_every_accepted_field_is_one_with_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    neutral: set[str] = set()

    class Noting(Fields):
        """Notes the fields of the request itself that are asked for."""

        def __contains__(self, name: str) -> bool:
            self._note(name)
            return super().__contains__(name)

        def any(self, name: str, default: Any = None) -> Any:
            self._note(name)
            return super().any(name, default)

        def take(self, name: str, kind: type, default: Any = None) -> Any:
            self._note(name)
            return super().take(name, kind, default)

        def neutral(self, name: str, *values: Any) -> None:
            if not self._where:
                neutral.add(name)
            super().neutral(name, *values)

        def _note(self, name: str) -> None:
            if not self._where:
                read.add(name)

    monkeypatch.setattr(requests, "Fields", Noting)
    chat_request(CHAT, DEFAULTS)
    assert read == (EFFECTS | {"messages", "top_logprobs", "max_completion_tokens"}) | {
        "chat_template_kwargs"
    }
    assert neutral == {"modalities"}
    read.clear()
    neutral.clear()
    completion_request(COMPLETION, DEFAULTS)
    tools = {"tools", "tool_choice", "parallel_tool_calls"}
    assert read == (EFFECTS - tools) | {"prompt", "echo", "best_of"}
    assert neutral == {"suffix"}
