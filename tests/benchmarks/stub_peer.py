"""Answers as llama-server does, with made-up timings: `llama-server -m FILE --port N ...`.

A prompt token takes 0.5 ms, and 200 tokens a second are generated. What it was started with and the
completions that were asked for go to `calls.jsonl` beside the model file.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

CALLS = Path(sys.argv[sys.argv.index("-m") + 1]).with_name("calls.jsonl")


def keep(call: Any) -> None:
    """Append a line."""
    with CALLS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(call) + "\n")


class Handler(BaseHTTPRequestHandler):
    """/health and /completion."""

    def do_GET(self) -> None:
        self._answer({"status": "ok"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        keep([len(asked["prompt"]), asked["n_predict"]])
        prompt_ms = 0.5 * len(asked["prompt"])
        self._answer({"timings": {"prompt_ms": prompt_ms, "predicted_per_second": 200.0}})

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, found: Any) -> None:
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    keep(sys.argv[1:])
    port = int(sys.argv[sys.argv.index("--port") + 1])
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()
