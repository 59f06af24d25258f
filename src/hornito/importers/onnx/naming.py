"""Names for raised operations: the roles that they play in a decoder's layers, and the order and
names that the model builders give them, so that every spelling of a model is one graph."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from hornito.graph.weights import SlicedData, WeightData
from hornito.importers.onnx.dag import Dag, Raised

#: Roles of a layer in the builders' order.
LAYER_ROLES = (
    "attention_norm",
    "q",
    "k",
    "v",
    "q_norm",
    "k_norm",
    "q_rope",
    "k_rope",
    "cache",
    "attention",
    "o",
    "attention_post_norm",
    "attention_sum",
    "mlp_norm",
    "mlp.gate",
    "mlp.up",
    "mlp.gated",
    "mlp.activation",
    "mlp.down",
    "mlp_post_norm",
    "mlp_sum",
)
_NORMS = ("rms_norm", "layer_norm")
_LLAMA = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_GPT2 = {
    "attention_norm": "ln_1",
    "q": "attn.c_attn",
    "k": "attn.c_attn",
    "v": "attn.c_attn",
    "o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


@dataclass(slots=True)
class Names:
    """Role names by raised id (`layer0.q`), the order, and weight names by weight id."""

    nodes: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    style: str = "llama"


class _Namer:
    def __init__(self, dag: Dag, live: Mapping[str, Raised]) -> None:
        self.dag = dag
        self.live = live
        self.names: dict[str, str] = {}
        self.readers: dict[str, list[Raised]] = {}
        for node in live.values():
            for name in dict.fromkeys(node.inputs):
                self.readers.setdefault(name, []).append(node)

    def call(self, node: Raised | None, name: str) -> Raised | None:
        if node is not None:
            self.names.setdefault(node.id, name)
        return node

    def maker(self, name: str, *ops: str) -> Raised | None:
        node = self.live.get(name)
        return node if node is not None and node.op in ops else None

    def reader(self, node: Raised | None, *ops: str) -> Raised | None:
        if node is None:
            return None
        found = [r for r in self.readers.get(node.id, []) if r.op in ops]
        return found[0] if found else None

    def layer(self, attention: Raised, prefix: str) -> None:
        """Names the operations around one attention."""
        self.call(attention, f"{prefix}.attention")
        cache = self.maker(attention.inputs[1], "kv_append")
        self.call(cache, f"{prefix}.cache")
        if cache is None:
            return
        starts = {"q": attention.inputs[0], "k": cache.inputs[0], "v": cache.inputs[1]}
        norm: Raised | None = None
        for part, value in starts.items():
            node = self.live.get(value)
            for op, suffix in (("rope", "_rope"), ("rms_norm", "_norm")):
                if node is not None and node.op == op:
                    self.call(node, f"{prefix}.{part}{suffix}")
                    if op == "rms_norm":
                        node.attrs.setdefault("heads", 1)
                    node = self.live.get(node.inputs[0])
            if node is not None and node.op == "linear":
                self.call(node, f"{prefix}.{part}")
                norm = norm or self.maker(node.inputs[0], *_NORMS)
        self.call(norm, f"{prefix}.attention_norm")
        out = self.call(self.reader(attention, "linear"), f"{prefix}.o")
        total = self.after(out, f"{prefix}.attention")
        second = self.call(self.reader(total, *_NORMS), f"{prefix}.mlp_norm")
        self.mlp(second, prefix)

    def after(self, node: Raised | None, prefix: str) -> Raised | None:
        """The norm of a branch's result, if there is one, and the residual sum."""
        post = self.call(self.reader(node, *_NORMS), f"{prefix}_post_norm")
        return self.call(self.reader(post or node, "add"), f"{prefix}_sum")

    def mlp(self, norm: Raised | None, prefix: str) -> None:
        if norm is None:
            return
        inner = [r for r in self.readers.get(norm.id, []) if r.op == "linear"]
        gated = next((g for r in inner if (g := self.reader(r, "gated_activation"))), None)
        middle: Raised | None
        if gated is not None:
            self.call(self.live.get(gated.inputs[0]), f"{prefix}.mlp.gate")
            self.call(self.live.get(gated.inputs[1]), f"{prefix}.mlp.up")
            middle = self.call(gated, f"{prefix}.mlp.gated")
        else:
            up = self.call(inner[0] if inner else None, f"{prefix}.mlp.up")
            middle = self.call(self.reader(up, "activation"), f"{prefix}.mlp.activation")
        down = self.call(self.reader(middle, "linear"), f"{prefix}.mlp.down")
        self.after(down, f"{prefix}.mlp")


def name_all(dag: Dag, live: Mapping[str, Raised], head: Raised) -> Names:
    """Names and order of all live operations, the head being the last."""
    namer = _Namer(dag, live)
    namer.call(head, "logits")
    final = live.get(head.inputs[0])
    if final is not None and final.op in _NORMS:
        namer.call(final, "final_norm")
    attentions = [node for node in live.values() if node.op == "attention"]
    for node in sorted(attentions, key=lambda n: int(n.attrs["layer"])):  # type: ignore[arg-type]
        namer.layer(node, f"layer{node.attrs['layer']}")
    for node in live.values():
        if node.op == "embedding":
            namer.call(node, "embedding")
        elif node.op == "position_embedding":
            namer.call(node, "positioned")
    taken = set(namer.names.values())
    for node in live.values():
        if node.id not in namer.names:
            label = f"{node.op}{node.index}"
            while label in taken:
                label += "_"
            taken.add(label)
            namer.names[node.id] = label
    names = Names(nodes=_unique(namer.names))
    names.order = _ordered(live, names.nodes)
    names.style = _style(dag, live, names.nodes)
    _name_weights(dag, live, names)
    return names


