"""GGUF files of every family give the config and the weights of the directory they came from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gguf_samples import ARCHITECTURES, HF, read_config, tiny_vocabulary, write_checkpoint
from hornito.errors import FormatError, UnsupportedError
from hornito.importers import Source, open_source
from hornito.importers.families import complete_config

pytest.importorskip("gguf")

TYPES = tuple(ARCHITECTURES)
NAMES = (
    "llama-tiny",
    "llama3-tiny",
    "mistral-tiny",
    "qwen2-tiny",
    "qwen3-tiny",
    "phi3-tiny",
    "phi3-longrope",
    "gpt2-tiny",
    "gemma2-tiny",
    "gemma3-tiny",
)
#: Config keys that decide what a model computes.
MEANING = [
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "hidden_act",
    "hidden_activation",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "vocab_size",
    "sliding_window",
    "layer_types",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope_local_base_freq",
    "n_embd",
    "n_layer",
    "n_head",
    "n_inner",
    "n_positions",
    "layer_norm_epsilon",
    "activation_function",
]


def both(tmp_path: Path, name: str, **options: Any) -> tuple[Source, Source]:
    path = write_checkpoint(tmp_path / "model.gguf", name, **options)
    return open_source(path, TYPES), open_source(HF / name, TYPES)


@pytest.mark.parametrize("name", NAMES)
def test_config_and_weights_equal_the_directory(tmp_path: Path, name: str) -> None:
    ours, theirs = both(tmp_path, name)
    for key in MEANING:
        assert ours.config.get(key) == theirs.config.get(key), key
    assert ours.model_type == theirs.model_type
    assert list(ours.tensors) == list(theirs.tensors)
    for key, tensor in theirs.tensors.items():
        got, want = ours.tensors[key].load_f32(), tensor.load_f32()
        assert ours.tensors[key].shape == tensor.shape, key
        if name.startswith("gemma") and key.endswith("norm.weight"):
            # The file holds 1 + w, rounded once.
            np.testing.assert_allclose(got, want, rtol=0, atol=2**-24, err_msg=key)
        else:
            np.testing.assert_array_equal(got, want, err_msg=key)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "gemma3-tiny"])
def test_rows_are_slices_of_the_whole(tmp_path: Path, name: str) -> None:
    source, _ = both(tmp_path, name)
    for tensor in source.tensors.values():
        whole = tensor.load_f32()
        rows = tensor.shape[0]
        for start, stop in {(0, rows), (0, 1), (rows - 1, rows), (rows // 3, rows // 2), (2, 2)}:
            part = tensor.rows(start, stop)
            assert part.dtype == np.float32
            np.testing.assert_array_equal(part, whole[start:stop], err_msg=tensor.name)
        joined = np.concatenate([rows for _, _, rows in tensor.iter_rows(max_values=100)])
        np.testing.assert_array_equal(joined, whole)
        with pytest.raises(ValueError, match="do not lie in"):
            tensor.rows(0, rows + 1)


def test_quantised_and_permuted_rows(tmp_path: Path) -> None:
    """Undoing the row order after conversion equals converting rows in the right order."""
    import gguf

    name = "blk.1.attn_q.weight"
    ours, theirs = both(tmp_path, "llama3-tiny", quantise={name: "Q8_0"})
    tensor = ours.tensors["model.layers.1.self_attn.q_proj.weight"]
    assert tensor.dtype == "Q8_0" and tensor.nbytes_source == 64 * 64 // 32 * 34
    original = theirs.tensors["model.layers.1.self_attn.q_proj.weight"].load_f32()
    kind = gguf.GGMLQuantizationType.Q8_0
    want = gguf.dequantize(gguf.quantize(original, kind), kind)
    np.testing.assert_array_equal(tensor.load(), want)
    np.testing.assert_array_equal(tensor.rows(5, 23), want[5:23])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_types_of_a_matrix(tmp_path: Path, kind: str) -> None:
    import gguf

    ours, theirs = both(tmp_path, "llama3-tiny", quantise={"blk.0.ffn_up.weight": kind})
    key = "model.layers.0.mlp.up_proj.weight"
    assert ours.tensors[key].dtype == kind
    ggml_type = gguf.GGMLQuantizationType[kind]
    stored = gguf.quantize(theirs.tensors[key].load_f32(), ggml_type)
    want = gguf.dequantize(stored, ggml_type).astype(np.float32)
    np.testing.assert_array_equal(ours.tensors[key].load_f32(), want)
    assert ours.tensors[key].load().dtype == (np.float16 if kind == "F16" else np.float32)


def test_loaded_arrays_are_views_where_possible(tmp_path: Path) -> None:
    source, _ = both(tmp_path, "llama-tiny")
    whole = source.tensors["model.embed_tokens.weight"].load()
    assert whole.dtype == np.float32 and not whole.flags.owndata and not whole.flags.writeable


def test_llama3_rope_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    source, _ = both(tmp_path, "llama3-tiny")
    assert source.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert "rope_freqs.weight" not in source.tensors
    assert "rope_freqs.weight" in source.file_tensor_names


def test_unexplained_divisors_stay_a_tensor(tmp_path: Path) -> None:
    odd = np.linspace(1.0, 7.0, 8, dtype=np.float32)
    source, _ = both(tmp_path, "llama3-tiny", extra={"rope_freqs.weight": odd})
    expected = {"rope_type": "freq_factors", "tensor": "rope_freqs.weight"}
    assert source.config["rope_scaling"] == expected
    np.testing.assert_array_equal(source.tensors["rope_freqs.weight"].load(), odd)
    with pytest.raises(FormatError, match=r"'rope_freqs.weight' has the shape \(7,\)"):
        both(tmp_path, "llama3-tiny", extra={"rope_freqs.weight": odd[:7]})
    with pytest.raises(FormatError, match="not above zero"):
        both(tmp_path, "llama3-tiny", extra={"rope_freqs.weight": odd - 1})


def test_smollm3(tmp_path: Path) -> None:
    """Rows of q and k permuted as for Llama; every fourth layer without RoPE."""
    folder = Path(shutil.copytree(HF / "llama3-tiny", tmp_path / "hf"))
    config = read_config(folder)
    config.update(model_type="smollm3", architectures=["SmolLM3ForCausalLM"], rope_scaling=None)
    config.update(num_hidden_layers=4, no_rope_layer_interval=4)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for key, value in list(weights.items()):
        for i in (2, 3):
            weights[key.replace("layers.0.", f"layers.{i}.")] = value * (i + 1 if i else 1)
    save_file(weights, folder / "model.safetensors")
    path = write_checkpoint(tmp_path / "m.gguf", folder)
    ours, theirs = open_source(path, TYPES), open_source(folder, TYPES)
    for source in (ours, theirs):
        assert source.config["no_rope_layers"] == [1, 1, 1, 0]
        assert source.config["layer_types"] == ["full_attention"] * 4
        assert source.config["sliding_window"] is None
    assert len(theirs.tensors) == 39
    for key, tensor in theirs.tensors.items():
        np.testing.assert_array_equal(ours.tensors[key].load_f32(), tensor.load_f32())


def test_mistral_needs_its_own_builder(tmp_path: Path) -> None:
    """It comes under Llama's name; a window makes it another model."""
    path = write_checkpoint(tmp_path / "m.gguf", "mistral-tiny")
    with pytest.raises(UnsupportedError, match=r"holds a mistral model.*Supported: llama"):
        open_source(path, ["llama"])


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Left out keys mean what transformers' config classes say."""
    transformers = pytest.importorskip("transformers")
    raw = read_config(name)
    needed = [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
        "n_embd",
        "n_layer",
        "n_head",
        "head_dim",
    ]
    minimal = {key: raw[key] for key in needed if key in raw}
    for given in (raw, minimal):
        kind = transformers.AutoConfig.for_model(**given)
        want = {"tie_word_embeddings": kind.tie_word_embeddings, **kind.to_dict()}
        got = complete_config(given, "config.json", 1000)
        for key in MEANING:
            # A default of 4 x n_embd is spelled None there; so are absent RoPE settings.
            if key in want and key not in ("rope_scaling", "n_inner"):
                assert got.get(key) == want[key], (key, given is raw)


