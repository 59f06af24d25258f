"""Sentence embeddings of an encoder package: the mean of its last hidden state, of length 1.

The mean and the length are nodes of the encoder's own graph, computed on the device with the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from hornito.errors import DeviceLostError, FormatError, UsageError
from hornito.importers.onnx_generic.builder import Builder
from hornito.package import open_package
from hornito.tensor.buckets import Bucket
from hornito.tensor.graph import TensorGraph, TensorNode, TensorValue
from hornito.tensor.model import TensorModels
from hornito.tensor.package import load_buckets
from hornito.vk.device import Device, open_device

KNOWN_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}
WEIGHTS = "pooling/weights"
RESULT = "embedding"

Floats = npt.NDArray[np.float32]


def pooled(bucket: Bucket) -> Bucket:
    """A bucket of an encoder with the mean of its hidden state as its only output.

    It has one input more: the weight `[B, 1, L]` that each row has in the mean.

    Raises:
        UsageError: it is no encoder.
    """
    graph = bucket.graph
    unknown = sorted(set(graph.inputs) - KNOWN_INPUTS)
    if unknown or "input_ids" not in graph.inputs:
        raise UsageError(
            f"bucket {bucket.name} is no encoder of text: it takes {', '.join(graph.inputs)}, not "
            f"input_ids with {', '.join(sorted(KNOWN_INPUTS - {'input_ids'}))}"
        )
    rows = graph.values["input_ids"].shape
    found = [
        name
        for name in graph.outputs.values()
        if graph.values[name].shape[:2] == rows and len(graph.values[name].shape) == 3
    ]
    if not found:
        raise UsageError(
            f"bucket {bucket.name} is no encoder of text: none of its outputs is [*{rows}, width]"
        )
    return replace(bucket, graph=_with_mean(graph, found[0]))


def _with_mean(graph: TensorGraph, hidden: str) -> TensorGraph:
    value = graph.values[hidden]
    batch, length, _ = value.shape
    b = Builder()
    weights = b.input(WEIGHTS, "float32", (batch, 1, length))
    mean = b.matmul(weights, b.input(hidden, value.dtype, value.shape))
    unit = b.map("div", [mean, b.reduce("l2", mean, [2], True)])
    own = {name: f"pooling/{name}" for node in b.graph.nodes for name in node.outputs}
    made = TensorGraph()
    made.constants = graph.constants
    made.inputs = [*graph.inputs, WEIGHTS]
    made.values = {**graph.values, WEIGHTS: TensorValue("float32", (batch, 1, length))}
    made.values |= {new: b.graph.values[name] for name, new in own.items()}
    made.nodes = list(graph.nodes)
    for node in b.graph.nodes:
        inputs, outputs = (
            tuple(own.get(name, name) for name in names) for names in (node.inputs, node.outputs)
        )
        made.nodes.append(TensorNode(node.op, own[node.name], inputs, outputs, node.attrs))
    made.outputs = {RESULT: own[b.place(unit)]}
    made.drop_unused()
    made.check()
    return made


class Encoder:
    """An encoder package on a device; calls come from any thread, one at a time runs.

    Attributes:
        most: tokens of the longest input.
        width: numbers of an embedding.
        vocabulary: rows of the table that ids are looked up in.
        tokenizer: None when inputs must be token ids.
    """

    def __init__(
        self, package: Path, tokenizer: Path | None, open_one: Callable[[], Device] = open_device
    ) -> None:
        """Load it.

        Args:
            tokenizer: a tokenizer.json; by default the package's, if it has one.
            open_one: opens the device, again after it was lost.

        Raises:
            UsageError: it is no encoder of text, or there is no such file.
        """
        self.tokenizer = _read_tokenizer(package, tokenizer)
        self.buckets = sorted((pooled(b) for b in load_buckets(package)), key=_length)
        self.most = _length(self.buckets[-1])
        self.width = self.buckets[0].graph.values[_result(self.buckets[0])].shape[-1]
        self.vocabulary = _table_rows(self.buckets[0].graph)
        if self.tokenizer is not None:
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
        self._open = open_one
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def _start(self) -> None:
        self.device = self._open()
        self._models = TensorModels(self.device, self.buckets)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with what the tokenizer puts around them."""
        if self.tokenizer is None:
            raise UsageError("this model has no tokenizer: inputs must be token ids")
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def embed(self, inputs: Sequence[Sequence[int]]) -> Floats:
        """The embedding `[n, width]` of each input, which has 1 to `most` ids.

        Raises:
            DeviceLostError: the device was lost; it has been opened again.
        """
        out = np.empty((len(inputs), self.width), np.float32)
        groups: dict[str, list[int]] = {}
        for i, ids in enumerate(inputs):
            groups.setdefault(self._bucket(len(ids)).name, []).append(i)
        with self._lock:
            for bucket in self.buckets:
                places = groups.get(bucket.name, [])
                batch = bucket.shapes()["input_ids"][0]
                for start in range(0, len(places), batch):
                    some = places[start : start + batch]
                    out[some] = self._run(bucket, [inputs[i] for i in some])
        return out

    def _bucket(self, length: int) -> Bucket:
        return next(bucket for bucket in self.buckets if _length(bucket) >= length)

    def _run(self, bucket: Bucket, inputs: Sequence[Sequence[int]]) -> Floats:
        batch, length = bucket.shapes()["input_ids"]
        ids = np.zeros((batch, length), np.int64)
        mask = np.zeros((batch, length), np.int64)
        mask[:, 0] = 1  # rows without an input are padding, but not of length 0
        for row, given in enumerate(inputs):
            ids[row, : len(given)] = given
            mask[row, : len(given)] = 1
        weights = mask / mask.sum(axis=1, keepdims=True)
        arrays = {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": np.zeros_like(ids),
            WEIGHTS: weights[:, None, :].astype(np.float32),
        }
        try:
            model = self._models.model(bucket)
            found = model.run({name: arrays[name] for name in bucket.graph.inputs})[RESULT]
        except DeviceLostError:
            self._restart()
            raise
        return found[: len(inputs), 0].astype(np.float32)

    def _restart(self) -> None:
        self._models.close()
        self.device.close()
        self._start()

    def check_device(self) -> None:
        """Ask the driver whether the device is still there; when it is not, get it back.

        Raises:
            DeviceLostError: it was not.
        """
        device = self.device
        try:
            device.completed()
        except DeviceLostError:
            with self._lock:
                if self.device is device and not self._closed:
                    self._restart()
            raise

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._models.close()
                self.device.close()


def _length(bucket: Bucket) -> int:
    return bucket.shapes()["input_ids"][1]


def _table_rows(graph: TensorGraph) -> int:
    """Rows of the smallest table that is indexed by the ids; what int32 holds when none is."""
    names = {"input_ids"}
    rows = [(1 << 31) - 1]
    for node in graph.nodes:
        if node.op in ("alias", "map", "view") and set(node.inputs) <= names:
            names.update(node.outputs)
        elif node.op == "gather" and node.inputs[1] in names and node.inputs[0] in graph.constants:
            rows.append(graph.values[node.inputs[0]].shape[0])
    return min(rows)


def _result(bucket: Bucket) -> str:
    return bucket.graph.outputs[RESULT]


def _read_tokenizer(path: Path, given: Path | None) -> Tokenizer | None:
    with open_package(path) as package:
        data = package.blob("tokenizer.json") if "tokenizer.json" in package.blobs else None
    try:
        if given is not None:
            data = given.read_bytes()
        return None if data is None else Tokenizer.from_buffer(data)
    except OSError as error:
        raise UsageError(f"can't read {given}: {error.strerror}") from error
    except Exception as error:  # the library raises bare exceptions
        raise FormatError(f"{given or path}: no tokenizer: {error}") from error
