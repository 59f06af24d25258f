"""What the model files share: weights by name, and the blocks that most decoders are made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError, UnsupportedError
from hornito.graph.graph import INT, Attr, Graph, Weight
from hornito.graph.shapes import S, T
from hornito.graph.weights import (
    ArrayData,
    ByteArray,
    FloatArray,
    ShiftedData,
    SlicedData,
    StoredData,
    TransposedData,
    WeightData,
)

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

SETTINGS = frozenset(
    {
        "add_cross_attention",
        "alibi",
        "attention_bias",
        "attention_chunk_size",
        "attention_multiplier",
        "attn_logit_softcapping",
        "attn_temperature_tuning",
        "clip_qkv",
        "embedding_multiplier",
        "final_logit_softcapping",
        "layer_types",
        "lm_head_bias",
        "logit_scale",
        "logits_scaling",
        "mlp_bias",
        "no_rope_layers",
        "num_experts",
        "num_local_experts",
        "parallel_attn",
        "partial_rotary_factor",
        "qk_layernorm",
        "qk_norm",
        "query_pre_attn_scalar",
        "residual_multiplier",
        "rope_interleaved",
        "rope_local_base_freq",
        "rope_scaling",
        "scale_attn_by_inverse_layer_idx",
        "scale_emb",
        "sliding_window",
        "use_bidirectional_attention",
        "use_mrope",
        "use_parallel_residual",
        "use_qk_norm",
    }
)
"""Config keys that change what some decoder computes; each family names those that it handles."""

_NEUTRAL = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "partial_rotary_factor": 1.0,
    "residual_multiplier": 1.0,
    "scale_emb": 1.0,
}


class SourceTensor(Protocol):
    """What a builder needs of an importer's tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> FloatArray: ...


@dataclass(frozen=True, slots=True)
class _TensorData:
    name: str
    tensor: SourceTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def source_names(self) -> tuple[str, ...]:
        return (self.name,)

    def rows(self, start: int, stop: int) -> FloatArray:
        return self.tensor.rows(start, stop)

    @property
    def stored(self) -> str:
        return self.tensor.stored if isinstance(self.tensor, StoredData) else ""

    def stored_rows(self, start: int, stop: int) -> ByteArray:
        if not isinstance(self.tensor, StoredData):
            raise ValueError(f"{self.name} is not held in blocks")
        return self.tensor.stored_rows(start, stop)


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of an attention: query heads, KV heads, their size, and what is done to scores."""

    count: int
    kv: int
    dim: int
    scale: float
    softcap: float = 0.0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Heads:
        """From the usual keys, scores times `head_dim^-0.5`."""
        dim = config["head_dim"]
        return cls(
            config["num_attention_heads"], config["num_key_value_heads"], dim, float(dim**-0.5)
        )


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE of some layers: the weight with `inv_freq [R/2]`, or with `[2, R/2]` for short and for
    long contexts (more than `original_max` positions), and the factor on sine and cosine."""

    inv_freq: str
    scale: float = 1.0
    original_max: int = 0


