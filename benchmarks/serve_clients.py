"""Tokens a second of a served model for 1, 4 and 16 clients; JSON on stdout.

    python benchmarks/random_model.py 0.5b model.vxm && python benchmarks/serve_clients.py model.vxm

Each client sends one request after another: a prompt of its own, token ids or not, and `--tokens`
new ones, past end tokens, streamed. The server runs in this process, the clients in another, over
HTTP on this machine. `total_tok_s` counts generated tokens of all clients over wall time; TTFT and
TPOT are medians and 95th percentiles over requests, by the clients' clocks. `in_process_tok_s` is
the same number of prompts in one `generate` call, without a server.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

import hornito
from hornito.serve.metrics import Metrics
from hornito.serve.scheduler import Scheduler
from hornito.serve.server import Address, Server
from hornito.serve.service import TextService


def prompt_ids(number: int, count: int) -> list[int]:
    """A prompt that shares nothing with the others."""
    return [5 + (number * 7919 + 31 * i) % 499 for i in range(count)]


def request(url: str, number: int, prompt: int, tokens: int) -> tuple[float, float]:
    """(seconds to the first token, seconds a token behind it) of one streamed request."""
    body = {
        **{"model": "model", "prompt": prompt_ids(number, prompt), "max_tokens": tokens},
        **{"temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 0},
    }
    began = time.perf_counter()
    first = 0.0
    count = 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                count += len((choice["logprobs"] or {}).get("tokens", ()))
                first = first or (time.perf_counter() if count else 0.0)
    ended = time.perf_counter()
    if count != tokens:
        raise SystemExit(f"{count} tokens came instead of {tokens}")
    return first - began, (ended - first) / max(tokens - 1, 1)


def clients(
    url: str, count: int, each: int, prompt: int, tokens: int, out: multiprocessing.Queue[Any]
) -> None:
    """So many clients with `each` requests one after another; in a process of their own."""

    def one(client: int) -> list[tuple[float, float]]:
        first = 1000 * count + tokens + each * client
        return [request(url, first + i, prompt, tokens) for i in range(each)]

    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        times = [pair for pairs in pool.map(one, range(count)) for pair in pairs]
    out.put((time.perf_counter() - began, times))


def percentiles(values: list[float]) -> dict[str, float]:
    """Milliseconds: the median, and the 95th percentile."""
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"p50": round(1e3 * statistics.median(ordered), 2), "p95": round(1e3 * high, 2)}


def measure(url: str, count: int, each: int, prompt: int, tokens: int) -> dict[str, Any]:
    """One row."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=clients, args=(url, count, each, prompt, tokens, out))
    process.start()
    seconds, times = out.get(timeout=3600)
    process.join()
    made = count * each * tokens
    return {
        "clients": count,
        "requests": count * each,
        "tokens": made,
        "total_tok_s": round(made / seconds, 1),
        "ttft_ms": percentiles([first for first, _ in times]),
        "tpot_ms": percentiles([rest for _, rest in times]),
    }


def in_process(llm: hornito.LLM, count: int, prompt: int, tokens: int) -> float:
    """Tokens a second of so many prompts at once, without a server."""
    prompts = [prompt_ids(500_000 + 100 * count + i, prompt) for i in range(count)]
    llm.generate(prompts, max_tokens=4, ignore_eos=True)  # compiles, records
    began = time.perf_counter()
    made = llm.generate(prompts, max_tokens=tokens, ignore_eos=True)
    seconds = time.perf_counter() - began
    return round(sum(len(one.token_ids) for one in made) / seconds, 1)


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of an answer")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--precision", default="normal")
    parser.add_argument("--tune", choices=("off", "fast", "full"), help="measure kernels first")
    arguments = parser.parse_args()
    most, prompt, tokens = max(arguments.clients), arguments.prompt, arguments.tokens
    llm = hornito.load(
        arguments.model,
        slots=min(most, 16),
        context=arguments.context,
        precision=arguments.precision,
        tune=arguments.tune,
    )
    line = llm.device_line
    alone = {count: in_process(llm, count, prompt, tokens) for count in arguments.clients}
    metrics = Metrics()
    scheduler = Scheduler(llm, queue_limit=4096, watch=metrics)
    server = Server(TextService(scheduler, metrics, "model"), Address(port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        rows = []
        for count in arguments.clients:
            measure(server.url, count, 1, prompt, 4)  # the first use of a bucket
            row = measure(server.url, count, arguments.requests, prompt, tokens)
            rows.append({**row, "in_process_tok_s": alone[count]})
    finally:
        server.stop()
        thread.join()
    report = {
        "model": arguments.model,
        "device": line,
        "precision": arguments.precision,
        "prompt": prompt,
        "rows": rows,
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