def test_tokenizer_and_facts(tmp_path: Path) -> None:
    source, _ = both(tmp_path, "llama-tiny", vocabulary=tiny_vocabulary())
    assert source.format == "gguf" and source.bos_id == 1 and not source.add_bos
    # The file's own end token first; <|endoftext|> ends an answer too.
    assert source.eos_ids == (2, 0)
    assert source.token_strings["bos_token"] == "<|im_start|>"
    assert source.chat_template is not None and source.tokenizer_json is not None
    assert source.warnings == []
    assert len(source.file_tensor_names) == 29


def test_sampling_defaults(tmp_path: Path) -> None:
    source, _ = both(tmp_path, "llama-tiny", keys={"general.sampling.top_k": 20})
    assert source.generation_config == {"top_k": 20}
    with pytest.raises(FormatError, match=r"general.sampling.temp is hot"):
        both(tmp_path, "llama-tiny", vocabulary={"general.sampling.temp": "hot"})


def test_no_tokenizer_is_said(tmp_path: Path) -> None:
    source, _ = both(tmp_path, "llama-tiny")
    assert source.tokenizer_json is None and source.eos_ids == ()
    assert any("no tokenizer" in line for line in source.warnings)


def test_missing_pre_tokenizer_is_said(tmp_path: Path) -> None:
    source, _ = both(tmp_path, "llama-tiny", vocabulary=tiny_vocabulary(pre=None))
    assert any("tokenizer.ggml.pre is missing" in line for line in source.warnings)


