"""Per family: the defaults of its config.json and the tensors that a checkpoint must hold.

The defaults are those of transformers' config classes, for keys that a file leaves out, so that
model builders find every key they need. The table of expected tensors turns a damaged or foreign
checkpoint into an error that names the tensor, before any weight is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hornito.errors import FormatError, UnsupportedError
from hornito.importers.source import LazyTensor

Shapes = dict[str, tuple[int, ...]]

_COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "rope_scaling": None,
    "sliding_window": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_window_layers": 28, "use_sliding_window": False},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_window_layers": 28,
        "use_sliding_window": False,
    },
    "phi3": {
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "smollm3": {
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    },
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        **_GEMMA,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}
_GPT2_DEFAULTS: dict[str, Any] = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "n_positions": 1024,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
#: Buffers that old checkpoints carry and that are computed from the config.
_IGNORABLE = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$")


def decimal(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 9.99999997e-07 -> 1e-06."""
    with np.errstate(over="ignore"):
        short = float(str(np.float32(value)))
    if not math.isfinite(short):
        raise ValueError(f"{value} is not finite in float32")
    return short


def is_ignorable(name: str) -> bool:
    """Whether a tensor is a buffer that is computed from the config, not a weight."""
    return _IGNORABLE.search(name) is not None


_REALS = frozenset(
    (
        "rms_norm_eps",
        "layer_norm_epsilon",
        "rope_theta",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        "partial_rotary_factor",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    )
)
_COUNTS = frozenset(
    (
        "max_position_embeddings",
        "original_max_position_embeddings",
        "n_positions",
        "sliding_window",
        "max_window_layers",
    )
)
_OPTIONAL = frozenset(
    (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window",
        "original_max_position_embeddings",
    )
)
_FLAGS = frozenset(
    (
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
        "use_sliding_window",
    )
)
_TEXTS = frozenset(("hidden_act", "hidden_activation", "activation_function"))
_ROPE_REALS = frozenset(
    (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    )
)
_ROPE_LISTS = frozenset(("long_factor", "short_factor"))


def known_families() -> tuple[str, ...]:
    """Model types whose tensors and defaults this module describes."""
    return (*_DEFAULTS, "gpt2")


def _count(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise FormatError(f"{where}: {key} is {value!r}; a number above zero is needed")
    return value


def _is_real(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e30  # false for NaN, too
        and value > 0
    )


def _check_values(config: Mapping[str, Any], where: str, layers: int) -> None:
    """Refuse values of another kind than a model can be built from."""
    for key, value in config.items():
        if key in _REALS and not (_is_real(value) or (value is None and key in _OPTIONAL)):
            raise FormatError(f"{where}: {key} is {str(value)[:40]}; a number above zero is needed")
        if key in _COUNTS and not (value is None and key in _OPTIONAL):
            _count(config, key, where)
        if key in _FLAGS and not isinstance(value, bool):
            raise FormatError(f"{where}: {key} is {str(value)[:40]}, not true or false")
        if key in _TEXTS and not isinstance(value, str):
            raise FormatError(f"{where}: {key} is {str(value)[:40]}, not a name")
    scaling = config.get("rope_scaling")
    if scaling is not None:
        if not isinstance(scaling, dict) or not isinstance(scaling.get("rope_type"), str):
            raise FormatError(f"{where}: rope_scaling is {str(scaling)[:80]}, which names no type")
        for key, value in scaling.items():
            if key in _ROPE_REALS and value is not None and not _is_real(value):
                raise FormatError(f"{where}: rope_scaling {key} is {str(value)[:40]}, no number")
            if key in _ROPE_LISTS and not (isinstance(value, list) and all(map(_is_real, value))):
                raise FormatError(f"{where}: rope_scaling {key} is no list of numbers above zero")
    kinds = config.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in ("sliding_attention", "full_attention") for kind in kinds)
    ):
        raise FormatError(f"{where}: layer_types does not name {layers} full or sliding layers")
    roped = config.get("no_rope_layers")
    if roped is not None and (
        not isinstance(roped, list) or len(roped) != layers or any(r not in (0, 1) for r in roped)
    ):
        raise FormatError(f"{where}: no_rope_layers does not hold {layers} times 0 or 1")


