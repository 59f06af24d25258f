"""Requests and errors at the level of HTTP: bodies, keys, hosts."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hornito.serve.errors import ApiError
from hornito.serve.fields import parse_body

MOST_BODY_BYTES = 64 << 20


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object that a request brings.

    Only JSON by name is taken: what a web page can send without asking is of other types.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type must be application/json, not {kind or 'missing'!r}")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MOST_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MOST_BODY_BYTES} bytes")
    return parse_body(bytes(data))


class Guard:
    """Middleware: an API key where one is wanted, and known hosts where a browser may be near.

    A page on the internet can name a host that leads to this machine; a server for this machine
    alone answers only to its own names.
    """

    def __init__(self, app: ASGIApp, key: str | None, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._key = key
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._objection(Request(scope))
        app: ASGIApp = self._app if error is None else error_response(error)
        await app(scope, receive, send)

    def _objection(self, request: Request) -> ApiError | None:
        host = request.headers.get("host", "").rpartition("@")[2]
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self._hosts is not None and name.lower() not in self._hosts:
            return ApiError(403, f"this server does not answer to the host {name!r:.80}")
        if self._key is None or request.url.path in ("/health", "/") or request.method == "OPTIONS":
            return None
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
            return None
        return ApiError(
            401, "Incorrect API key provided", kind="authentication_error", code="invalid_api_key"
        )


def error_response(error: ApiError) -> Response:
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    if error.status == 401:
        headers = {"www-authenticate": "Bearer"}
    return JSONResponse(error.body, status_code=error.status, headers=headers)