def test_gpt2_with_a_written_out_head(tmp_path: Path) -> None:
    """GPT-2's converter writes the tied table twice; a head of its own is kept."""
    config = read_config("gpt2-tiny")
    table = open_source(HF / "gpt2-tiny", TYPES).tensors["transformer.wte.weight"].load_f32()
    tied, _ = both(tmp_path, "gpt2-tiny", extra={"output.weight": table})
    assert tied.config["tie_word_embeddings"] is True and "lm_head.weight" not in tied.tensors
    other, _ = both(tmp_path, "gpt2-tiny", extra={"output.weight": table + 1})
    assert other.config["tie_word_embeddings"] is False
    assert other.tensors["lm_head.weight"].shape == (config["vocab_size"], config["n_embd"])


def test_attention_bias_is_seen(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    biases = {
        f"blk.{i}.attn_{part}.bias": rng.standard_normal(size).astype(np.float32)
        for i in range(2)
        for part, size in (("q", 64), ("k", 32), ("v", 32), ("output", 64))
    }
    source, _ = both(tmp_path, "llama3-tiny", extra=biases)
    assert source.config["attention_bias"] is True
    stored = biases["blk.1.attn_k.bias"]
    want = stored.reshape(2, 8, 2).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(
        source.tensors["model.layers.1.self_attn.k_proj.bias"].load(), want
    )


def test_wrong_shape_names_the_tensor(tmp_path: Path) -> None:
    wrong = np.zeros((64, 65), np.float32)
    with pytest.raises(FormatError, match=r"'blk.1.attn_q.weight' .* \(64, 65\).*\(64, 64\)"):
        both(tmp_path, "llama3-tiny", extra={"blk.1.attn_q.weight": wrong})


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"missing tensor.*model.layers.0.mlp.up_proj.weight"):
        both(tmp_path, "llama-tiny", drop=("blk.0.ffn_up.weight",))


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    odd = np.zeros(64, np.float32)
    with pytest.raises(UnsupportedError, match=r"'blk.0.attn_sinks.weight'"):
        both(tmp_path, "llama3-tiny", extra={"blk.0.attn_sinks.weight": odd})


def test_vocabulary_must_fit_the_table(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"'token_embd.weight'.*\(512, 72\).*\(511, 72\)"):
        both(tmp_path, "llama-tiny", vocabulary=tiny_vocabulary(511))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("llama.block_count", 0, "block_count is 0"),
        ("llama.block_count", 4_000_000_000, "4000000000 layers, but the file has"),
        ("llama.attention.head_count_kv", 2, "no multiple of num_key_value_heads 2"),
        ("llama.embedding_length", 80, "the config asks for"),
        ("llama.rope.dimension_count", 4, "RoPE over 4 of 8 dimensions"),
        ("llama.expert_count", 8, "mixture of 8 experts"),
        ("llama.attention.value_length", 4, "keys of 8 and values of 4"),
    ],
)
def test_contradicting_keys(tmp_path: Path, key: str, value: int, what: str) -> None:
    with pytest.raises((FormatError, UnsupportedError), match=what):
        both(tmp_path, "llama-tiny", keys={key: value})


def test_unknown_architecture_says_what_is_supported(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m.gguf", "qwen2-tiny")
    with pytest.raises(UnsupportedError, match=r"architecture 'qwen2' .* Supported: llama$"):
        open_source(path, ["llama"])


def test_split_and_adapter_files(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="one of 3 parts"):
        both(tmp_path, "llama-tiny", keys={"split.count": 3})
    with pytest.raises(UnsupportedError, match="holds a 'adapter'"):
        both(tmp_path, "llama-tiny", vocabulary={"general.type": "adapter"})
