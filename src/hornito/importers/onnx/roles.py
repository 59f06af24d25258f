"""What the inputs of an exported decoder are, by name: their order and axis names say nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from hornito.errors import UnsupportedError
from hornito.graph.shapes import Dim
from hornito.importers.onnx.affine import N, P, objects
from hornito.importers.onnx.reader import Model
from hornito.importers.onnx.values import Atom, Const, Grid, Ids, Mask, Opaque, Past, Value

_PAST = [
    re.compile(r"past_key_values[._](?P<layer>\d+)[._](?:decoder[._])?(?P<part>key|value)s?$"),
    re.compile(r"past[._](?P<layer>\d+)[._](?P<part>key|value)s?$"),
    re.compile(r"past_(?P<part>key|value)s?[._](?P<layer>\d+)$"),
    re.compile(r"(?P<part>key|value)_cache[._](?P<layer>\d+)$"),
    re.compile(r"cache[._](?P<part>key|value)[._](?P<layer>\d+)$"),
]
_PRESENT = re.compile(r"present|updated_|^(key|value)_cache|new_(key|value)", re.IGNORECASE)
IDS, EMBEDS = "input_ids", "inputs_embeds"
MASK, POSITIONS = "attention_mask", "position_ids"
_KNOWN = (IDS, MASK, POSITIONS, "cache_position", "use_cache_branch", "write_indices")


@dataclass(slots=True)
class Roles:
    """Inputs by role.

    Attributes:
        past: P, or 0 when the model has no past inputs.
        layers: input names of a layer's cached keys and values, by layer from 0.
        others: inputs of no known role.
    """

    past: Dim
    layers: dict[int, dict[str, str]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def cache_place(name: str) -> tuple[int, str] | None:
    """Layer and part (`key` or `value`) that the name of a cache's input or output says, if any."""
    numbers, parts = re.findall(r"\d+", name), re.findall(r"key|value", name.lower())
    return (int(numbers[-1]), parts[-1]) if numbers and parts else None


def find_roles(model: Model, *, allow_no_past: bool = False) -> Roles:
    """The roles of a model's inputs.

    Raises:
        UnsupportedError: it is no decoder with a past, and why.
    """
    where = model.path
    if IDS not in model.inputs:
        has = ", ".join(model.inputs) or "none"
        raise UnsupportedError(f"{where}: no input named {IDS}: not a decoder. Inputs: {has}")
    if "encoder_hidden_states" in model.inputs:
        raise UnsupportedError(f"{where}: a decoder with cross-attention is not supported")
    layers: dict[int, dict[str, str]] = {}
    others = []
    for name in model.inputs:
        match = next((m for p in _PAST if (m := p.search(name))), None)
        if match:
            layers.setdefault(int(match["layer"]), {})[match["part"]] = name
        elif name not in _KNOWN and name != "nonpad_kv_seqlen":
            others.append(name)
    if not layers and not allow_no_past:
        raise UnsupportedError(_without_past(model))
    broken = [i for i, parts in layers.items() if set(parts) != {"key", "value"}]
    if broken:
        raise UnsupportedError(f"{where}: layer {broken[0]} has no pair of past key and value")
    ordered = {i: layers[layer] for i, layer in enumerate(sorted(layers))}
    return Roles(P if layers else 0, ordered, others)


def _without_past(model: Model) -> str:
    present = [name for name in model.outputs if _PRESENT.search(name)]
    text = f"{model.path}: the model has no past inputs (past_key_values.N.key, .value)"
    if present:
        text += f", although it gives {present[0]}: a decoder 'with past' must take it, too"
    return text + ". Export it with --task text-generation-with-past"


def bind_inputs(model: Model, roles: Roles) -> dict[str, Value]:
    """What each input is when lifting begins."""
    total = roles.past + N
    bound: dict[str, Value] = {name: Opaque(-1, f"the input {name}") for name in roles.others}
    for name, declared in model.inputs.items():
        if name == IDS:
            bound[name] = Ids((1, N))
        elif name == MASK:
            valid = Mask((1, total), (Atom("valid", 0, (0, 1)),), np.array([0, 1]))
            bound[name] = valid if len(declared) == 2 else Opaque(-1, f"{name} of rank != 2")
        elif name == POSITIONS:
            grid = Grid((1, N), roles.past, (0, 1))
            bound[name] = grid if len(declared) == 2 else Opaque(-1, f"{name} of rank != 2")
        elif name == "cache_position":
            bound[name] = Grid((N,), roles.past, (1,))
        elif name == "use_cache_branch":
            bound[name] = Const(np.array([True]))
        elif name == "write_indices":
            bound[name] = Const(objects([roles.past]))
        elif name == "nonpad_kv_seqlen":
            bound[name] = Const(objects([total]))
    for layer, parts in roles.layers.items():
        for part, name in parts.items():
            bound[name] = _past(layer, part, model.inputs[name])
    return bound


def _past(layer: int, part: str, declared: tuple[int | str, ...]) -> Value:
    """Cached keys or values: `[1, heads, P, D]`, `[1, P, heads, D]` or `[1, P, heads * D]`."""
    if len(declared) not in (3, 4):
        return Opaque(-1, f"a past of rank {len(declared)}")
    axis = 1
    if len(declared) == 4 and (isinstance(declared[1], int) or not isinstance(declared[2], int)):
        axis = 2
    # A width that is a name (kv_cache_dim) is only known to the op that reads it.
    sizes = [d if isinstance(d, int) and 0 < d < 1 << 16 else 1 for d in declared]
    sizes[0] = sizes[axis] = 1
    cols = np.arange(int(np.prod(sizes)), dtype=np.int64).reshape(sizes)
    return Past(layer, part, axis, P, cols)