class Builder:
    """A graph under construction, over the tensors of a source.

    `dtype` is the storage type of matrices; vectors stay fp32.
    """

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, SourceTensor], dtype: str
    ) -> None:
        self.config = config
        self.tensors = tensors
        self.graph = Graph()
        self._dtype = dtype
        self.ids = self.graph.add_input("ids", INT, (T,))
        self.positions = self.graph.add_input("positions", INT, (T,))
        self.selection = self.graph.add_input("selection", INT, (S,))

    # -- weights ----------------------------------------------------------------------------

    def source(self, name: str) -> WeightData:
        """The source tensor `name`, not yet read.

        Raises:
            FormatError: the source lacks it.
        """
        if name not in self.tensors:
            raise FormatError(f"the source lacks the tensor {name}")
        return _TensorData(name, self.tensors[name])

    def declare(self, name: str, data: WeightData) -> str:
        """A weight of that name, declared once."""
        if name not in self.graph.weights:
            matrix = len(data.shape) == 2
            dtype = self._dtype if matrix else "fp32"
            self.graph.add_weight(name, Weight(tuple(data.shape), dtype, data, matrix))
        return name

    def weight(self, name: str, *, shift: float = 0.0) -> str:
        """The source tensor `name` (plus `shift`) as a weight.

        Raises:
            FormatError: the source lacks it.
        """
        data = self.source(name)
        return self.declare(name, ShiftedData(data, shift) if shift else data)

    def constant(self, name: str, array: npt.NDArray[np.float32]) -> str:
        """A computed table as a weight, declared once."""
        if name not in self.graph.weights:
            self.graph.add_weight(name, Weight(array.shape, "fp32", ArrayData(array)))
        return name

    # -- blocks -----------------------------------------------------------------------------

    def embedding(self, table: str, *, scale: float = 1.0) -> str:
        """Rows of the table for the call's ids, times `scale`."""
        attrs: dict[str, Attr] = {} if scale == 1.0 else {"scale": scale}
        inputs = [self.ids, self.weight(table)]
        return self.graph.add("embedding", "embedding", inputs, attrs, [table])

    def linear(
        self,
        name: str,
        x: str,
        module: str,
        *,
        bias: bool = False,
        rows: tuple[int, int] | None = None,
    ) -> str:
        """`x @ module.weight.T (+ module.bias)`, or only the given rows of the weight."""
        parts = [f"{module}.weight", f"{module}.bias"][: 1 + bias]
        if rows is None:
            names = [self.weight(part) for part in parts]
        else:
            span = f"[{rows[0]}:{rows[1]}]"
            names = [self.declare(p + span, SlicedData(self.source(p), *rows)) for p in parts]
        bias_name = names[1] if bias else ""
        return self.graph.add("linear", name, [x, names[0], bias_name, ""], covers=parts)

    def conv1d(
        self, name: str, x: str, module: str, *, columns: tuple[int, int] | None = None
    ) -> str:
        """`x @ module.weight + module.bias`, the weight being `[in, out]`, or some columns."""
        parts = [f"{module}.weight", f"{module}.bias"]
        weight: WeightData = TransposedData(self.source(parts[0]))
        bias, span = self.source(parts[1]), ""
        if columns is not None:
            span = f"[{columns[0]}:{columns[1]}]"
            weight, bias = SlicedData(weight, *columns), SlicedData(bias, *columns)
        names = [self.declare(parts[0] + span, weight), self.declare(parts[1] + span, bias)]
        return self.graph.add("linear", name, [x, *names, ""], covers=parts)

    def rms_norm(self, name: str, x: str, weight: str, eps: float, *, shift: float = 0.0) -> str:
        """RMS norm with the named weight (plus `shift`)."""
        inputs = [x, self.weight(weight, shift=shift), ""]
        return self.graph.add("rms_norm", name, inputs, {"eps": eps}, [weight])

    def head_norm(
        self, name: str, x: str, weight: str, heads: int, eps: float, *, shift: float = 0.0
    ) -> str:
        """RMS norm of each of a row's heads with the named weight (plus `shift`)."""
        inputs = [x, self.weight(weight, shift=shift), ""]
        return self.graph.add("rms_norm", name, inputs, {"eps": eps, "heads": heads}, [weight])

    def layer_norm(self, name: str, x: str, module: str, eps: float) -> str:
        """Layer norm with the module's weight and bias."""
        parts = [f"{module}.weight", f"{module}.bias"]
        weight, bias = (self.weight(part) for part in parts)
        return self.graph.add("layer_norm", name, [x, weight, "", bias], {"eps": eps}, parts)

    def add(self, name: str, a: str, b: str) -> str:
        """Elementwise sum."""
        return self.graph.add("add", name, [a, b])

    def qkv(self, name: str, x: str, module: str, *, bias: bool) -> tuple[str, str, str]:
        """The three projections: q `[T, heads * D]`, k and v `[T, kv_heads * D]`."""
        q, k, v = (self.linear(f"{name}.{p}", x, f"{module}.{p}_proj", bias=bias) for p in "qkv")
        return q, k, v

    def rope(self, name: str, x: str, heads: int, head_dim: int, rope: Rope) -> str:
        """Positions turned into x."""
        attrs: dict[str, Attr] = {"heads": heads, "head_dim": head_dim, "scale": rope.scale}
        if rope.original_max:
            attrs["original_max"] = rope.original_max
        return self.graph.add("rope", name, [x, self.positions, rope.inv_freq], attrs)

    def attention(
        self,
        name: str,
        qkv: tuple[str, str, str],
        layer: int,
        heads: Heads,
        *,
        rope: Rope | None,
        window: int = 0,
    ) -> str:
        """RoPE on q and k, their way into the cache, and attention over it: `[T, heads * D]`.

        Args:
            rope: None for a layer without.
            window: keys that a row sees, itself included; 0 for all.
        """
        q, k, v = qkv
        if rope is not None:
            q = self.rope(f"{name}.q_rope", q, heads.count, heads.dim, rope)
            k = self.rope(f"{name}.k_rope", k, heads.kv, heads.dim, rope)
        shape: dict[str, Attr] = {"layer": layer, "kv_heads": heads.kv, "head_dim": heads.dim}
        cache = self.graph.add("kv_append", f"{name}.cache", [k, v], shape)
        attrs: dict[str, Attr] = {
            **shape,
            "heads": heads.count,
            "scale": heads.scale,
            "window": window,
            "softcap": heads.softcap,
        }
        return self.graph.add("attention", f"{name}.attention", [q, cache], attrs)

    def gated(self, name: str, gate: str, up: str, activation: str) -> str:
        """`activation(gate) * up`."""
        return self.graph.add("gated_activation", name, [gate, up], {"activation": activation})

    def gated_mlp(self, name: str, x: str, module: str, activation: str, *, bias: bool) -> str:
        """`down(activation(gate(x)) * up(x))`."""
        gate = self.linear(f"{name}.gate", x, f"{module}.gate_proj", bias=bias)
        up = self.linear(f"{name}.up", x, f"{module}.up_proj", bias=bias)
        product = self.gated(f"{name}.gated", gate, up, activation)
        return self.linear(f"{name}.down", product, f"{module}.down_proj", bias=bias)

    def selected(self, x: str) -> str:
        """The rows of x whose output is wanted, `[S, H]`."""
        return self.graph.add("select_rows", "selected", [x, self.selection])

    def finish(self, x: str, table: str, *, softcap: float = 0.0) -> Graph:
        """The head over `table`, and the graph: logits `[S, V]` of the normed rows x."""
        attrs: dict[str, Attr] = {"softcap": softcap} if softcap else {}
        head = self.graph.add("head", "logits", [x, self.weight(table)], attrs, [table])
        self.graph.outputs = [head]
        return self.graph


