"""Requests in OpenAI's words. A field that is accepted has its effect; all others are errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hornito.errors import UsageError
from hornito.ops.base import MOST_TOP
from hornito.runtime.sampler import SEED_LIMIT, SamplingParams, sampling_params
from hornito.serve.errors import ApiError, api_error
from hornito.serve.fields import MISSING, Fields
from hornito.structured.formats import ResponseFormat
from hornito.text.template import checked_messages
from hornito.tool_use import ToolUse

MOST_CHOICES = 128
MOST_STOPS = 64
MOST_ANSWERS = 4096
"""Of one request: each has its place in the queue, and its tokens until all are complete."""
MOST_TOKENS = (1 << 31) - 1

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a server knows that requests depend on.

    Attributes:
        model: the name of the model.
        vocabulary: its ids.
        generation_config: the model's own.
        sampling: parameters of requests that leave them out.
    """

    model: str
    vocabulary: int
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """What chat and completion requests have in common.

    Attributes:
        params: how tokens are chosen; `logprobs` in them is how many most likely ones are wanted.
        max_tokens: None is up to the end of the context.
        n: answers to each prompt.
        user: requests of one user share a turn.
        form: what form the answer has.
    """

    params: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    n: int
    stream: bool
    include_usage: bool
    user: str | None
    form: ResponseFormat | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`/v1/chat/completions`.

    Attributes:
        messages: role and content of each, both text; calls of functions and their results.
        variables: further names for the chat template (`chat_template_kwargs`).
        tools: the functions that may be called.
    """

    common: Request
    messages: list[dict[str, Any]]
    variables: Mapping[str, Any]
    tools: ToolUse


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`/v1/completions`.

    Attributes:
        prompts: each text or token ids.
        echo: the answers begin with their prompts.
    """

    common: Request
    prompts: list[str | list[int]]
    echo: bool


def check_model(fields: Fields, defaults: Defaults, *, required: bool = True) -> None:
    """Take `model`, which must name the one that is served."""
    name = fields.take("model", str, MISSING if required else defaults.model)
    if name != defaults.model:
        raise ApiError(
            404,
            f"The model `{name}` does not exist; this server has `{defaults.model}`",
            param="model",
            code="model_not_found",
        )


def chat_request(body: Mapping[str, Any], defaults: Defaults) -> ChatRequest:
    """Read a chat request.

    Raises:
        ApiError: a field is wrong, unknown, or can't have its effect.
    """
    fields = Fields(body)
    check_model(fields, defaults)
    messages = messages_field(fields)
    wanted = fields.take("logprobs", bool, False)
    top = fields.whole("top_logprobs", None, 0, MOST_TOP)
    if top is not None and not wanted:
        raise fields.wrong("top_logprobs", "needs logprobs to be true")
    limit = fields.whole("max_completion_tokens", None, 1, MOST_TOKENS)
    other = fields.whole("max_tokens", None, 1, MOST_TOKENS)
    if limit is not None and other is not None and limit != other:
        raise fields.wrong("max_tokens", "and max_completion_tokens contradict each other")
    variables = variables_field(fields)
    common = _common(
        fields, defaults, logprobs=(top or 0) if wanted else None, max_tokens=limit or other
    )
    tools = tools_field(fields)
    fields.neutral("modalities", ["text"])
    fields.finish()
    return ChatRequest(common, messages, variables, tools)


def completion_request(body: Mapping[str, Any], defaults: Defaults) -> CompletionRequest:
    """Read a completion request.

    Raises:
        ApiError: a field is wrong, unknown, or can't have its effect.
    """
    fields = Fields(body)
    check_model(fields, defaults)
    if "prompt" not in fields:
        fields.take("prompt", str, MISSING)
    prompts = _prompts(fields, "prompt", defaults.vocabulary)
    echo = fields.take("echo", bool, False)
    logprobs = fields.whole("logprobs", None, 0, MOST_TOP)
    limit = fields.whole("max_tokens", 16, 0, MOST_TOKENS)
    if limit == 0 and not echo:
        raise fields.wrong("max_tokens", "must be at least 1 unless echo is true")
    best = fields.whole("best_of", None, 1, MOST_CHOICES)
    common = _common(fields, defaults, logprobs=logprobs, max_tokens=limit)
    if best not in (None, common.n):
        raise fields.wrong("best_of", "is not supported, unless it equals n")
    if len(prompts) * common.n > MOST_ANSWERS:
        raise fields.wrong(
            "prompt",
            f"holds {len(prompts)} prompts, which with n {common.n} makes "
            f"{len(prompts) * common.n} answers; one request may ask for {MOST_ANSWERS}",
        )
    fields.neutral("suffix", "")
    fields.finish()
    return CompletionRequest(common, prompts, echo)


def _common(
    fields: Fields, defaults: Defaults, *, logprobs: int | None, max_tokens: int | None
) -> Request:
    stream = fields.take("stream", bool, False)
    options = Fields(fields.take("stream_options", dict, {}), "stream_options")
    include_usage = options.take("include_usage", bool, False)
    options.finish()
    if include_usage and not stream:
        raise fields.wrong("stream_options", "needs stream to be true")
    form = form_field(fields)
    ignore_eos = fields.take("ignore_eos", bool, False)
    if form is not None and ignore_eos:
        raise fields.wrong("ignore_eos", "contradicts response_format: the form says where it ends")
    return Request(
        params=_params(fields, defaults, logprobs),
        max_tokens=max_tokens,
        stop=fields.texts("stop", MOST_STOPS),
        ignore_eos=ignore_eos,
        n=fields.whole("n", 1, 1, MOST_CHOICES),
        stream=stream,
        include_usage=include_usage,
        user=fields.take("user", str),
        form=form,
    )