def _rope(config: dict[str, Any]) -> None:
    """Bring the spellings of RoPE settings of all transformers versions to one."""
    parameters = config.pop("rope_parameters", None)
    if isinstance(parameters, dict):
        local = parameters.get("sliding_attention")
        if isinstance(local, dict) and "rope_theta" in local:
            config["rope_local_base_freq"] = local["rope_theta"]
        whole = parameters.get("full_attention", parameters)
        if isinstance(whole, dict):
            config["rope_theta"] = whole.get("rope_theta", config.get("rope_theta", 1e4))
            config["rope_scaling"] = {k: v for k, v in whole.items() if k != "rope_theta"}
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        kind = "longrope" if kind == "su" else kind
        scaling = {**scaling, "rope_type": kind}
        scaling.pop("type", None)
        for key in ("long_factor", "short_factor"):
            # Used as float32 by transformers and by GGUF; the same decimals for both.
            if isinstance(scaling.get(key), list):
                scaling[key] = [decimal(value) for value in scaling[key]]
        config["rope_scaling"] = None if kind == "default" else scaling


def _layer_kinds(config: dict[str, Any], layers: int) -> None:
    model_type = config["model_type"]
    if model_type in ("qwen2", "qwen3", "smollm3") and not config["use_sliding_window"]:
        config["sliding_window"] = None
    if model_type == "smollm3" and not config.get("no_rope_layers"):
        step = int(config["no_rope_layer_interval"] or 0) or layers + 1
        config["no_rope_layers"] = [int((i + 1) % step != 0) for i in range(layers)]
    if config.get("layer_types"):
        return
    window = config.get("sliding_window")
    if model_type in ("gemma2", "gemma3_text"):
        default = 2 if model_type == "gemma2" else 6
        step = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", default))
        sliding = [bool((i + 1) % int(step)) for i in range(layers)]
    elif model_type in ("qwen2", "qwen3"):
        first = int(config["max_window_layers"])
        sliding = [window is not None and i >= first for i in range(layers)]
    elif model_type == "smollm3":
        sliding = [window is not None and not rope for rope in config["no_rope_layers"]]
    else:
        return
    config["layer_types"] = ["sliding_attention" if on else "full_attention" for on in sliding]


def complete_config(config: Mapping[str, Any], where: str, tensor_count: int) -> dict[str, Any]:
    """A copy of a config.json with every default of its family filled in and checked.

    Args:
        config: keys of config.json; `model_type` is there.
        where: the file, for messages.
        tensor_count: tensors in the checkpoint; a model has at least one a layer, which bounds
            every table made from the number of layers.

    Raises:
        FormatError: a size is missing, not a number above zero, or contradicts another.
    """
    model_type = config["model_type"]
    out = dict(config)
    if model_type == "gpt2":
        out = {**_GPT2_DEFAULTS, **out}
        hidden, heads = _count(out, "n_embd", where), _count(out, "n_head", where)
        if out["n_inner"] is None:
            out["n_inner"] = 4 * hidden
        layers = _count(out, "n_layer", where)
        # The names that every other family has, as transformers' attribute map gives them.
        out.update(hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=layers)
        out["max_position_embeddings"] = _count(out, "n_positions", where)
        if hidden % heads:
            raise FormatError(f"{where}: n_embd {hidden} is no multiple of n_head {heads}")
    elif model_type in _DEFAULTS:
        out = {**_COMMON, **_DEFAULTS[model_type], **out}
        try:
            _rope(out)
        except (TypeError, ValueError) as error:
            raise FormatError(f"{where}: bad RoPE settings: {error}") from error
        hidden = _count(out, "hidden_size", where)
        heads = _count(out, "num_attention_heads", where)
        layers = _count(out, "num_hidden_layers", where)
        if out.get("num_key_value_heads") is None:
            out["num_key_value_heads"] = heads
        if heads % _count(out, "num_key_value_heads", where):
            raise FormatError(
                f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads "
                f"{out['num_key_value_heads']}"
            )
        if out.get("head_dim") is None:
            out["head_dim"] = hidden // heads
        if _count(out, "head_dim", where) % 2:
            raise FormatError(f"{where}: head_dim {out['head_dim']} is odd: RoPE needs pairs")
    else:
        return out
    if layers > tensor_count:
        raise FormatError(f"{where}: {layers} layers, but the file has {tensor_count} tensors")
    if model_type != "gpt2":
        _count(out, "max_position_embeddings", where)
        try:
            _layer_kinds(out, layers)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise FormatError(f"{where}: bad layer settings: {error}") from error
    _check_values(out, where, layers)
    return out


