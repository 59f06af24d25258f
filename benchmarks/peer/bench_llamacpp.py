"""Measures llama.cpp's server on this machine: prompt latency and decode speed, batch 1.

python benchmarks/peer/bench_llamacpp.py BIN_DIR MODEL.gguf LABEL -o peer.json [-- server flags]

The JSON is what `hornito bench --compare peer.json` puts beside its own figures. Prompts are random
token ids of which the server has nothing cached; figures are medians.
"""

from __future__ import annotations

import argparse
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

CASES = ((32, 32), (64, 128), (512, 128), (2048, 128), (4096, 64))
"""Prompt tokens, and tokens generated behind them."""

READY_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Row:
    """One test in the words of llama-bench: tokens a second, and milliseconds."""

    test: str
    tokens: int
    depth: int
    median: float
    median_ms: float


class Server:
    """llama-server on loopback, until `stop`."""

    def __init__(self, folder: Path, model: Path, port: int, flags: Sequence[str]) -> None:
        self._base = f"http://127.0.0.1:{port}"
        libraries = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        command = [str(folder / "llama-server"), "-m", str(model), "-ngl", "99", "-c", "8192"]
        command += ["-np", "1", "--host", "127.0.0.1", "--port", str(port), "--no-warmup", *flags]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait_until_ready(self) -> None:
        """Raise RuntimeError when it ends or takes too long."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode}")
            try:
                with urllib.request.urlopen(f"{self._base}/health", timeout=2) as reply:
                    if json.load(reply).get("status") == "ok":
                        return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"llama-server was not ready in {READY_SECONDS} s")

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


def measure(server: Server, cases: Sequence[tuple[int, int]], repeats: int) -> list[Row]:
    """Both rows of every case."""
    rng = random.Random(1)
    rows = []
    server.complete([rng.randrange(300, 40000) for _ in range(32)], 16)
    for prompt_tokens, new_tokens in cases:
        runs = []
        for _ in range(repeats):
            prompt = [rng.randrange(300, 40000) for _ in range(prompt_tokens)]
            runs.append(server.complete(prompt, new_tokens))
        prompt_ms = statistics.median(run["prompt_ms"] for run in runs)
        speed = statistics.median(run["predicted_per_second"] for run in runs)
        pp = Row(f"pp{prompt_tokens}", prompt_tokens, 0, 1e3 * prompt_tokens / prompt_ms, prompt_ms)
        name = f"tg{new_tokens}@d{prompt_tokens}"
        tg = Row(name, new_tokens, prompt_tokens, speed, 1e3 / speed)
        rows += [pp, tg]
        print(f"{pp.test}: {pp.median_ms:.2f} ms; {tg.test}: {tg.median:.1f} tok/s", flush=True)
    return rows


def main() -> None:
    """Run the server, measure, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bin_dir", type=Path, help="folder with llama-server and its libraries")
    parser.add_argument("model", type=Path)
    parser.add_argument("label", help="names the run where it is compared")
    parser.add_argument("flags", nargs="*", help="more flags of llama-server, after --")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("-r", "--repeats", type=int, default=4)
    parser.add_argument("--port", type=int, default=8081)
    parser.add_argument("--most", type=int, default=4096, help="longest prompt")
    arguments = parser.parse_args()
    cases = [case for case in CASES if case[0] <= arguments.most]
    server = Server(arguments.bin_dir, arguments.model, arguments.port, arguments.flags)
    try:
        server.wait_until_ready()
        rows = measure(server, cases, arguments.repeats)
    finally:
        server.stop()
    report: dict[str, Any] = {"label": arguments.label, "rows": [asdict(row) for row in rows]}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
