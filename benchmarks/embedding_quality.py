"""What fewer bits cost a sentence-embedding model: cosines of its embeddings with those in fp32.

python benchmarks/embedding_quality.py model.onnx tokenizer.json out --text book.txt

takes the first 200 sentences of the text, and writes out.json and out.md; rows of out.json that
`--only` leaves out stay. The model takes
`input_ids`, `attention_mask` and `token_type_ids` with the dims `batch` and `length`, and gives
`last_hidden_state`; an embedding is its mean over real tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from hornito.importers.onnx_generic import Binding, parse
from hornito.importers.onnx_generic import import_generic as bind
from hornito.progress import TerminalProgress
from hornito.tensor.model import TensorModel
from hornito.tensor.stored import CHOICES, store_matrices
from hornito.vk.device import Device, open_device

BATCH, LENGTH = 20, 32
Vectors = npt.NDArray[np.float64]


def sentences(text: str, count: int) -> list[str]:
    """The first sentences of 5 words or more."""
    found = re.split(r"(?<=[.!?])['’]?\s+|\n\n", text)
    long = [part.strip() for part in found if len(part.split()) >= 5]
    if len(long) < count:
        raise SystemExit(f"the text has {len(long)} sentences, {count} are wanted")
    return long[:count]


def encode(tokenizer: Tokenizer, texts: list[str]) -> dict[str, npt.NDArray[np.int64]]:
    """Inputs `[n, LENGTH]`."""
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    rows = tokenizer.encode_batch(texts)
    ids = np.array([row.ids for row in rows], np.int64)
    mask = np.array([row.attention_mask for row in rows], np.int64)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def embed(
    device: Device, model: Any, weights: str, inputs: dict[str, npt.NDArray[np.int64]]
) -> tuple[Vectors, dict[str, Any]]:
    """Unit vectors `[n, width]`, and what the form of the model is."""
    graph = bind(model, Binding(dims={"batch": BATCH, "length": LENGTH})).graph
    formats, _ = store_matrices(graph, weights)
    parts = []
    count = len(inputs["input_ids"])
    began = time.perf_counter()
    with TensorModel(device, graph) as loaded, TerminalProgress() as progress:
        progress.start(f"embedding in {weights}", count)
        for start in range(0, count, BATCH):
            own = {name: array[start : start + BATCH] for name, array in inputs.items()}
            hidden = loaded.run(own)["last_hidden_state"].astype(np.float64)
            mask = own["attention_mask"][..., None]
            parts.append((hidden * mask).sum(1) / mask.sum(1))
            progress.advance(BATCH)
    vectors = np.concatenate(parts)
    facts = {
        "weights": weights,
        "constant_bytes": sum(4 * words.size for words in graph.constants.values()),
        "formats": formats,
        "seconds": time.perf_counter() - began,
    }
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), facts


def main() -> None:
    """Embed the sentences in every form, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer")
    parser.add_argument("out", help="OUT.json and OUT.md are written")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--device")
    parser.add_argument("--only", action="append", choices=CHOICES, help="may be repeated")
    arguments = parser.parse_args()
    texts = sentences(arguments.text.read_text("utf-8"), arguments.count // BATCH * BATCH)
    inputs = encode(Tokenizer.from_file(arguments.tokenizer), texts)
    model = parse(arguments.model)
    file = Path(f"{arguments.out}.json")
    before = json.loads(file.read_text("utf-8"))["rows"] if file.exists() else []
    rows: dict[str, dict[str, Any]] = {row["weights"]: row for row in before}
    with open_device(arguments.device) as device:
        line = f"{device.info.name} ({device.info.kind})"
        exact, facts = embed(device, model, CHOICES[0], inputs)
        for weights in arguments.only or CHOICES:
            found = exact
            if weights != CHOICES[0]:
                found, facts = embed(device, model, weights, inputs)
            cosines = (found * exact).sum(1)
            lowest, mean = float(cosines.min()), float(cosines.mean())
            rows[weights] = {**facts, "cosine_mean": mean, "cosine_min": lowest}
    ordered = [rows[weights] for weights in CHOICES if weights in rows]
    lines = [
        f"{arguments.model.name}: {len(texts)} sentences of {arguments.text.name} in {LENGTH} "
        f"tokens; {line}",
        "",
        "| matrices | MB of constants | mean cosine | least cosine |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['weights']} | {row['constant_bytes'] / 1e6:.1f} | {row['cosine_mean']:.6f} | "
        f"{row['cosine_min']:.6f} |"
        for row in ordered
    ]
    data = {"model": arguments.model.name, "device": line, "count": len(texts), "rows": ordered}
    file.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    Path(f"{arguments.out}.md").write_text("\n".join(lines) + "\n", "utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
