"""Types and ranges of ops' attributes, and what kind of thing each input of an op is.

Graphs that importers build hold to them by construction; one that comes out of a file is checked
against them before any shape rule or kernel sees its numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hornito.errors import FormatError
from hornito.graph.graph import Node

MOST = (1 << 31) - 1
MOST_FLOAT = 3.0e38  # below the largest fp32


@dataclass(frozen=True, slots=True)
class Rule:
    """What an attribute may be: whole numbers, or any within the range."""

    least: float
    most: float
    whole: bool = False
    required: bool = True

    def check(self, node: Node, name: str) -> None:
        """Raise FormatError unless the node's attribute fits."""
        if name not in node.attrs:
            if self.required:
                raise FormatError(f"node {node.name} ({node.op}) lacks the attribute {name}")
            return
        value = node.attrs[name]
        fits = type(value) is int or (not self.whole and isinstance(value, float))
        if fits and isinstance(value, int | float) and math.isfinite(value):
            fits = self.least <= value <= self.most
        else:
            fits = False
        if not fits:
            kind = "a whole number" if self.whole else "a number"
            raise FormatError(
                f"node {node.name} ({node.op}): {name} must be {kind} from {self.least} to "
                f"{self.most}, not {value!r:.60}"
            )


_LAYER = Rule(0, MOST, whole=True)
_COUNT = Rule(1, MOST, whole=True)
_EPS = Rule(0.0, 1e6)
_OPTIONAL_EPS = Rule(0.0, 1e6, required=False)
_CAP = Rule(0.0, MOST_FLOAT, required=False)
_SCALE = Rule(-MOST_FLOAT, MOST_FLOAT, required=False)
_CACHED = {"layer": _LAYER, "kv_heads": _COUNT, "head_dim": _COUNT}
_ROTARY = {
    "heads": _COUNT,
    "head_dim": _COUNT,
    "scale": _SCALE,
    "original_max": Rule(1, MOST, whole=True, required=False),
}

RULES: dict[str, dict[str, Rule]] = {
    "attention": {
        **_CACHED,
        "heads": _COUNT,
        "scale": Rule(-MOST_FLOAT, MOST_FLOAT),
        "window": Rule(0, MOST, whole=True),
        "softcap": Rule(0.0, MOST_FLOAT),
    },
    "embedding": {"scale": _SCALE},
    "gated_linear": {"eps": _OPTIONAL_EPS},
    "head": {"softcap": _CAP},
    "kv_append": _CACHED,
    "layer_norm": {"eps": _EPS},
    "linear": {"eps": _OPTIONAL_EPS},
    "qkv_append": {**_ROTARY, **_CACHED, "eps": _OPTIONAL_EPS},
    "rms_norm": {"eps": _EPS, "heads": Rule(1, MOST, whole=True, required=False)},
    "rope": {**_ROTARY, "scale": Rule(-MOST_FLOAT, MOST_FLOAT)},
    "rope_append": {
        **_ROTARY,
        **_CACHED,
        "eps": _OPTIONAL_EPS,
    },
}
"""By op and attribute. `activation`, a name, is checked by the shape rules."""

INPUTS: dict[str, str] = {
    "activation": "value",
    "add": "value value",
    "attention": "value cache",
    "embedding": "ids matrix",
    "gated_activation": "value value",
    "gated_linear": "value matrix vector? vector?",
    "head": "value matrix",
    "kv_append": "value value",
    "layer_norm": "value vector selection? vector",
    "linear": "value matrix vector? value? vector?",
    "position_embedding": "value positions matrix",
    "qkv_append": "value matrix vector? vector? positions? vector?",
    "rms_norm": "value vector selection? value?",
    "rope": "value positions vector",
    "rope_append": "value positions? vector? vector? vector?",
    "select_rows": "value selection",
}
"""What each op's inputs are: the graph inputs `ids`, `positions` and `selection`; an fp32 `value`;
a `cache` token; a `matrix`, stored in any type, or a `vector`, which is a weight in fp32. `?` marks
those that may be absent."""


def check_attributes(node: Node) -> None:
    """Check the attributes that have a rule.

    Raises:
        FormatError: one is missing, of another type, or out of its range; names node and attribute.
    """
    for name, rule in RULES.get(node.op, {}).items():
        rule.check(node, name)