def form_field(fields: Fields) -> ResponseFormat | None:
    """What form the answer is to have."""
    try:
        return ResponseFormat.of(fields.any("response_format"))
    except UsageError as error:
        raise ApiError(400, str(error), param="response_format") from error


def tools_field(fields: Fields) -> ToolUse:
    """The functions that the model may call, and whether it must."""
    given = [fields.any(name) for name in ("tools", "tool_choice", "parallel_tool_calls")]
    try:
        return ToolUse.of(*given)
    except UsageError as error:
        name = re.match("tool_choice|parallel_tool_calls", str(error))
        raise ApiError(400, str(error), param=name[0] if name else "tools") from error


def usual_temperature(defaults: Defaults) -> float:
    """What a request without a temperature gets."""
    params = sampling_params(_usual(defaults), defaults.generation_config)  # type: ignore[arg-type]
    return params.temperature


def _usual(defaults: Defaults) -> dict[str, Any]:
    """Keywords of `sampling_params` for a request that gives none."""
    base = {} if defaults.sampling.get("sampling") == "model" else {"temperature": 1.0}
    return {**base, **defaults.sampling}


def _params(fields: Fields, defaults: Defaults, logprobs: int | None) -> SamplingParams:
    given = {name: fields.any(name) for name in _SAMPLING if name in fields}
    seed = fields.take("seed", int)
    if seed is not None:
        if not -(SEED_LIMIT >> 1) <= seed < SEED_LIMIT:
            raise fields.wrong("seed", f"must be a 64-bit integer, not {seed}")
        given["seed"] = seed % SEED_LIMIT
    if biases := fields.take("logit_bias", dict, {}):
        given["logit_bias"] = _biases(fields, biases)
    keywords = {**_usual(defaults), **given, "logprobs": logprobs}
    try:
        params = sampling_params(keywords, defaults.generation_config)  # type: ignore[arg-type]
        params.check_vocabulary(defaults.vocabulary)
    except UsageError as error:
        raise api_error(error) from error
    return params


def _biases(fields: Fields, given: Mapping[str, Any]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise fields.wrong("logit_bias", f"maps token ids to numbers; {token!r:.60} is no id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise fields.wrong("logit_bias", f"must be from -100 to 100, not {bias!r:.60}")
        biases[int(token)] = bias
    return biases


def messages_field(fields: Fields) -> list[dict[str, Any]]:
    """The messages of a conversation: role and text of each."""
    given = fields.take("messages", list, MISSING)
    try:
        found = checked_messages(given)
    except UsageError as error:
        path, _, _ = str(error).partition(" ")
        raise ApiError(400, str(error), param=path) from error
    return [_message(Fields(message, f"messages[{i}]")) for i, message in enumerate(found)]


def variables_field(fields: Fields) -> dict[str, Any]:
    """Further names for the chat template."""
    variables: dict[str, Any] = fields.take("chat_template_kwargs", dict, {})
    reserved = {"messages", "tools", "documents", "add_generation_prompt"} & set(variables)
    if reserved:
        raise fields.wrong("chat_template_kwargs", f"can't set {sorted(reserved)[0]}")
    return variables


def _message(fields: Fields) -> dict[str, Any]:
    """A message of its role's own fields; others may only say what leaving them out means."""
    message = {"role": fields.any("role"), "content": fields.any("content")}
    if message["role"] == "assistant" and (calls := fields.take("tool_calls", list, [])):
        message["tool_calls"] = calls
    if message["role"] == "tool":
        message["tool_call_id"] = fields.take("tool_call_id", str, MISSING)
        if (name := fields.take("name", str)) is not None:
            message["name"] = name
    fields.neutral("type", "message", "text")
    fields.neutral("refusal")
    fields.neutral("annotations", [])
    fields.neutral("tool_calls", [])
    fields.finish()
    return message


def _prompts(fields: Fields, name: str, vocabulary: int) -> list[str | list[int]]:
    """A text, token ids, or an array of either."""
    value = fields.any(name)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise fields.wrong(name, "must be a string, an array of token ids, or an array of these")
    if all(isinstance(item, int) for item in value):
        value = [value]
    found: list[str | list[int]] = []
    for i, item in enumerate(value):
        if not isinstance(item, str):
            _check_ids(fields, f"{name}[{i}]", item, vocabulary)
        found.append(item)
    return found


def _check_ids(fields: Fields, name: str, value: Any, vocabulary: int) -> None:
    whole = isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    )
    if not whole or not value:
        raise fields.wrong(name, "must be a string or an array of token ids")
    for token in value:
        if not 0 <= token < vocabulary:
            raise fields.wrong(
                name, f"holds token {token}; the vocabulary has ids 0 to {vocabulary - 1}"
            )


def inputs_field(fields: Fields, vocabulary: int) -> list[str | list[int]]:
    """The `input` of an embeddings request."""
    if "input" not in fields:
        fields.take("input", str, MISSING)
    return _prompts(fields, "input", vocabulary)


def ids_field(fields: Fields, name: str, vocabulary: int) -> list[int]:
    """A field of token ids; there may be none."""
    value: list[int] = fields.take(name, list, MISSING)
    if value:
        _check_ids(fields, name, value, vocabulary)
    return value
