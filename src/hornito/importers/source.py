"""What an importer hands over: a description of a checkpoint and its tensors, not yet read.

Whatever the file was, a `Source` speaks Hugging Face: the keys of config.json, the tensor names of
the checkpoint, a tokenizer.json. So one model builder serves every format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError, HornitoError
from hornito.quant.ggml import BlockFormat, dequantise_rows

if TYPE_CHECKING:
    from hornito.graph.graph import Graph

Floats = npt.NDArray[np.float32]
RowReader = Callable[[int, int], Floats]
BlockReader = Callable[[int, int], "npt.NDArray[np.uint8]"]

#: Floats converted at a time by `load`: bounds the temporaries, not the result.
CHUNK_VALUES = 1 << 21


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of a file, read and converted only when asked.

    Attributes:
        name: Hugging Face's name.
        shape: Hugging Face's shape.
        dtype: storage type in the file: `F32`, `F16`, `BF16`, `Q8_0`, ...
        file: path of the file that holds it.
        nbytes_source: bytes that it takes in that file.
        file_name: its name in the file.
        reader: `(start, stop) -> float32 [stop - start, ...]`, rows along the first axis.
        raw: the stored array where `load` may hand it over unchanged (F32 and F16), else None.
        blocks: `(start, stop) -> uint8 [stop - start, bytes]`, the rows of a matrix as they are
            stored; None where no rows of the file are rows of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    nbytes_source: int
    file_name: str
    reader: RowReader = field(repr=False)
    raw: Callable[[], npt.NDArray[Any]] | None = field(default=None, repr=False)
    blocks: BlockReader | None = field(default=None, repr=False)

    @property
    def stored(self) -> str:
        """`dtype` where rows can be had as they are stored, else `""`."""
        return self.dtype if self.blocks is not None else ""

    def stored_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Rows as the file holds them, uint8 `[stop - start, bytes of a row]`."""
        if self.blocks is None or not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"{self.name} has no stored rows {start}:{stop}")
        return self.blocks(start, stop)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def rows(self, start: int, stop: int) -> Floats:
        """Rows `start` to `stop` (exclusive) along the first axis, as float32.

        Takes memory in proportion to the rows asked for. A tensor of one axis has a row a value.
        Raises ValueError when the range does not lie in the tensor.
        """
        if not self.shape:
            raise ValueError(f"{self.name} is a scalar: it has no rows")
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"rows {start}:{stop} do not lie in {self.name} {self.shape}")
        return self.reader(start, stop)

    def iter_rows(self, max_values: int = CHUNK_VALUES) -> Iterator[tuple[int, int, Floats]]:
        """Yield `(start, stop, float32 rows)` over the tensor, about `max_values` values each."""
        if not self.shape:
            yield 0, 1, self.load().reshape(1).astype(np.float32, copy=False)
            return
        row_values = max(1, math.prod(self.shape[1:]))
        step = max(1, max_values // row_values)
        for start in range(0, self.shape[0], step):
            stop = min(self.shape[0], start + step)
            yield start, stop, self.reader(start, stop)

    def load(self) -> npt.NDArray[Any]:
        """The whole tensor: the stored array for F32 and F16, float32 for every other type.

        The result may be a read-only view of the mapped file.
        """
        if self.raw is not None:
            return self.raw()
        if not self.shape:
            return self.reader(0, 1).reshape(())
        out = np.empty(self.shape, dtype=np.float32)
        for start, stop, rows in self.iter_rows():
            out[start:stop] = rows
        return out

    def load_f32(self) -> Floats:
        """The whole tensor as float32, whatever it is stored as."""
        return self.load().astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class SourceNode:
    """A node of a source that is a graph; `folded` says why no operation stands for it."""

    name: str
    op: str
    folded: str = ""


@dataclass(slots=True)
class Source:
    """A checkpoint as its importer found it. See the package docs for each field's rules.

    Attributes:
        model_type: Hugging Face's `model_type`, the name of the module that builds the graph.
        config: keys and meanings of Hugging Face's config.json, defaults filled in.
        tensors: every tensor of the model by Hugging Face's name.
        tokenizer_json: a `tokenizers` file, or Hornito's own for score-based vocabularies; None
            when the source has no tokenizer, so that the model takes token ids only.
        chat_template: jinja2 text, or None.
        generation_config: keys of generation_config.json.
        eos_ids: every id that ends an answer (the union of what the files say).
        bos_id: the id that starts a sequence, if there is one.
        add_bos: whether plain text is encoded with `bos_id` in front.
        format: `gguf`, `safetensors` or `onnx`.
        path: the file or directory.
        name: the model's own name, if it tells.
        licence: its licence, if it tells.
        file_tensor_names: names of all tensors in the files, as they stand there.
        warnings: what a user should know before trusting the result.
        token_strings: text of `bos_token`, `eos_token` and others that templates ask for.
        builder: for a source that is a graph (ONNX), makes Hornito's from it, given the storage
            type of matrices; None when the module of `model_type` builds it.
        nodes: every node of such a source, in its order.
        patterns: what was recognised in it, and how often.
        stored: GGUF's names of the blocks that its matrices are in, where they are.
    """

    model_type: str
    config: dict[str, Any]
    tensors: dict[str, LazyTensor]
    tokenizer_json: bytes | None
    chat_template: str | None
    generation_config: dict[str, Any]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    format: str
    path: str
    name: str | None = None
    licence: str | None = None
    file_tensor_names: tuple[str, ...] = ()
    warnings: list[str] = field(default_factory=list)
    token_strings: dict[str, str] = field(default_factory=dict)
    builder: Callable[[str], Graph] | None = field(default=None, repr=False)
    nodes: tuple[SourceNode, ...] = field(default=(), repr=False)
    patterns: dict[str, int] = field(default_factory=dict)
    stored: frozenset[str] = frozenset()


def mapped_tensor(
    *,
    name: str,
    file_name: str,
    shape: tuple[int, ...],
    fmt: BlockFormat,
    file: str,
    data: npt.NDArray[np.uint8],
) -> LazyTensor:
    """A tensor over mapped bytes.

    Args:
        name: its Hugging Face name.
        file_name: its name in the file.
        shape: numpy shape; the last axis holds the blocks of `fmt`.
        fmt: storage format.
        file: path, for messages.
        data: the tensor's bytes, uint8 `[n]`, a view of the mapped file.
    """
    columns = shape[-1] if len(shape) > 1 else 1
    blocked_vector = len(shape) == 1 and fmt.block > 1
    if blocked_vector:
        columns = shape[0]
    inner = shape[1:]
    per_row = math.prod(inner[:-1]) if inner else 1

    def read(start: int, stop: int) -> Floats:
        if blocked_vector:
            return dequantise_rows(data.reshape(1, -1), fmt, columns)[0, start:stop]
        table = data.reshape(-1, fmt.row_bytes(columns))
        rows = dequantise_rows(table[start * per_row : stop * per_row], fmt, columns)
        return rows.reshape(stop - start, *inner)

    def blocks(start: int, stop: int) -> npt.NDArray[np.uint8]:
        return data.reshape(-1, fmt.row_bytes(columns))[start:stop]

    def stored() -> npt.NDArray[Any]:
        return data.view("<f4" if fmt.name == "F32" else "<f2").reshape(shape)

    return LazyTensor(
        name=name,
        shape=shape,
        dtype=fmt.name,
        file=file,
        nbytes_source=int(data.nbytes),
        file_name=file_name,
        reader=read,
        raw=stored if fmt.name in ("F32", "F16") else None,
        blocks=blocks if len(shape) == 2 else None,
    )


def _derived(
    base: LazyTensor,
    shape: tuple[int, ...],
    reader: RowReader,
    blocks: BlockReader | None = None,
) -> LazyTensor:
    return LazyTensor(
        name=base.name,
        shape=shape,
        dtype=base.dtype,
        file=base.file,
        nbytes_source=base.nbytes_source,
        file_name=base.file_name,
        reader=reader,
        blocks=blocks,
    )


def unpermuted(base: LazyTensor, heads: int) -> LazyTensor:
    """Undo the row order that llama.cpp stores for adjacent-pair RoPE.

    Row `h*D + 2*i + a` of the file is row `h*D + a*D/2 + i` of the checkpoint (a in 0, 1).
    The rows of a head stay together, so any range is read by whole heads.
    """
    head_rows = base.shape[0] // heads

    def ordered(reader: Callable[[int, int], Any], start: int, stop: int) -> npt.NDArray[Any]:
        first, last = start // head_rows, -(-stop // head_rows)
        rows = reader(first * head_rows, last * head_rows)
        shape = (last - first, head_rows // 2, 2, *rows.shape[1:])
        own: npt.NDArray[Any] = rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)
        return own[start - first * head_rows : stop - first * head_rows]

    def read(start: int, stop: int) -> Floats:
        return ordered(base.reader, start, stop)

    stored = base.blocks
    if stored is None:
        return _derived(base, base.shape, read)
    return _derived(base, base.shape, read, lambda start, stop: ordered(stored, start, stop))


def shifted(base: LazyTensor, amount: float) -> LazyTensor:
    """`base + amount`, in float32 (Gemma norms: GGUF holds 1 + w)."""

    def read(start: int, stop: int) -> Floats:
        return base.reader(start, stop) + np.float32(amount)

    return _derived(base, base.shape, read)


def transposed(base: LazyTensor) -> LazyTensor:
    """The transpose of a matrix (GPT-2 checkpoints hold [in, out], GGUF [out, in])."""
    shape = (base.shape[1], base.shape[0])

    def read(start: int, stop: int) -> Floats:
        out = np.empty((stop - start, shape[1]), dtype=np.float32)
        for first, last, rows in base.iter_rows():
            out[:, first:last] = rows[:, start:stop].T
        return out

    return _derived(base, shape, read)


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Map a whole file read-only as uint8; FormatError when it is empty or not a plain file."""
    try:
        size = path.stat().st_size
        if not path.is_file() or size == 0:
            raise FormatError(f"{path}: not a file with content ({size} bytes)")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise HornitoError(f"{path}: can't be read: {error.strerror or error}") from error
