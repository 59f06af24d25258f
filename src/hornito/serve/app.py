"""The ASGI application: the routes of a service, models, health, metrics, and the page at /."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from hornito.errors import DeviceLostError, HornitoError
from hornito.serve.errors import ApiError, api_error
from hornito.serve.http import Guard, error_response
from hornito.serve.metrics import Metrics
from hornito.serve.streams import ClientGone

GONE = 499
"""The status, which nobody sees, of an answer whose client went away."""


class Service(Protocol):
    """A model behind the routes."""

    metrics: Metrics

    def card(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        ...

    def health(self) -> dict[str, Any]:
        """`status`, which is `ok` when requests are answered, and more; or DeviceLostError."""
        ...

    def routes(self) -> list[Route]:
        """What this kind of model answers."""
        ...

    def close(self) -> None:
        """End it."""
        ...


def make_app(
    service: Service,
    *,
    api_key: str | None = None,
    origins: Sequence[str] = (),
    hosts: frozenset[str] | None = None,
) -> Starlette:
    """The ASGI application.

    Args:
        api_key: what requests must carry.
        origins: web origins that browsers may call from; none by default.
        hosts: names that the server answers to; None for all.
    """

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [service.card()]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != service.card()["id"]:
            raise ApiError(
                404, f"The model `{name}` does not exist", param="model", code="model_not_found"
            )
        return JSONResponse(service.card())

    async def health(request: Request) -> Response:
        try:
            facts = await run_in_threadpool(service.health)
        except DeviceLostError as error:
            facts = {"status": "device lost", "error": str(error)}
        return JSONResponse(facts, status_code=200 if facts["status"] == "ok" else 503)

    async def metrics(request: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(service.metrics.text(), media_type=kind)

    async def page(request: Request) -> Response:
        return HTMLResponse((files("hornito.serve") / "page" / "index.html").read_bytes())

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(api_error(error))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"{error.detail}: {request.method} {request.url.path}"
        return error_response(ApiError(error.status_code, text))

    async def on_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=GONE)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            *service.routes(),
        ],
        middleware=_middleware(api_key, origins, hosts),
        exception_handlers={
            ApiError: on_error,
            HornitoError: on_error,
            HTTPException: on_http,
            ClientGone: on_gone,
            ClientDisconnect: on_gone,
            Exception: on_error,
        },
    )


def _middleware(
    api_key: str | None, origins: Sequence[str], hosts: frozenset[str] | None
) -> list[Middleware]:
    """What every request passes, the outermost first."""
    guard = Middleware(Guard, key=api_key, hosts=hosts)
    if not origins:
        return [guard]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type"],
    )
    return [cors, guard]
