"""A float64 forward of every family, straight from config.json and model.safetensors.

It shares nothing with the package: no importer, no graph, no op. Each sequence is evaluated as a
whole, with masks; families differ in a few lines.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[np.float64]


class Oracle:
    """One checkpoint.

    Args:
        folder: with config.json and model.safetensors.
        context: what a slot can hold; longrope chooses its factors by it.
        changes: config keys to replace.
    """

    def __init__(self, folder: Path, *, context: int = 0, **changes: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.config: dict[str, Any] = config | changes
        self.kind: str = self.config["model_type"]
        self.context = context
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: array.astype(np.float64) for name, array in stored.items()}

    def logits(self, ids: list[int]) -> Array:
        """Logits after every id, `[T, V]`."""
        return self._gpt2(ids) if self.kind == "gpt2" else self._decoder(ids)

    # -- families ---------------------------------------------------------------------------

    def _gpt2(self, ids: list[int]) -> Array:
        c, w, t = self.config, self.weights, len(ids)
        count, width = c["n_head"], c["n_embd"]
        prefix = "transformer." if "transformer.wte.weight" in w else ""

        def norm(x: Array, name: str) -> Array:
            centred = x - x.mean(-1, keepdims=True)
            scaled = centred / np.sqrt(
                (centred**2).mean(-1, keepdims=True) + c["layer_norm_epsilon"]
            )
            return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

        def affine(x: Array, name: str) -> Array:
            return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

        x = w[f"{prefix}wte.weight"][ids] + w[f"{prefix}wpe.weight"][:t]
        for i in range(c["n_layer"]):
            block = f"{prefix}h.{i}"
            qkv = affine(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")
            q, k, v = (part.reshape(t, count, -1) for part in np.split(qkv, 3, axis=1))
            scale = (width // count) ** -0.5
            x = x + affine(attend(q, k, v, scale), f"{block}.attn.c_proj")
            h = gelu(affine(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"))
            x = x + affine(h, f"{block}.mlp.c_proj")
        return norm(x, f"{prefix}ln_f") @ w.get("lm_head.weight", w[f"{prefix}wte.weight"]).T

    def _decoder(self, ids: list[int]) -> Array:
        c, w = self.config, self.weights
        gemma = self.kind.startswith("gemma")
        table = w["model.embed_tokens.weight"]
        x = table[ids] * (math.sqrt(c["hidden_size"]) if gemma else 1.0)
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            h = self._attention(self._norm(x, f"{layer}.input_layernorm"), i)
            if gemma:
                h = self._norm(h, f"{layer}.post_attention_layernorm")
            x = x + h
            before = "pre_feedforward" if gemma else "post_attention"
            h = self._mlp(self._norm(x, f"{layer}.{before}_layernorm"), f"{layer}.mlp")
            if gemma:
                h = self._norm(h, f"{layer}.post_feedforward_layernorm")
            x = x + h
        logits = self._norm(x, "model.norm") @ w.get("lm_head.weight", table).T
        return cap(logits, c.get("final_logit_softcapping"))

    def _attention(self, x: Array, i: int) -> Array:
        c, module, t = self.config, f"model.layers.{i}.self_attn", len(x)
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        dim = c.get("head_dim") or c["hidden_size"] // heads
        if self.kind == "phi3":
            sizes = np.cumsum([heads * dim, kv * dim])
            q, k, v = np.split(self._linear(x, f"{module}.qkv_proj"), sizes, axis=1)
        else:
            q, k, v = (self._linear(x, f"{module}.{part}_proj") for part in "qkv")
        q, k, v = q.reshape(t, heads, dim), k.reshape(t, kv, dim), v.reshape(t, kv, dim)
        if f"{module}.q_norm.weight" in self.weights:
            q, k = self._norm(q, f"{module}.q_norm"), self._norm(k, f"{module}.k_norm")
        window = self._window(i)
        if self.kind != "smollm3" or c["no_rope_layers"][i]:
            inv, factor = self._rope(dim, local=self.kind == "gemma3_text" and window is not None)
            q, k = turn(q, inv, factor), turn(k, inv, factor)
        scale = c.get("query_pre_attn_scalar", dim) ** -0.5
        softcap = c.get("attn_logit_softcapping")
        return self._linear(attend(q, k, v, scale, window, softcap), f"{module}.o_proj")

    def _mlp(self, x: Array, module: str) -> Array:
        if self.kind == "phi3":
            gate, up = np.split(self._linear(x, f"{module}.gate_up_proj"), 2, axis=1)
        else:
            gate, up = (self._linear(x, f"{module}.{part}_proj") for part in ("gate", "up"))
        act = gelu(gate) if self.kind.startswith("gemma") else gate / (1.0 + np.exp(-gate))
        return self._linear(act * up, f"{module}.down_proj")

    # -- parts ------------------------------------------------------------------------------

    def _linear(self, x: Array, module: str) -> Array:
        return x @ self.weights[f"{module}.weight"].T + self.weights.get(f"{module}.bias", 0.0)

    def _norm(self, x: Array, module: str) -> Array:
        weight = self.weights[f"{module}.weight"] + float(self.kind.startswith("gemma"))
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def _window(self, i: int) -> int | None:
        c = self.config
        window: int | None = c.get("sliding_window")
        if "layer_types" in c and c["layer_types"][i] == "full_attention":
            return None
        return window

    def _rope(self, dim: int, *, local: bool) -> tuple[Array, float]:
        """Frequencies `[R/2]` and the factor on sine and cosine."""
        c = self.config
        r = int(dim * c.get("partial_rotary_factor", 1.0))
        base = c["rope_local_base_freq"] if local else c["rope_theta"]
        inv = np.array([base ** (-2.0 * i / r) for i in range(r // 2)])
        s = {} if local else c.get("rope_scaling") or {}
        kind = s.get("rope_type", s.get("type"))
        if kind == "linear":
            return inv / s["factor"], 1.0
        if kind == "longrope":
            original, longest = c["original_max_position_embeddings"], c["max_position_embeddings"]
            divisors = s["long_factor" if self.context > original else "short_factor"]
            factor = math.sqrt(1 + math.log(longest / original) / math.log(original))
            return inv / np.array(divisors), factor
        if kind == "yarn":
            return yarn(inv, base, s)
        if kind == "llama3":
            return llama3(inv, s), 1.0
        assert kind is None, kind
        return inv, 1.0


def yarn(inv: Array, base: float, s: dict[str, Any]) -> tuple[Array, float]:
    """arXiv 2309.00071: wavelengths that turn 32 times within the original length are kept, those
    that turn less than once are stretched, and dimensions between are mixed by their index."""
    r, original = 2 * len(inv), s["original_max_position_embeddings"]

    def index_of(turns: float) -> float:
        wavelength = original / turns  # 2 pi base^(2i/r), solved for i
        return r / 2 * math.log(wavelength / (2 * math.pi)) / math.log(base)

    first = max(math.floor(index_of(s.get("beta_fast", 32))), 0)
    last = min(math.ceil(index_of(s.get("beta_slow", 1))), r - 1)
    out = []
    for i, frequency in enumerate(inv):
        stretched = min(1.0, max(0.0, (i - first) / (last - first)))
        out.append(frequency * (1 - stretched) + frequency / s["factor"] * stretched)
    return np.array(out), 1 + 0.1 * math.log(s["factor"])


def llama3(inv: Array, s: dict[str, Any]) -> Array:
    """The Llama 3.1 rule, frequency by frequency."""
    low, high, original = (
        s[key]
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    out = []
    for frequency in inv:
        turns = original * frequency / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        out.append(frequency * kept + frequency / s["factor"] * (1 - kept))
    return np.array(out)


def turn(x: Array, inv: Array, factor: float) -> Array:
    """RoPE on halves of the first R dims: `x [T, heads, D]`, positions from 0."""
    half = len(inv)
    angle = np.arange(len(x))[:, None, None] * inv  # [T, 1, R/2]
    rotated = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angle) * factor
    return np.concatenate([rotated.real, rotated.imag, x[..., 2 * half :]], axis=-1)


def attend(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Array:
    """Causal attention of `[T, heads, D]` over `[T, kv_heads, D]`, within a window if given."""
    t, heads, _ = q.shape
    group = heads // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = cap(np.einsum("ihd,jhd->hij", q, k) * scale, softcap)
    distance = np.arange(t)[:, None] - np.arange(t)[None]
    seen = (distance >= 0) & (distance < (window or t))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights, v).reshape(t, -1)


def cap(x: Array, bound: float | None) -> Array:
    """`bound * tanh(x / bound)`; x itself without a bound."""
    return x if not bound else bound * np.tanh(x / bound)


def gelu(x: Array) -> Array:
    """The tanh form."""
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