def activation(config: Mapping[str, Any], key: str = "hidden_act") -> str:
    """The config's activation in Hornito's names.

    Raises:
        UnsupportedError: Hornito has no kernel for it.
    """
    name = config[key]
    if name not in ACTIVATIONS:
        raise UnsupportedError(
            f"{key} {name!r} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


def windows(config: Mapping[str, Any]) -> list[int]:
    """The sliding window of every layer, 0 for a layer that sees everything.

    `layer_types` says which layers slide; without it all do, when there is a window.

    Raises:
        FormatError: a layer slides and there is no window.
    """
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not kinds:
        return [window or 0] * int(config["num_hidden_layers"])
    if "sliding_attention" in kinds and not window:
        raise FormatError("layer_types names sliding layers, but there is no sliding_window")
    return [int(window or 0) if kind == "sliding_attention" else 0 for kind in kinds]


def head_table(config: Mapping[str, Any], embedding: str) -> str:
    """The tensor of the head: the embedding itself when they are tied."""
    return embedding if config["tie_word_embeddings"] else "lm_head.weight"


def check_settings(config: Mapping[str, Any], handled: Collection[str]) -> None:
    """Refuse settings that change the result and that the family does not handle.

    A setting that is absent, false, zero, empty or neutral (a factor of 1) changes nothing.

    Raises:
        UnsupportedError: names them.
    """
    found = [
        f"{key}={config[key]!r}"
        for key in sorted(SETTINGS - set(handled))
        if config.get(key) and config[key] != _NEUTRAL.get(key)
    ]
    if found:
        raise UnsupportedError(
            f"config settings that Hornito does not handle for {config.get('model_type')}: "
            + ", ".join(found)
        )
