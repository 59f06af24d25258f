"""Graphs of generic tensor ops: values with ONNX's element types and static shapes.

Every element takes one 32-bit word on the device: fp32 for all float types, a signed or unsigned
integer for the integer types, 0 or 1 for bool. float16 and bfloat16 are rounded where they are cast
to and where they leave the device; float64 is computed in fp32. int64 and uint64 are exact within
32 bits, and a run that leaves them is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError, UnsupportedError

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]

KIND = "tensor"
"""What the JSON of such a graph says it is."""

MAX_RANK = 8
MAX_ELEMENTS = 1 << 30

FLOATS = ("float32", "float16", "bfloat16", "float64")
SIGNED = ("int64", "int32", "int16", "int8")
UNSIGNED = ("uint64", "uint32", "uint16", "uint8", "bool")
DTYPES = (*FLOATS, *SIGNED, *UNSIGNED)
EXACT = ("int64", "uint64")
"""Types whose values must stay within 32 bits."""

Attr = int | float | str | list[int]

OPS = (
    *("alias", "map", "view", "concat", "reduce", "rows"),
    *("matmul", "linear", "lookup", "gather", "scatter", "scan", "topk"),
)


@dataclass(frozen=True, slots=True)
class TensorValue:
    """Element type and static shape of a value."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def kind(self) -> int:
        """What its words hold: 0 fp32, 1 a signed, 2 an unsigned integer."""
        return 0 if self.dtype in FLOATS else 1 if self.dtype in SIGNED else 2


@dataclass(frozen=True, slots=True)
class TensorNode:
    """One operation. `source` names the node of the model's file that it was made for."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    source: str = ""

    def number(self, name: str, default: int | None = None) -> int:
        """An integer attribute."""
        value = self.attrs.get(name, default)
        if not isinstance(value, int):
            raise FormatError(f"node {self.name}: attribute {name} is no integer")
        return value

    def real(self, name: str, default: float) -> float:
        """A number attribute."""
        value = self.attrs.get(name, default)
        if isinstance(value, str | list):
            raise FormatError(f"node {self.name}: attribute {name} is no number")
        return float(value)

    def text(self, name: str) -> str:
        """A text attribute."""
        value = self.attrs.get(name)
        if not isinstance(value, str):
            raise FormatError(f"node {self.name}: attribute {name} is no text")
        return value

    def numbers(self, name: str) -> list[int]:
        """An attribute that is a list of integers."""
        value = self.attrs.get(name, [])
        if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
            raise FormatError(f"node {self.name}: attribute {name} is no list of integers")
        return value


class TensorGraph:
    """Inputs, constants, nodes and outputs, all by the name of their value."""

    def __init__(self) -> None:
        self.values: dict[str, TensorValue] = {}
        self.inputs: list[str] = []
        self.outputs: dict[str, str] = {}
        self.nodes: list[TensorNode] = []
        self.constants: dict[str, Words] = {}

    def add_value(self, name: str, value: TensorValue) -> str:
        """Declare a value and return its name."""
        if name in self.values:
            raise FormatError(f"value {name!r} is made twice")
        if value.dtype not in DTYPES:
            raise UnsupportedError(f"value {name!r}: type {value.dtype} is not supported")
        if any(d < 0 for d in value.shape) or value.size > MAX_ELEMENTS:
            raise UnsupportedError(f"value {name!r}: shape {value.shape} is too large")
        self.values[name] = value
        return name

    def add_constant(self, name: str, dtype: str, array: Array) -> str:
        """Declare a constant, kept as device words."""
        self.add_value(name, TensorValue(dtype, array.shape))
        self.constants[name] = to_words(array, dtype, name)
        return name

    def base(self, name: str, aliases: Mapping[str, str]) -> str:
        """The value whose memory `name` uses."""
        while name in aliases:
            name = aliases[name]
        return name

    def aliases(self) -> dict[str, str]:
        """Values that are other values under another shape."""
        return {n.outputs[0]: n.inputs[0] for n in self.nodes if n.op == "alias"}

    def check(self) -> None:
        """Raise FormatError unless every value is made once, before it is read."""
        known = {*self.inputs, *self.constants}
        for node in self.nodes:
            if node.op not in OPS:
                raise UnsupportedError(f"node {node.name}: no tensor op named {node.op!r}")
            for name in node.inputs:
                if name not in known or name not in self.values:
                    raise FormatError(f"node {node.name} reads {name!r} before it is made")
            for name in node.outputs:
                if name in known or name not in self.values:
                    raise FormatError(f"node {node.name}: result {name!r} is made twice")
                known.add(name)
            if node.op == "alias":
                sizes = {self.values[name].size for name in (*node.inputs, *node.outputs)}
                if len(node.inputs) != 1 or len(node.outputs) != 1 or len(sizes) != 1:
                    raise FormatError(f"node {node.name}: an alias of another size")
        for name in self.outputs.values():
            if name not in known:
                raise FormatError(f"nothing makes the output {name!r}")

    def drop_unused(self) -> None:
        """Forget nodes and constants that no output needs."""
        needed = set(self.outputs.values())
        kept = []
        for node in reversed(self.nodes):
            if needed.intersection(node.outputs):
                needed.update(node.inputs)
                kept.append(node)
        self.nodes = kept[::-1]
        self.constants = {k: v for k, v in self.constants.items() if k in needed}
        made = {name for node in self.nodes for name in node.outputs}
        alive = made | set(self.constants) | set(self.inputs)
        self.values = {k: v for k, v in self.values.items() if k in alive}

    # -- JSON -------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The graph without the constants' data."""
        return {
            "values": {n: [v.dtype, list(v.shape)] for n, v in self.values.items()},
            "inputs": self.inputs,
            "outputs": self.outputs,
            "constants": list(self.constants),
            "nodes": [
                {
                    "op": n.op,
                    "name": n.name,
                    "inputs": list(n.inputs),
                    "outputs": list(n.outputs),
                    "attrs": dict(n.attrs),
                    "source": n.source,
                }
                for n in self.nodes
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], constants: Mapping[str, Words]) -> TensorGraph:
        """The graph of `to_json`, with the constants' words.

        Raises:
            FormatError: it is not such a graph.
        """
        graph = cls()
        try:
            for name, (dtype, shape) in data["values"].items():
                graph.add_value(str(name), TensorValue(str(dtype), tuple(int(d) for d in shape)))
            graph.inputs = [str(n) for n in data["inputs"]]
            graph.outputs = {str(k): str(v) for k, v in data["outputs"].items()}
            for name in data["constants"]:
                graph.constants[name] = constants[name]
                if constants[name].size != graph.values[name].size:
                    raise FormatError(f"constant {name!r} has another size than its shape")
            for node in data["nodes"]:
                names = tuple(map(str, node["inputs"])), tuple(map(str, node["outputs"]))
                made = TensorNode(
                    str(node["op"]), str(node["name"]), *names, dict(node["attrs"]), node["source"]
                )
                graph.nodes.append(made)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"not a tensor graph: {error!r}") from error
        graph.check()
        return graph


