"""What a lifted decoder is in Hugging Face's words, and what a config.json beside the file adds.

Exporters drop facts: Gemma 2's cap on scores, the long set of longrope, windows. Where the config
beside the file names them, they are restored, and each restoration is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hornito.graph.weights import load_all
from hornito.importers.families import complete_config, known_families
from hornito.importers.onnx.dag import Raised
from hornito.importers.onnx.finish import Lifted
from hornito.importers.onnx.lift import Lift
from hornito.models._builder import Builder, windows
from hornito.models._rope import rotary

#: Context of a file that says nothing about it.
UNKNOWN_CONTEXT = 4096


def completed(config: Mapping[str, Any], where: Path, layers: int) -> dict[str, Any]:
    """The config beside the file with its family's defaults, where the family is known."""
    model_type = config.get("model_type")
    if model_type in known_families():
        return complete_config(config, str(where / "config.json"), max(layers * 4, 1))
    return dict(config)


def restore(lifted: Lifted, config: Mapping[str, Any]) -> list[str]:
    """Put back what the exporter dropped and the config names; what was done, in words."""
    notes: list[str] = []
    _check_counts(lifted, config, notes)
    attentions = lifted.attentions()
    cap = config.get("attn_logit_softcapping")
    if cap and config.get("model_type") == "gemma2":
        plain = [node for node in attentions if not node.attrs["softcap"]]
        for node in plain:
            node.attrs["softcap"] = float(cap)
        if plain:
            notes.append(
                f"config.json: attention scores are capped at {cap:g} "
                f"(attn_logit_softcapping), which the export lost; restored in {len(plain)} layers"
            )
    _restore_windows(attentions, config, notes)
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "longrope":
        _restore_longrope(lifted, config, scaling, notes)
    return notes


def _check_counts(lifted: Lifted, config: Mapping[str, Any], notes: list[str]) -> None:
    first = lifted.attentions()[0].attrs
    found = {
        "num_hidden_layers": len(lifted.attentions()),
        "num_attention_heads": first["heads"],
        "num_key_value_heads": first["kv_heads"],
        "head_dim": first["head_dim"],
    }
    for key, value in found.items():
        stated = config.get(key)
        if isinstance(stated, int) and stated != value:
            notes.append(
                f"config.json: {key} is {stated}, but the file has {value}; kept the file's"
            )


def _restore_windows(attentions: list[Raised], config: Mapping[str, Any], notes: list[str]) -> None:
    if config.get("model_type") not in known_families() or not config.get("sliding_window"):
        return
    wanted = windows({**config, "num_hidden_layers": len(attentions)})
    if len(wanted) != len(attentions):
        return
    restored, differ = [], []
    for i, (node, window) in enumerate(zip(attentions, wanted, strict=True)):
        if window and not node.attrs["window"]:
            node.attrs["window"] = window
            restored.append(i)
        elif node.attrs["window"] != window:
            differ.append(i)
    if restored:
        notes.append(
            f"config.json: layers {restored} slide over {config['sliding_window']} positions, "
            "which the export lost; restored"
        )
    if differ:
        notes.append(
            f"config.json: the windows of layers {differ} are not the file's; kept the file's"
        )


def _restore_longrope(
    lifted: Lifted, config: Mapping[str, Any], scaling: Mapping[str, Any], notes: list[str]
) -> None:
    ropes = [n for n in lifted.nodes.values() if n.op == "rope" and "original_max" not in n.attrs]
    if not ropes or len({n.inputs[2] for n in ropes}) != 1:
        return
    frozen = load_all(lifted.dag.weights[ropes[0].inputs[2]])
    kept: dict[str, npt.NDArray[np.float32]] = {}

    def keep(name: str, array: npt.NDArray[np.float32]) -> str:
        kept[name] = array
        return name

    stub = cast(Builder, SimpleNamespace(config=config, constant=keep))
    theta = float(config.get("rope_theta") or 1e4)
    rope = rotary(stub, dim=2 * len(frozen), theta=theta, scaling=scaling)
    both = kept[rope.inv_freq]
    which = [
        name
        for name, row in zip(("short", "long"), both, strict=True)
        if np.allclose(row, frozen, rtol=2e-3 if _half(frozen) else 1e-5, atol=0)
    ]
    scale = float(ropes[0].attrs["scale"])  # type: ignore[arg-type]
    if not which or not math.isclose(scale, rope.scale, rel_tol=2e-3):
        notes.append(
            "config.json: rope_scaling is longrope, but the file's frequencies are of neither of "
            "its sets; kept the file's"
        )
        return
    table = lifted.dag.frequencies(both)
    old = ropes[0].inputs[2]
    lifted.names.weights[table] = lifted.names.weights[old]
    for node in ropes:
        node.inputs = (*node.inputs[:2], table)
        node.attrs |= {"scale": rope.scale, "original_max": rope.original_max}
    notes.append(
        f"config.json: rope_scaling is longrope, of which the export froze the {which[0]} factors; "
        f"both sets are restored: the long one holds for contexts over {rope.original_max}"
    )


def _half(frozen: npt.NDArray[np.float32]) -> bool:
    return np.array_equal(frozen, frozen.astype(np.float16).astype(np.float32))


def model_type(lifted: Lifted) -> str:
    """The family that the graph looks like, for a file without config.json."""
    roles = lifted.by_name()
    first = lifted.attentions()[0].attrs
    if lifted.names.style in ("gpt2", "phi3"):
        return lifted.names.style
    post_norm = any(name.endswith("attention_post_norm") for name in roles)
    q = roles.get("layer0.q")
    if post_norm:
        return "gemma3_text" if "layer0.q_norm" in roles else "gemma2"
    if "layer0.q_norm" in roles:
        return "qwen3"
    if q is not None and q.inputs[2]:
        return "qwen2"
    return "mistral" if first["window"] else "llama"


def described(lifted: Lifted, cx: Lift, config: Mapping[str, Any]) -> dict[str, Any]:
    """Config keys that the rest of Hornito asks for; the file's facts win over the config's.

    The context is that of the config, of genai_config.json, or of the tables in the file.
    """
    out = dict(config)
    dag = lifted.dag
    embedding = next(n for n in lifted.nodes.values() if n.op == "embedding")
    vocabulary, hidden = dag.weights[embedding.inputs[1]].shape
    first = lifted.attentions()[0].attrs
    out.update(
        hidden_size=hidden,
        vocab_size=vocabulary,
        num_hidden_layers=len(lifted.attentions()),
        num_attention_heads=first["heads"],
        num_key_value_heads=first["kv_heads"],
        head_dim=first["head_dim"],
        tie_word_embeddings=lifted.tied,
    )
    out.setdefault("rope_theta", None)
    out.setdefault("rope_scaling", None)
    places = [n for n in lifted.nodes.values() if n.op == "position_embedding"]
    if places:
        out["max_position_embeddings"] = dag.weights[places[0].inputs[2]].shape[0]
    if not isinstance(out.get("max_position_embeddings"), int):
        length = cx.facts.get("table_length")
        out["max_position_embeddings"] = length or UNKNOWN_CONTEXT
        if not length:
            lifted.warnings.append(
                f"no config.json beside the file: its context is unknown, {UNKNOWN_CONTEXT} is "
                "assumed"
            )
    return out
