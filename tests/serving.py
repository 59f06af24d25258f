"""A live server for tests: uvicorn in a thread, on a free port of this machine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import hornito
from hornito.api import LLM
from hornito.serve.app import Service
from hornito.serve.metrics import Metrics
from hornito.serve.scheduler import Scheduler
from hornito.serve.server import Address, Server
from hornito.serve.service import TextService

NAME = "tiny"

EACH_MODEL = pytest.mark.parametrize(
    "server",
    ["tiny", pytest.param("smollm2", marks=[pytest.mark.model, pytest.mark.slow])],
    indirect=True,
)
"""A test with each of the models that tests/serve/conftest.py serves."""


@dataclass(frozen=True)
class Live:
    """A server that runs, and what is behind it."""

    url: str
    scheduler: Scheduler
    http: httpx.Client

    @property
    def llm(self) -> LLM:
        return self.scheduler.llm

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, text: str | list[dict[str, str]], **more: Any) -> dict[str, Any]:
        """The answer to a message, or to a conversation, which must be one."""
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        answer = self.post("/v1/chat/completions", model=NAME, messages=messages, **more)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def complete(self, prompt: Any, **more: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", model=NAME, prompt=prompt, **more)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, the last of them a text."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            return parse_events("".join(answer.iter_text()))

    def used_blocks(self) -> list[int]:
        """KV blocks in use, without those that the prefix cache holds."""

        def count() -> list[int]:
            self.scheduler.cache.clear()
            return [pool.used for pool in self.llm.engine.pools]

        return self.scheduler.call(count)

    def wait_idle(self, seconds: float = 30) -> None:
        """Until nothing runs or waits."""
        wait(lambda: not self.scheduler.running and not len(self.scheduler.queue), seconds)


def parse_events(text: str) -> list[Any]:
    """Server-sent events: JSON, or a word."""
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: ") and "\n" not in block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def wait(done: Callable[[], bool], seconds: float = 30) -> None:
    """Until something is so."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.005)


@contextmanager
def serving(service: Service, **address: Any) -> Iterator[str]:
    """The URL of a server with a service, which is closed at the end."""
    server = Server(service, Address(port=0, **address))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait(lambda: server.started or not thread.is_alive())
        yield server.url
    finally:
        server.stop()
        thread.join()


@contextmanager
def live(
    model: Path,
    *,
    address: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    queue_limit: int = 64,
    cache_bytes: int | None = None,
    pause: float = 0,
    **options: Any,
) -> Iterator[Live]:
    """A server with a text model; `options` are those of `hornito.load`.

    Args:
        pause: seconds before each round, of one step, so that answers last on any device.
    """
    usual = {"slots": 4, "weights": "fp32", "precision": "high", "context": 256, **options}
    metrics = Metrics()
    llm = hornito.load(model, **usual)
    scheduler = Scheduler(llm, queue_limit=queue_limit, cache_bytes=cache_bytes, watch=metrics)
    metrics.follow(scheduler)
    if pause:
        llm.steps_per_submission = 1
        _slow_down(scheduler, pause)
    service = TextService(scheduler, metrics, NAME, sampling)
    with (
        serving(service, **(address or {})) as url,
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        yield Live(url, scheduler, http)


def _slow_down(scheduler: Scheduler, seconds: float) -> None:
    rounds = scheduler._rounds
    usual = rounds.round

    def slow() -> None:
        time.sleep(seconds)
        usual()

    rounds.round = slow  # type: ignore[method-assign]


def texts(events: Sequence[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    pieces = []
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            if choice["index"] == index:
                pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(pieces)
