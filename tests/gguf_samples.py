"""GGUF files that tests write, from tiny checkpoints and tiny vocabularies.

Tensor names come from the `gguf` package's own map, and the layout changes (row order of q and k,
1 + w in Gemma norms, transposed GPT-2 matrices) are written out here as llama.cpp's converter does
them, so that the importer is held against something that it does not share.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from tree import ROOT

HF = ROOT / "tests" / "data" / "hf"
#: Family of each checkpoint, as gguf's architecture.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "smollm3": "smollm3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}


def read_config(name: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint under tests/data/hf, or of a folder."""
    config: dict[str, Any] = json.loads((HF / name / "config.json").read_text())
    return config


def permuted(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Row order of q and k in Llama's GGUF files, from Hugging Face's."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def converted(
    name: str, weight: npt.NDArray[Any], config: dict[str, Any]
) -> npt.NDArray[np.float32]:
    """What llama.cpp's converter makes of a checkpoint's tensor."""
    kind = config["model_type"]
    if kind in ("llama", "mistral", "smollm3"):
        if ".q_proj." in name:
            weight = permuted(weight, config["num_attention_heads"])
        if ".k_proj." in name:
            weight = permuted(weight, config["num_key_value_heads"])
    if kind in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
        weight = weight + 1.0
    if kind == "gpt2" and weight.ndim == 2 and ".h." in name:
        weight = weight.T
    return np.ascontiguousarray(weight, dtype=np.float32)


def add_config(writer: Any, config: dict[str, Any]) -> None:
    """Keys of the architecture, from config.json."""
    kind = config["model_type"]
    writer.add_block_count(config.get("num_hidden_layers", config.get("n_layer")))
    writer.add_head_count(config.get("num_attention_heads", config.get("n_head")))
    writer.add_context_length(config.get("max_position_embeddings", config.get("n_positions")))
    hidden = config.get("hidden_size", config.get("n_embd"))
    writer.add_embedding_length(hidden)
    if kind == "gpt2":
        writer.add_feed_forward_length(config["n_inner"] or 4 * hidden)
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    if head_dim * config["num_attention_heads"] != hidden or kind.startswith("gemma"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1.0)))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def llama3_divisors(config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """`rope_freqs.weight` of a Llama 3 checkpoint, by the converter's own steps in float32."""
    rope, dim = config["rope_scaling"], config["head_dim"]
    steps = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    freqs = np.float32(1.0) / (np.float32(config["rope_theta"]) ** steps)
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    out = []
    for freq in freqs:
        wavelength = 2 * np.pi / float(freq)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(out, dtype=np.float32)


def write_checkpoint(
    path: Path,
    name: str | Path,
    *,
    quantise: dict[str, str] | None = None,
    vocabulary: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, npt.NDArray[Any]] | None = None,
    keys: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of tests/data/hf as a GGUF file.

    Args:
        path: the file to write.
        name: the checkpoint, or a folder with one.
        quantise: GGUF tensor name to ggml type, where it is not to be F32.
        vocabulary: `tokenizer.*` keys (`tiny_vocabulary`).
        drop: GGUF names of tensors to leave out.
        extra: further tensors by GGUF name.
        keys: further uint32 keys; they replace those of the config.
    """
    import gguf

    config = read_config(name)
    arch = ARCHITECTURES[config["model_type"]]
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    names = gguf.get_tensor_name_map(number, layers)
    writer = gguf.GGUFWriter(path, arch)
    add_config(writer, config)
    for key, value in (keys or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_uint32(key, value)
    for key, value in (vocabulary or {}).items():
        _add_key(writer, key, value)
    tensors = {
        names.get_name(key, try_suffixes=(".weight", ".bias")): converted(key, weight, config)
        for key, weight in load_file(HF / name / "model.safetensors").items()
    }
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_divisors(config)
    if scaling.get("type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        tensors["rope_factors_long.weight"] = np.array(scaling["long_factor"], np.float32)
        tensors["rope_factors_short.weight"] = np.array(scaling["short_factor"], np.float32)
    tensors.update(extra or {})
    for key, weight in tensors.items():
        if key in drop:
            continue
        kind = (quantise or {}).get(key)
        if kind is None:
            writer.add_tensor(key, weight)
        else:
            ggml_type = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(key, gguf.quantize(weight, ggml_type), raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_key(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def byte_characters() -> list[str]:
    """GPT-2's character for each byte (from the GPT-2 repository's encoder.py)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters, extra = {}, 0
    for byte in range(256):
        if byte in kept:
            characters[byte] = chr(byte)
        else:
            characters[byte] = chr(256 + extra)
            extra += 1
    return [characters[byte] for byte in range(256)]


TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_vocabulary(size: int = 512, pre: str | None = "smollm") -> dict[str, Any]:
    """Keys of a byte-level BPE vocabulary: control and user-defined tokens, bytes, some merges.

    Ids: 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>, 3 <tool>, 4 to 259 the bytes, then merges.
    """
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ Ġ"]
    tokens = [*control, "<tool>", *byte_characters(), *(m.replace(" ", "") for m in merges)]
    tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
    types = [3, 3, 3, 4] + [1] * (256 + len(merges))
    types += [5] * (size - len(types))
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    if pre is not None:
        keys["tokenizer.ggml.pre"] = pre
    return keys
