"""One-layer decoders as ONNX models, their attention spelled in one of many ways, for tests that
compare what Hornito makes of them with ONNX Runtime or the ONNX reference evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from hornito.graph.graph import Graph
from hornito.graph.reference import ReferenceState, evaluate
from hornito.graph.weights import load_all

VOCABULARY, HIDDEN, HEADS, KV_HEADS, DIM = 64, 32, 4, 2, 16
CAPACITY = 96
MS = "com.microsoft"
Floats = npt.NDArray[np.float32]


@dataclass
class Decoder:
    """Nodes and constants under construction; `build` closes the model."""

    opset: int = 21
    seed: int = 0
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    inputs: dict[str, tuple[int, list[Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def matrix(self, name: str, *shape: int, scale: float = 0.3) -> str:
        """Random numbers that fp16 holds."""
        values = (self.rng.standard_normal(shape) * scale).astype(np.float16)
        return self.const(name, values.astype(np.float32))

    def const(self, name: str, array: Any, dtype: Any = None) -> str:
        self.constants[name] = np.asarray(array, dtype)
        return name

    def ints(self, *values: int) -> str:
        return self.const("i_" + "_".join(map(str, values)).replace("-", "m"), values, np.int64)

    def scalar(self, value: int) -> str:
        return self.const(f"s_{value}".replace("-", "m"), value, np.int64)

    def op(
        self,
        kind: str,
        inputs: Sequence[str],
        *,
        outputs: Sequence[str] | None = None,
        domain: str = "",
        **attrs: Any,
    ) -> str:
        """Append a node and return its first result."""
        label = f"{kind.lower()}_{len(self.nodes)}"
        results = list(outputs) if outputs else [f"{label}_out"]
        self.nodes.append(
            helper.make_node(kind, list(inputs), results, name=label, domain=domain, **attrs)
        )
        return results[0]

    def norm(self, x: str, weight: str) -> str:
        kind = "RMSNormalization" if self.opset >= 23 else "SimplifiedLayerNormalization"
        return self.op(kind, [x, weight], axis=-1, epsilon=1e-5)

    def start(self) -> tuple[str, str, str, str, str]:
        """The embedding, its norm, and projections q, k and v."""
        self.inputs["input_ids"] = (TensorProto.INT64, ["batch", "sequence"])
        self.inputs["attention_mask"] = (TensorProto.INT64, ["batch", "total"])
        x = self.op("Gather", [self.matrix("embed", VOCABULARY, HIDDEN, scale=1.0), "input_ids"])
        h = self.norm(x, self.const("norm1", np.ones(HIDDEN, np.float32)))
        q = self.op("MatMul", [h, self.matrix("wq", HIDDEN, HEADS * DIM)])
        k = self.op("MatMul", [h, self.matrix("wk", HIDDEN, KV_HEADS * DIM)])
        v = self.op("MatMul", [h, self.matrix("wv", HIDDEN, KV_HEADS * DIM)])
        return x, h, q, k, v

    def past(self, heads: int = KV_HEADS) -> tuple[str, str]:
        shape = ["batch", heads, "past", DIM]
        names = ("past_key_values.0.key", "past_key_values.0.value")
        for name in names:
            self.inputs[name] = (TensorProto.FLOAT, shape)
        return names

    def position_ids(self) -> str:
        self.inputs["position_ids"] = (TensorProto.INT64, ["batch", "sequence"])
        return "position_ids"

    def caches(self, rotary: int = DIM, theta: float = 10000.0) -> tuple[str, str]:
        """Tables of cos and sin `[CAPACITY, rotary / 2]`."""
        inv = theta ** -(np.arange(0, rotary, 2) / rotary)
        angle = np.arange(CAPACITY)[:, None] * inv[None]
        return (
            self.const("cos", np.cos(angle), np.float32),
            self.const("sin", np.sin(angle), np.float32),
        )

    def lengths(self) -> tuple[str, str]:
        """seqlens_k and total_sequence_length, as GenAI's builder makes them."""
        total = self.op("ReduceSum", ["attention_mask", self.ints(1)], keepdims=0)
        last = self.op("Sub", [total, self.ints(1)])
        size = self.op("Gather", [self.op("Shape", ["attention_mask"]), self.scalar(1)], axis=0)
        return self.op("Cast", [last], to=6), self.op("Cast", [size], to=6)

    def finish(self, x: str, attention: str) -> None:
        """Output projection, a gated MLP, the final norm and the head."""
        o = self.op("MatMul", [attention, self.matrix("wo", HEADS * DIM, HIDDEN)])
        x = self.op("Add", [x, o])
        h = self.norm(x, self.const("norm2", np.ones(HIDDEN, np.float32)))
        gate = self.op("MatMul", [h, self.matrix("wg", HIDDEN, 48)])
        up = self.op("MatMul", [h, self.matrix("wu", HIDDEN, 48)])
        act = self.op("Mul", [gate, self.op("Sigmoid", [gate])])
        h = self.op("MatMul", [self.op("Mul", [act, up]), self.matrix("wd", 48, HIDDEN)])
        x = self.op("Add", [x, h])
        h = self.norm(x, self.const("norm3", np.ones(HIDDEN, np.float32)))
        self.op("MatMul", [h, self.matrix("head", HIDDEN, VOCABULARY)], outputs=["logits"])

    def build(self, *, presents: bool = True) -> onnx.ModelProto:
        outputs = ["logits"]
        if presents:
            outputs += ["present.0.key", "present.0.value"]
        graph = helper.make_graph(
            self.nodes,
            "decoder",
            [helper.make_tensor_value_info(n, t, s) for n, (t, s) in self.inputs.items()],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
            [numpy_helper.from_array(v, n) for n, v in self.constants.items()],
        )
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MS, 1)]
        model = helper.make_model(graph, opset_imports=opsets)
        model.ir_version = 10
        return model