def to_words(array: Array, dtype: str, name: str) -> Words:
    """Host numbers of an element type as device words.

    Raises:
        UnsupportedError: a 64-bit integer that 32 bits do not hold.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    if dtype in FLOATS:
        return flat.astype(np.float32, copy=False).view(np.uint32)
    signed = dtype in SIGNED
    if dtype in EXACT and flat.size:
        low, high = (-(1 << 31), (1 << 31) - 1) if signed else (0, (1 << 32) - 1)
        if int(flat.min()) < low or int(flat.max()) > high:
            raise UnsupportedError(
                f"{name!r} holds {int(flat.min())} to {int(flat.max())}: {dtype} is exact on the "
                f"device from {low} to {high}"
            )
    if signed:
        return flat.astype(np.int32).view(np.uint32)
    return flat.astype(np.uint32)


def from_words(words: Words, value: TensorValue) -> Array:
    """Device words as numbers of the value's type (bfloat16 as float32)."""
    if value.dtype in FLOATS:
        floats = words.view(np.float32)
        if value.dtype == "bfloat16":
            return round_bfloat16(floats).reshape(value.shape)
        with np.errstate(over="ignore"):
            return floats.astype(value.dtype).reshape(value.shape)
    if value.dtype in SIGNED:
        return words.view(np.int32).astype(value.dtype).reshape(value.shape)
    return words.astype(value.dtype).reshape(value.shape)


def round_bfloat16(floats: Array) -> Array:
    """fp32 numbers rounded to bfloat16, as fp32; ties to even."""
    words = np.ascontiguousarray(floats, np.float32).view(np.uint32)
    rounded = (words + 0x7FFF + (words >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(floats), np.float32(np.nan), rounded.view(np.float32))


def runs(entries: Sequence[int]) -> list[int]:
    """Integers as arithmetic runs `[start, step, count, ...]`, for long maps in JSON."""
    out: list[int] = []
    i, total = 0, len(entries)
    while i < total:
        step = entries[i + 1] - entries[i] if i + 1 < total else 0
        end = i + 1
        while end < total and entries[end] - entries[end - 1] == step:
            end += 1
        out += [int(entries[i]), int(step), end - i]
        i = end
    return out


def unrolled(packed: Sequence[int]) -> npt.NDArray[np.int64]:
    """The integers of `runs`."""
    parts = [
        packed[i] + packed[i + 1] * np.arange(packed[i + 2], dtype=np.int64)
        for i in range(0, len(packed), 3)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
