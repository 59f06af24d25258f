"""Opens damaged copies of a checkpoint; run by test_mutations.py in a process of its own.

Usage: mutate.py KIND SEED COUNT FOLDER, with KIND gguf or safetensors. Prints one line of JSON:
counts of outcomes. Anything but success or a HornitoError ends it with a traceback.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

from hornito.errors import HornitoError
from hornito.importers import open_source
from hornito.text.template import ChatTemplate
from hornito.text.tokenizer import Tokenizer

TYPES = ("llama",)
#: What opening may take on top of what the process has: the whole file is under 1 MB.
EXTRA_BYTES = 256 << 20


def damaged(raw: bytes, header: int, rng: random.Random) -> bytes:
    """Flip, overwrite, cut or insert bytes; most of them in the header."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(min(header, len(data)) if rng.random() < 0.9 else len(data))
        kind = rng.randrange(5)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f"))
        elif kind == 3:
            del data[at : at + rng.randrange(1, 9)]
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
    if rng.random() < 0.05:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def use(path: Path) -> None:
    """Everything that loading a model does to a source."""
    source = open_source(path, TYPES)
    for tensor in source.tensors.values():
        for _ in tensor.iter_rows():
            pass
        tensor.load()
    if source.tokenizer_json is not None:
        tokenizer = Tokenizer(source.tokenizer_json, add_bos=source.add_bos, bos_id=source.bos_id)
        ids = tokenizer.encode("hello world 12 <|im_end|>")
        tokenizer.decode(ids)
    if source.chat_template is not None:
        ChatTemplate(source.chat_template, source.token_strings).render(
            [{"role": "user", "content": "hello"}]
        )


def main() -> None:
    kind, seed, count, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    whole = folder / ("model.gguf" if kind == "gguf" else "model.safetensors")
    use(whole)
    raw = whole.read_bytes()
    header = 14_000 if kind == "gguf" else 8 + int.from_bytes(raw[:8], "little")
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + EXTRA_BYTES, resource.RLIM_INFINITY))
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    rng = random.Random(seed)
    config = (folder / "config.json").read_bytes() if kind != "gguf" else b""
    for _ in range(count):
        if kind != "gguf" and rng.random() < 0.3:
            (folder / "config.json").write_bytes(damaged(config, len(config), rng))
            whole.write_bytes(raw)
        else:
            whole.write_bytes(damaged(raw, min(header, len(raw)), rng))
            if config:
                (folder / "config.json").write_bytes(config)
        began = time.perf_counter()
        try:
            use(whole)
            outcomes["ok"] += 1
        except HornitoError as error:
            assert str(error)
            outcomes[type(error).__name__] += 1
        slowest = max(slowest, time.perf_counter() - began)
    print(json.dumps({"outcomes": outcomes, "slowest": slowest}))


if __name__ == "__main__":
    main()
