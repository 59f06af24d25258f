"""The server: a socket, uvicorn, and an end that lets running answers finish."""

from __future__ import annotations

import copy
import ipaddress
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
import uvicorn.config

from hornito.errors import UsageError
from hornito.runtime.guard import uninterrupted
from hornito.serve.app import Service, make_app

BACKLOG = 2048
"""Connections that may wait to be accepted; uvicorn's own number."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, and for whom.

    Attributes:
        host, port: of the socket; port 0 takes a free one.
        api_key: what requests must carry; None is nothing.
        origins: web origins that browsers may call from.
        drain_seconds: how long running answers may take after the server was told to stop.
        log: print a line for each request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    origins: Sequence[str] = ()
    drain_seconds: int = 60
    log: bool = False

    def __post_init__(self) -> None:
        if "*" in self.origins:
            raise UsageError(
                "--cors-origin takes origins such as https://chat.example, not *: any page on the "
                "internet could use this server then"
            )
        if self.api_key == "":
            raise UsageError("the API key is empty")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class Server:
    """A service on a socket; `run` blocks until a signal or `stop`."""

    def __init__(self, service: Service, address: Address) -> None:
        """Bind the socket.

        Raises:
            UsageError: the address can't be had.
        """
        self.service = service
        self.address = address
        self._socket = bind(address.host, address.port)
        local = None
        if address.loopback and address.api_key is None:
            local = frozenset({"localhost", "127.0.0.1", "[::1]", "::1", address.host})
        app = make_app(service, api_key=address.api_key, origins=address.origins, hosts=local)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=_log_config(),
                log_level="info" if address.log else "warning",
                access_log=address.log,
                timeout_graceful_shutdown=address.drain_seconds,
                server_header=False,
            )
        )
        # From here on a client's connection waits for `run`; refused, it would have to try again.
        self._socket.listen(BACKLOG)

    @property
    def url(self) -> str:
        """Where clients find it."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def started(self) -> bool:
        """Whether connections are accepted."""
        return self._server.started

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`; then let running answers finish, and close."""
        try:
            with _quiet_sigterm():
                self._server.run(sockets=[self._socket])
        finally:
            # Ctrl-C waits: nothing may close the device while a thread of the service uses it.
            with uninterrupted():
                self._socket.close()
                self.service.close()

    def stop(self) -> None:
        """Take no more connections, and end when what runs is done; from any thread."""
        self._server.should_exit = True


def _log_config() -> dict[str, Any]:
    """uvicorn's own, with all of it on stderr."""
    config: dict[str, Any] = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return config


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet.

    Raises:
        UsageError: the address is in use, or none of this machine's.
    """
    if port > 65535:
        raise UsageError(f"--port must be from 0 to 65535, not {port}")
    made = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        if made is not None:
            made.close()
        raise UsageError(
            f"can't listen on {host}:{port}: {error.strerror or error}; choose another with --host "
            "and --port"
        ) from error
    return made


@contextmanager
def _quiet_sigterm() -> Iterator[None]:
    """uvicorn raises the signals again that ended it; after SIGTERM the exit code is to be 0."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ignore(number: int, frame: FrameType | None) -> None:
        pass

    before = signal.signal(signal.SIGTERM, ignore)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
