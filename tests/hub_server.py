"""A stand-in of the Hugging Face hub on loopback: repositories from a dictionary."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"

Repositories = dict[str, dict[str, bytes]]


class Hub:
    """What is served.

    Attributes:
        repositories: files by repository.
        gated: repositories that need a licence to be accepted.
        broken: paths whose download breaks off halfway.
        downloads: (repository, file) of every body that was sent whole.
    """

    def __init__(self, repositories: Repositories) -> None:
        self.repositories = repositories
        self.gated: set[str] = set()
        self.broken: set[str] = set()
        self.downloads: list[tuple[str, str]] = []
        self.url = ""


@contextmanager
def serve(repositories: Repositories) -> Iterator[Hub]:
    """A server on a free port of 127.0.0.1; `hub.url` is its HF_ENDPOINT."""
    hub = Hub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def _answer(self, body: bool) -> None:
            parts = unquote(urlparse(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"] and len(parts) >= 4:
                self._info("/".join(parts[2:4]), parts[4:], body)
            elif len(parts) >= 5 and parts[2] == "resolve":
                self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)
            else:
                self._send(404, b"{}", body)

        def _info(self, repository: str, rest: list[str], body: bool) -> None:
            if not self._known(repository, body):
                return
            if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
                self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
                return
            files = hub.repositories[repository]
            data = {
                "id": repository,
                "modelId": repository,
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in files],
            }
            self._send(200, json.dumps(data).encode(), body, {"Content-Type": "application/json"})

        def _known(self, repository: str, body: bool) -> bool:
            if repository in hub.gated:
                self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
            elif repository not in hub.repositories:
                self._send(401, b"{}", body, {"X-Error-Code": "RepoNotFound"})
            else:
                return True
            return False

        def _file(self, repository: str, revision: str, name: str, body: bool) -> None:
            if not self._known(repository, body):
                return
            data = hub.repositories[repository].get(name)
            if data is None:
                self._send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
                return
            etag = hashlib.sha256(data).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
            if body and name in hub.broken:
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
                return
            if body:
                hub.downloads.append((repository, name))
            self._send(200, data, body, headers)

        def _send(
            self, code: int, data: bytes, body: bool, headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(code)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
