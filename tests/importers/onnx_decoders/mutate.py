"""Opens damaged copies of an ONNX export; run by test_mutations.py in a process of its own.

Usage: mutate.py FILE SEED COUNT. Prints one line of JSON: counts of outcomes and the
longest time. Anything but success or a HornitoError ends it with a traceback.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from hornito.compiler import build_graph
from hornito.errors import HornitoError
from hornito.graph.reference import ReferenceState, evaluate
from hornito.graph.weights import load_all
from hornito.importers import open_source

#: What opening may take on top of what the process has: the whole file is under 1 MB.
EXTRA_BYTES = 320 << 20
ROWS = 20


def damaged(raw: bytes, spans: list[tuple[int, int]], rng: random.Random) -> bytes:
    """Flip, overwrite, cut or insert bytes; most of them where the graph is, not the weights."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        start, stop = rng.choice(spans) if rng.random() < 0.9 else (0, len(raw))
        at = min(rng.randrange(start, stop), len(data) - 1)
        kind = rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f"))
        elif kind == 3:
            del data[at : at + rng.randrange(1, 9)]
        elif kind == 4:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:  # one small number for another keeps the file well formed
            data[at] = rng.randrange(1, 8)
    if rng.random() < 0.05:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def use(path: Path) -> None:
    """Everything that compiling does with a source; and a prompt in the reference evaluator."""
    source = open_source(path)
    graph, _, _ = build_graph(source, "fp32")
    weights = {k: load_all(w.data) for k, w in graph.weights.items() if w.data is not None}
    ids = np.arange(ROWS) % source.config["vocab_size"]
    rows = np.arange(ROWS)
    inputs = {"ids": ids, "positions": rows, "selection": rows}
    with np.errstate(all="ignore"):
        evaluate(graph, inputs, weights, ReferenceState(context=64))


def main() -> None:
    whole, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    use(whole)
    raw = whole.read_bytes()
    # The graph's nodes come first, then the initialisers, then inputs and outputs.
    first = raw.find(b"onnx::MatMul")
    weights = raw.find(b"model.embed_tokens.weight", len(raw) // 8)
    head = max(min(first, weights if weights > 0 else first), 4096)
    spans = [(0, head), (len(raw) - 3000, len(raw))]
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + EXTRA_BYTES, resource.RLIM_INFINITY))
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    rng = random.Random(seed)
    copy = whole.with_name("damaged.onnx")
    for _ in range(count):
        copy.write_bytes(damaged(raw, spans, rng))
        began = time.perf_counter()
        try:
            use(copy)
            outcomes["ok"] += 1
        except HornitoError as error:
            assert str(error)
            outcomes[type(error).__name__] += 1
        slowest = max(slowest, time.perf_counter() - began)
    print(json.dumps({"outcomes": outcomes, "slowest": slowest}))


if __name__ == "__main__":
    main()