def _unique(names: dict[str, str]) -> dict[str, str]:
    """Two operations in one role (which no known family has) get different names."""
    taken: set[str] = set()
    out = {}
    for key, name in names.items():
        label = name
        while label in taken:
            label += "_"
        taken.add(label)
        out[key] = label
    return out


def _rank(name: str) -> tuple[int, int]:
    """Where a named operation stands in the builders' order."""
    if name in ("embedding", "positioned"):
        return (-1, int(name == "positioned"))
    if name in ("final_norm", "logits"):
        return (1 << 30, int(name == "logits"))
    layer, _, role = name.partition(".")
    if layer.startswith("layer") and layer[5:].isdigit() and role in LAYER_ROLES:
        return (int(layer[5:]), LAYER_ROLES.index(role))
    return (-2, 0)


def _ordered(live: Mapping[str, Raised], names: Mapping[str, str]) -> list[str]:
    """A topological order, the builders' where it is free."""
    waiting = {key: len({i for i in node.inputs if i in live}) for key, node in live.items()}
    readers: dict[str, list[str]] = {}
    for key, node in live.items():
        for name in {i for i in node.inputs if i in live}:
            readers.setdefault(name, []).append(key)
    heap = [(*_rank(names[k]), live[k].index, k) for k, count in waiting.items() if count == 0]
    heapq.heapify(heap)
    order = []
    while heap:
        key = heapq.heappop(heap)[-1]
        order.append(key)
        for reader in readers.get(key, []):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(heap, (*_rank(names[reader]), live[reader].index, reader))
    return order


def _style(dag: Dag, live: Mapping[str, Raised], names: Mapping[str, str]) -> str:
    """Whose tensor names the weights take: gpt2, phi3 (joined projections) or llama."""
    ops = {node.op for node in live.values()}
    if "position_embedding" in ops and "layer_norm" in ops:
        return "gpt2"
    gates = [node for key, node in live.items() if names[key].endswith(".mlp.gate")]
    joined = [isinstance(dag.weights[node.inputs[1]], SlicedData) for node in gates]
    return "phi3" if joined and all(joined) else "llama"


def _name_weights(dag: Dag, live: Mapping[str, Raised], names: Names) -> None:
    post_norm = any(name.endswith(".attention_post_norm") for name in names.nodes.values())
    windows = {
        node.inputs[0]: int(node.attrs["window"])  # type: ignore[arg-type]
        for node in live.values()
        if node.op == "attention"
    }
    tables = {node.inputs[2] for node in live.values() if node.op == "rope"}
    local = {node.inputs[2] for key, node in live.items() if node.op == "rope" and windows.get(key)}
    taken: set[str] = set()

    def give(weight: str, wanted: str) -> None:
        if not weight or weight in names.weights:
            return
        label = wanted
        while label in taken:
            label += "_"
        taken.add(label)
        names.weights[weight] = label

    for table in sorted(tables, key=lambda t: t not in local):
        slides = len(tables) > 1 and table in local
        give(table, "rope.local_inv_freq" if slides else "rope.inv_freq")
    for key in names.order:
        node, name = live[key], names.nodes[key]
        weights = [i for i in node.inputs if i in dag.weights]
        if node.op == "rope" or not weights:
            continue
        module = _module(name, names.style, post_norm)
        for i, weight in enumerate(weights):
            part = "weight" if i == 0 else "bias"
            full, span = _joined(module, dag.weights[weight], names.style)
            give(weight, f"{full}.{part}{span}")


def _module(name: str, style: str, post_norm: bool) -> str:
    """The checkpoint's module of a role."""
    gpt2 = style == "gpt2"
    whole = {
        "embedding": "transformer.wte" if gpt2 else "model.embed_tokens",
        "positioned": "transformer.wpe",
        "final_norm": "transformer.ln_f" if gpt2 else "model.norm",
        "logits": "lm_head",
    }
    if name in whole:
        return whole[name]
    layer, _, role = name.partition(".")
    table = _GPT2 if gpt2 else _LLAMA
    if role not in table:
        return name
    inner = table[role]
    if role == "mlp_norm" and post_norm:
        inner = "pre_feedforward_layernorm"
    return f"transformer.h.{layer[5:]}.{inner}" if gpt2 else f"model.layers.{layer[5:]}.{inner}"


def _joined(module: str, data: WeightData, style: str) -> tuple[str, str]:
    """Slices of joined projections are named like the builders name them."""
    if not isinstance(data, SlicedData) or style == "llama":
        return module, ""
    span = f"[{data.start}:{data.stop}]"
    if style == "phi3":
        head, _, last = module.rpartition(".")
        joined = "qkv_proj" if last in ("q_proj", "k_proj", "v_proj") else "gate_up_proj"
        return f"{head}.{joined}", span
    return module, span