def _gpt2(config: Mapping[str, Any], where: str) -> Shapes:
    hidden, vocab = config["n_embd"], _count(config, "vocab_size", where)
    inner = _count(config, "n_inner", where)
    shapes: Shapes = {
        "transformer.wte.weight": (vocab, hidden),
        "transformer.wpe.weight": (_count(config, "n_positions", where), hidden),
    }
    for i in range(config["n_layer"]):
        block = f"transformer.h.{i}."
        for norm in ("ln_1", "ln_2"):
            shapes[f"{block}{norm}.weight"] = shapes[f"{block}{norm}.bias"] = (hidden,)
        for name, rows, columns in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, inner),
            ("mlp.c_proj", inner, hidden),
        ):
            shapes[f"{block}{name}.weight"] = (rows, columns)
            shapes[f"{block}{name}.bias"] = (columns,)
    shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = (hidden,)
    return shapes


def _attention(config: Mapping[str, Any]) -> tuple[Shapes, set[str]]:
    """Shapes of one layer's attention, and which of its projections have a bias."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    query = config["num_attention_heads"] * dim
    key = config["num_key_value_heads"] * dim
    if config["model_type"] == "phi3":
        return {"qkv_proj": (query + 2 * key, hidden), "o_proj": (hidden, query)}, set()
    shapes: Shapes = {
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
    }
    if config["model_type"] == "qwen2":
        return shapes, {"q_proj", "k_proj", "v_proj"}
    return shapes, set(shapes) if config["attention_bias"] else set()


def _decoder(config: Mapping[str, Any], where: str) -> Shapes:
    model_type, hidden = config["model_type"], config["hidden_size"]
    inner = _count(config, "intermediate_size", where)
    shapes: Shapes = {"model.embed_tokens.weight": (_count(config, "vocab_size", where), hidden)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if model_type in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    mlp: Shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    if model_type == "phi3":
        mlp = {"gate_up_proj": (2 * inner, hidden)}
    mlp["down_proj"] = (hidden, inner)
    attention, biased = _attention(config)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for norm in norms:
            shapes[f"{layer}{norm}.weight"] = (hidden,)
        for name, shape in attention.items():
            shapes[f"{layer}self_attn.{name}.weight"] = shape
            if name in biased:
                shapes[f"{layer}self_attn.{name}.bias"] = shape[:1]
        if model_type in ("qwen3", "gemma3_text"):
            for norm in ("q_norm", "k_norm"):
                shapes[f"{layer}self_attn.{norm}.weight"] = (config["head_dim"],)
        for name, shape in mlp.items():
            shapes[f"{layer}mlp.{name}.weight"] = shape
            if config["mlp_bias"] and model_type in ("llama", "smollm3"):
                shapes[f"{layer}mlp.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def expected_tensors(config: Mapping[str, Any], where: str) -> Shapes | None:
    """Name and shape of each tensor of a completed config; None for a family not known here."""
    model_type = config["model_type"]
    build: Callable[[Mapping[str, Any], str], Shapes]
    if model_type == "gpt2":
        build, embedding = _gpt2, "transformer.wte.weight"
    elif model_type in _DEFAULTS:
        build, embedding = _decoder, "model.embed_tokens.weight"
    else:
        return None
    shapes = build(config, where)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes[embedding]
    return shapes


def _few(names: Iterable[str]) -> str:
    items = sorted(names)
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return ", ".join(f"'{name}'" for name in items[:5]) + more


def checked_tensors(
    config: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    where: str,
    extra: frozenset[str] = frozenset(),
) -> dict[str, LazyTensor]:
    """The tensors that the model uses, in the model's order, each of the right shape.

    Args:
        config: a completed config.
        tensors: what the checkpoint holds, by Hugging Face name.
        where: the file or directory, for messages.
        extra: names that the config refers to beyond the family's table; kept as they are.

    Raises:
        FormatError: a tensor is missing or has another shape than the config says.
        UnsupportedError: the checkpoint holds tensors that the family does not have, so that a
            run without them would be another model.
    """
    expected = expected_tensors(config, where)
    if expected is None:
        return dict(tensors)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise FormatError(f"{where}: {len(missing)} missing tensor(s): {_few(missing)}")
    ignorable = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    unexpected = [
        name
        for name in tensors
        if name not in expected
        and name not in ignorable
        and name not in extra
        and not is_ignorable(name)
    ]
    if unexpected:
        raise UnsupportedError(
            f"{where}: {len(unexpected)} tensor(s) that a {config['model_type']} model does not "
            f"have: {_few(unexpected)}. Supported is the plain {config['model_type']} layout."
        )
    for name, shape in expected.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise FormatError(
                f"{tensor.file}: tensor '{tensor.file_name}' ({name}) has the shape "
                f"{tensor.shape}, the config asks for {shape}"
            )
    return {name: tensors[name] for name in (*expected, *sorted(extra))}
