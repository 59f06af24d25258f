"""From the scheduler's thread to the event loop, and from there to the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hornito.errors import HornitoError
from hornito.runtime.results import Chunk
from hornito.serve.errors import api_error
from hornito.serve.work import Event, UnavailableError, Work

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from hornito.serve.scheduler import Scheduler


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Answers:
    """The events of one request; cancelled when the client goes away, or by `close`."""

    def __init__(
        self, scheduler: Scheduler, works: Sequence[Work], request: Request, owner: str | None
    ) -> None:
        """Ask for the answers.

        Raises:
            BusyError, UnavailableError: as of `Scheduler.submit`.
        """
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
        self._open = set(range(len(works)))
        self._scheduler = scheduler
        self._group = scheduler.submit(works, self._deliver, owner)
        self._watch = asyncio.create_task(self._watch_client(request))

    def _deliver(self, index: int, event: Event) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def _watch_client(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._scheduler.cancel(self._group)
        self._events.put_nowait(None)

    async def next(self) -> tuple[int, Event] | None:
        """The index of a work and what is said of it; None when all are complete.

        Raises:
            ClientGone: nobody listens.
            HornitoError: one of them failed; the others are cancelled.
            UnavailableError: the server stops, and waits no longer.
        """
        if not self._open:
            return None
        try:
            found = await self._events.get()
        except asyncio.CancelledError as error:
            raise UnavailableError("the server is stopping") from error
        if found is None:
            raise ClientGone
        index, event = found
        if isinstance(event, HornitoError):
            raise event
        if isinstance(event, Chunk) and event.finish_reason is not None:
            self._open.discard(index)
        return index, event

    def close(self) -> None:
        """Give up what is not complete."""
        self._watch.cancel()
        if self._open:
            self._scheduler.cancel(self._group)


def encode(data: object) -> bytes:
    """JSON as it goes over the wire."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


class EventStream:
    """A response of server-sent events; an error in the middle is the last of them.

    Args:
        payloads: JSON objects, or the word [DONE].
        answers: closed at the end.
    """

    def __init__(self, payloads: AsyncIterator[Iterable[Any]], answers: Answers) -> None:
        self._payloads = payloads
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for some in self._payloads:
                await self._send(send, some)
            await self._send(send, (), last=True)
        except ClientGone:
            return
        except HornitoError as error:
            await self._send(send, [api_error(error).body], last=True)
        finally:
            self._answers.close()

    @staticmethod
    async def _send(send: Send, payloads: Iterable[Any], *, last: bool = False) -> None:
        lines = [p.encode() if isinstance(p, str) else encode(p) for p in payloads]
        body = b"".join(b"data: " + line + b"\n\n" for line in lines)
        if body or last:
            await send({"type": "http.response.body", "body": body, "more_body": not last})
