"""Writes a GGUF with random weights and the shape of a Qwen2.5 model, for speed comparisons.

python benchmarks/peer/random_gguf.py OUT {f16,q8,q4} SHAPE

Shapes are those of benchmarks/random_model.py.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from hornito.diag.random_model import SHAPES


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


# Storage type of matrices, and llama.cpp's number for the file.
TYPES = {
    "f16": (gguf.GGMLQuantizationType.F16, 1),
    "q8": (gguf.GGMLQuantizationType.Q8_0, 7),
    "q4": (gguf.GGMLQuantizationType.Q4_0, 2),
}


class RandomWriter:
    """A GGUF writer whose tensors are random."""

    def __init__(self, out: str) -> None:
        self.file = gguf.GGUFWriter(out, "qwen2")
        self._rng = np.random.default_rng(0)
        self._pool = self._rng.standard_normal(1 << 22, dtype=np.float32) * np.float32(0.02)
        self._made: dict[tuple[int, int, Any], npt.NDArray[Any]] = {}

    def values(self, *dims: int) -> npt.NDArray[np.float32]:
        """Normal values from a fixed pool, from a random place on."""
        start = int(self._rng.integers(0, len(self._pool)))
        return np.resize(np.roll(self._pool, -start), int(np.prod(dims))).reshape(dims)

    def matrix(self, name: str, rows: int, columns: int, kind: Any) -> None:
        """A weight in a storage type; those of one shape are rotations of one another's rows."""
        key = (rows, columns, kind)
        if key not in self._made:
            self._made[key] = gguf.quants.quantize(self.values(rows, columns), kind)
        data = np.roll(self._made[key], int(self._rng.integers(1, rows)), axis=0)
        self.file.add_tensor(name, data, raw_dtype=kind)

    def vector(self, name: str, data: npt.NDArray[np.float32]) -> None:
        """An fp32 vector."""
        self.file.add_tensor(name, data)


def add_keys(file: Any, shape: Shape, file_type: int) -> None:
    """The metadata that llama.cpp asks of a qwen2 file."""
    file.add_block_count(shape.layers)
    file.add_context_length(32768)
    file.add_embedding_length(shape.hidden)
    file.add_feed_forward_length(shape.inner)
    file.add_head_count(shape.heads)
    file.add_head_count_kv(shape.kv_heads)
    file.add_rope_freq_base(1e6)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_vocab_size(shape.vocabulary)
    file.add_file_type(file_type)
    tokens = [chr(c) for c in range(33, 127)]  # printable, so that any stream is valid UTF-8
    tokens += [f"[unused{i}]" for i in range(shape.vocabulary - len(tokens))]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("qwen2")
    file.add_token_list(tokens)
    file.add_token_types([1] * shape.vocabulary)
    file.add_token_merges([f"{tokens[31]} {tokens[32]}"])
    file.add_bos_token_id(shape.vocabulary - 2)
    file.add_eos_token_id(shape.vocabulary - 1)
    file.add_add_bos_token(False)


def add_layer(writer: RandomWriter, shape: Shape, layer: int, kind: Any) -> None:
    """The tensors of one layer."""
    prefix = f"blk.{layer}."
    ones = np.ones(shape.hidden, np.float32)
    writer.vector(prefix + "attn_norm.weight", ones)
    writer.vector(prefix + "ffn_norm.weight", ones)
    for part, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
        width = heads * shape.head_dim
        writer.matrix(f"{prefix}attn_{part}.weight", width, shape.hidden, kind)
        writer.vector(f"{prefix}attn_{part}.bias", writer.values(width))
    width = shape.heads * shape.head_dim
    writer.matrix(prefix + "attn_output.weight", shape.hidden, width, kind)
    writer.matrix(prefix + "ffn_gate.weight", shape.inner, shape.hidden, kind)
    writer.matrix(prefix + "ffn_up.weight", shape.inner, shape.hidden, kind)
    writer.matrix(prefix + "ffn_down.weight", shape.hidden, shape.inner, kind)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("type", choices=sorted(TYPES))
    parser.add_argument("shape", choices=sorted(SHAPES))
    arguments = parser.parse_args()
    shape = Shape(*SHAPES[arguments.shape])
    kind, file_type = TYPES[arguments.type]
    writer = RandomWriter(arguments.out)
    add_keys(writer.file, shape, file_type)
    table = gguf.GGMLQuantizationType.Q8_0 if arguments.type == "q4" else kind
    writer.matrix("token_embd.weight", shape.vocabulary, shape.hidden, table)
    if not shape.tied:
        writer.matrix("output.weight", shape.vocabulary, shape.hidden, kind)
    writer.vector("output_norm.weight", np.ones(shape.hidden, np.float32))
    for layer in range(shape.layers):
        add_layer(writer, shape, layer, kind)
    writer.file.write_header_to_file()
    writer.file.write_kv_data_to_file()
    writer.file.write_tensors_to_file()
    writer.file.close()


if __name__ == "__main__":
    main()
