"""Measures llama.cpp's server on this machine: prompt latency and decode speed, batch 1.

python benchmarks/peer/bench_llamacpp.py BIN_DIR MODEL.gguf LABEL -o peer.json [-- server flags]

The JSON is what `hornito bench --compare peer.json` puts beside its own figures. Prompts are random
token ids of which the server has nothing cached; figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

READY_SECONDS = 120
WARM_SECONDS = 0.5
"""How long the server works on a case before it counts, as `hornito bench` does."""

Case = tuple[int, int]
"""Prompt tokens, and tokens generated behind them; with one of them no speed is measured."""


@dataclass(frozen=True, slots=True)
class Row:
    """One test in the words of llama-bench: tokens a second, and milliseconds."""

    test: str
    tokens: int
    depth: int
    median: float
    median_ms: float


class Server:
    """llama-server on loopback, until `stop`; what it prints goes to `log`."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        port: int,
        log: Path,
        flags: Sequence[str] = (),
        context: int = 8192,
    ) -> None:
        self._base = f"http://127.0.0.1:{port}"
        libraries = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        command = [str(folder / "llama-server"), "-m", str(model), "-ngl", "99"]
        command += ["-c", str(context), "-np", "1", "--host", "127.0.0.1", "--port", str(port)]
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, "--no-warmup", *flags],
                env={**os.environ, "LD_LIBRARY_PATH": libraries},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def wait_until_ready(self) -> None:
        """Raise RuntimeError when it ends or takes too long."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                said = self._log.read_text(encoding="utf-8", errors="replace")[-1000:]
                raise RuntimeError(f"llama-server ended with {self._process.returncode}: {said}")
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self._base}/health", timeout=2) as reply,
            ):
                if json.load(reply).get("status") == "ok":
                    return
            time.sleep(0.1)
        raise RuntimeError(f"llama-server was not ready in {READY_SECONDS} s; see {self._log}")

    def complete(self, prompt: Sequence[int], tokens: int) -> dict[str, float]:
        """The server's own timings of one greedy completion."""
        body = {
            "prompt": list(prompt),
            "n_predict": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "top_k": 1,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            f"{self._base}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            return cast("dict[str, float]", json.load(reply)["timings"])

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def cases_of(prompts: Sequence[int], new_tokens: int, depths: Sequence[int]) -> list[Case]:
    """A case for every prompt length and every depth, one where they are equal.

    Raises:
        ValueError: a prompt of no tokens, which the server does not take.
    """
    if not all(n > 0 for n in (*prompts, *depths)):
        raise ValueError("the server takes no prompt of 0 tokens")
    return [(n, new_tokens if n in depths else 1) for n in sorted({*prompts, *depths})]


def measure(
    server: Server, cases: Sequence[Case], repeats: int, warm_seconds: float, seed: int = 1
) -> list[Row]:
    """A prompt row of every case, and a decode row where it generates more than a token.

    Args:
        repeats: completions that count; before them comes one that does not, and more of them
            until `warm_seconds` are over.
        seed: of the prompts.
    """
    rng = random.Random(seed)

    def complete(prompt_tokens: int, new_tokens: int) -> dict[str, float]:
        return server.complete([rng.randrange(300, 3000) for _ in range(prompt_tokens)], new_tokens)

    rows = []
    for case in cases:
        prompt_tokens, new_tokens = case
        began = time.perf_counter()
        complete(*case)
        while time.perf_counter() - began < warm_seconds:
            complete(*case)
        runs = [complete(*case) for _ in range(repeats)]
        prompt_ms = statistics.median(run["prompt_ms"] for run in runs)
        speed = 1e3 * prompt_tokens / prompt_ms
        rows.append(Row(f"pp{prompt_tokens}", prompt_tokens, 0, speed, prompt_ms))
        if new_tokens > 1:
            speed = statistics.median(run["predicted_per_second"] for run in runs)
            name = f"tg{new_tokens}@d{prompt_tokens}"
            rows.append(Row(name, new_tokens, prompt_tokens, speed, 1e3 / speed))
    return rows


def as_json(label: str, rows: Sequence[Row]) -> str:
    """The rows as the text of a file that `hornito bench --compare` reads."""
    report: dict[str, Any] = {"label": label, "rows": [asdict(row) for row in rows]}
    return json.dumps(report, indent=1) + "\n"


def numbers(text: str) -> list[int]:
    """'32,512' as numbers."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Run the server, measure, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bin_dir", type=Path, help="folder with llama-server and its libraries")
    parser.add_argument("model", type=Path)
    parser.add_argument("label", help="names the run where it is compared")
    parser.add_argument("flags", nargs="*", help="more flags of llama-server, after --")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("-p", type=numbers, default=[32, 512, 2048], help="prompt lengths")
    parser.add_argument("-n", type=int, default=64, help="tokens to generate")
    parser.add_argument("-d", type=numbers, default=[32, 4096], help="context before them")
    parser.add_argument("-r", type=int, default=4, help="runs of each")
    parser.add_argument("--port", type=int, default=8081)
    arguments = parser.parse_args()
    cases = cases_of(arguments.p, arguments.n, arguments.d)
    log = arguments.out.with_suffix(".log")
    server = Server(arguments.bin_dir, arguments.model, arguments.port, log, arguments.flags)
    try:
        server.wait_until_ready()
        rows = measure(server, cases, arguments.r, WARM_SECONDS)
    finally:
        server.stop()
    for row in rows:
        print(f"{row.test}: {row.median_ms:.2f} ms, {row.median:.1f} tok/s")
    arguments.out.write_text(as_json(arguments.label, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