def save(model: onnx.ModelProto, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def run_runtime(model: onnx.ModelProto, ids: Sequence[int], pieces: Sequence[int]) -> Floats:
    """ONNX Runtime's logits `[n, V]` along ids fed in pieces, with a growing cache."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # Its optimiser computes some quantised products in 8 bits.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    wanted = {i.name: i.shape for i in session.get_inputs()}
    results = [o.name for o in session.get_outputs()]
    past = {
        name: np.zeros((1, shape[1], 0, shape[3]), np.float32)
        for name, shape in wanted.items()
        if name.startswith("past")
    }
    parts, at = [], 0
    for count in pieces:
        feed = {
            "input_ids": np.array([ids[at : at + count]], np.int64),
            "attention_mask": np.ones((1, at + count), np.int64),
            "position_ids": np.arange(at, at + count, dtype=np.int64)[None],
            **past,
        }
        found = dict(zip(results, session.run(results, {n: feed[n] for n in wanted}), strict=True))
        past = {name: found[name.replace("past_key_values", "present")] for name in past}
        parts.append(found["logits"][0])
        at += count
    return np.concatenate(parts)


def run_graph(graph: Graph, ids: Sequence[int], context: int = CAPACITY) -> npt.NDArray[Any]:
    """The reference evaluator's logits `[n, V]` along ids."""
    rows = np.arange(len(ids))
    weights = {k: load_all(w.data) for k, w in graph.weights.items() if w.data is not None}
    inputs = {"ids": np.array(ids), "positions": rows, "selection": rows}
    return evaluate(graph, inputs, weights, ReferenceState(context=context))[graph.outputs[0]]


def random_ids(count: int, seed: int = 1) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()
    return ids


def causal_bias(d: Decoder, window: int = 0) -> str:
    """An additive mask `[1, 1, N, T]` of positions and slots, with a window when asked."""
    new = d.op("Gather", [d.op("Shape", ["input_ids"]), d.scalar(1)], axis=0)
    total = d.op("Gather", [d.op("Shape", ["attention_mask"]), d.scalar(1)], axis=0)
    first = d.op("Sub", [total, new])
    row = d.op("Unsqueeze", [d.op("Range", [first, total, d.scalar(1)]), d.ints(1)])
    slot = d.op("Unsqueeze", [d.op("Range", [d.scalar(0), total, d.scalar(1)]), d.ints(0)])
    seen = d.op("LessOrEqual", [slot, row])
    if window:
        near = d.op("Greater", [slot, d.op("Sub", [row, d.scalar(window)])])
        seen = d.op("And", [seen, near])
    zero, low = d.const("zero", 0.0, np.float32), d.const("low", -1e9, np.float32)
    return d.op("Unsqueeze", [d.op("Where", [seen, zero, low]), d.ints(0, 1)])
