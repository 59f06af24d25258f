"""Errors as OpenAI's API spells them."""

from __future__ import annotations

import re
from typing import Any

from hornito.errors import (
    ContextOverflowError,
    DeviceLostError,
    DeviceMemoryError,
    HornitoError,
    UsageError,
)
from hornito.serve.work import BusyError, UnavailableError

INVALID = "invalid_request_error"


class ApiError(Exception):
    """What a request is answered with instead of a result.

    Attributes:
        status: of HTTP.
        body: the error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        **numbers: int,
    ) -> None:
        super().__init__(message)
        self.status = status
        said, param = _sendable(message), None if param is None else _sendable(param)
        self.body: dict[str, Any] = {
            "error": {"message": said, "type": kind, "param": param, "code": code, **numbers}
        }


def _sendable(text: str) -> str:
    """Text that quotes a request, which may hold half a surrogate pair; UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode()


def context_error(tokens: int, context: int, param: str) -> ApiError:
    """A prompt that does not fit, with both numbers."""
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens. However, your prompt has "
        f"{tokens} tokens. Please shorten it.",
        param=param,
        code="context_length_exceeded",
        n_prompt_tokens=tokens,
        n_ctx=context,
    )


def api_error(error: Exception) -> ApiError:
    """An error of Hornito for the client."""
    if isinstance(error, ApiError):
        return error
    text = str(error)
    if isinstance(error, BusyError):
        return ApiError(429, text, kind="rate_limit_error", code="queue_full")
    if isinstance(error, UnavailableError):
        return ApiError(503, text, kind="server_error", code="unavailable")
    if isinstance(error, DeviceLostError):
        text = "the device was lost while this was answered; please send it again"
        return ApiError(503, text, kind="server_error", code="device_lost")
    if isinstance(error, DeviceMemoryError):
        return ApiError(503, text, kind="server_error", code="out_of_memory")
    if isinstance(error, ContextOverflowError):
        return context_error(error.tokens, error.context, "prompt")
    if isinstance(error, UsageError):
        return ApiError(400, text, param=_param(text))
    if isinstance(error, HornitoError):
        return ApiError(500, text, kind="server_error")
    return ApiError(500, f"internal error: {type(error).__name__}", kind="server_error")


def _param(text: str) -> str | None:
    """The argument that a message is about: its first word, when that is one."""
    found = re.match(r"(\w+) (?:must|needs|takes|names|of token)", text)
    return found[1] if found else None
