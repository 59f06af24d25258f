"""What an encoder answers: OpenAI's embeddings."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hornito.serve.encoder import Encoder, Floats
from hornito.serve.errors import ApiError, context_error
from hornito.serve.fields import Fields
from hornito.serve.http import read_body
from hornito.serve.metrics import Metrics
from hornito.serve.requests import Defaults, check_model, inputs_field
from hornito.serve.work import BusyError

MOST_INPUTS = 2048


class EmbeddingService:
    """Routes of an encoder.

    Args:
        name: the model's, as requests give it.
        queue_limit: requests that may wait.
    """

    def __init__(self, encoder: Encoder, metrics: Metrics, name: str, queue_limit: int) -> None:
        self.metrics = metrics
        self._encoder = encoder
        self._defaults = Defaults(name, encoder.vocabulary)
        self._created = int(time.time())
        self._limit = queue_limit
        self._running = 0

    async def embed(self, request: Request) -> Response:
        """POST /v1/embeddings"""
        fields = Fields(await read_body(request))
        check_model(fields, self._defaults)
        given = inputs_field(fields, self._defaults.vocabulary)
        if len(given) > MOST_INPUTS:
            raise fields.wrong("input", f"takes up to {MOST_INPUTS} inputs, not {len(given)}")
        form = fields.take("encoding_format", str, "float")
        if form not in ("float", "base64"):
            raise fields.wrong("encoding_format", "must be float or base64")
        fields.neutral("dimensions", self._encoder.width)
        fields.finish()
        if self._running > self._limit:
            raise BusyError(f"{self._running} requests are waiting, which is as many as may")
        self._running += 1
        try:
            ids = await run_in_threadpool(self._ids, given)
            vectors = await run_in_threadpool(self._encoder.embed, ids)
        finally:
            self._running -= 1
        tokens = sum(map(len, ids))
        self.metrics.embedded(tokens)
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": i, "embedding": _shown(row, form)}
                    for i, row in enumerate(vectors)
                ],
                "model": self._defaults.model,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    def _ids(self, given: Sequence[str | list[int]]) -> list[list[int]]:
        found = []
        for one in given:
            ids = self._encoder.encode(one) if isinstance(one, str) else one
            if not ids:
                raise ApiError(400, "input is empty", param="input")
            if len(ids) > self._encoder.most:
                raise context_error(len(ids), self._encoder.most, "input")
            found.append(ids)
        return found

    def card(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        return {
            "id": self._defaults.model,
            "object": "model",
            "created": self._created,
            "owned_by": "hornito",
            "max_model_len": self._encoder.most,
        }

    def health(self) -> dict[str, Any]:
        """What the server does; DeviceLostError when the device is gone."""
        self._encoder.check_device()
        device = self._encoder.device
        return {
            "status": "ok",
            "model": self._defaults.model,
            "device": f"{device.info.name} ({device.info.kind})",
            "running": self._running,
        }

    def routes(self) -> list[Route]:
        """What only an encoder has."""
        return [Route("/v1/embeddings", self.embed, methods=["POST"])]

    def close(self) -> None:
        """Free the device."""
        self._encoder.close()


def _shown(vector: Floats, form: str) -> Any:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(number) for number in vector]
