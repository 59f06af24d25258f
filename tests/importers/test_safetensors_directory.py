"""Hugging Face directories: shards, dtypes, tokenizer files, and damaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gguf_samples import HF, read_config
from hornito.errors import FormatError, HornitoError, UnsupportedError
from hornito.importers import open_source, supported_model_types
from hornito.importers.safetensors_file import read_safetensors

TYPES = ("llama", "gpt2", "qwen2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HF / "llama-tiny", tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file, made if need be; None removes a key."""
    data = json.loads(path.read_text()) if path.exists() else {}
    data.update(changes)
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_weights_are_the_files(folder: Path) -> None:
    source = open_source(folder, TYPES)
    stored = load_file(folder / "model.safetensors")
    assert set(source.tensors) == set(stored) == set(source.file_tensor_names)
    for name, want in stored.items():
        tensor = source.tensors[name]
        assert tensor.dtype == "F32" and tensor.shape == want.shape
        np.testing.assert_array_equal(tensor.load(), want)
        np.testing.assert_array_equal(tensor.rows(1, 3), want[1:3])


def test_by_any_of_its_paths(folder: Path) -> None:
    for path in (folder, str(folder), folder / "config.json", folder / "model.safetensors"):
        assert open_source(path, TYPES).model_type == "llama"


def test_shards(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"a-00001-of-00002.safetensors": names[:9], "a-00002-of-00002.safetensors": names[9:]}
    for file, inside in parts.items():
        save_file({n: whole[n] for n in inside}, folder / file)
    where = {n: file for file, inside in parts.items() for n in inside}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    source = open_source(folder, TYPES)
    for name, want in whole.items():
        np.testing.assert_array_equal(source.tensors[name].load(), want)

    edit(index, weight_map={**where, "model.norm.weight": "../../etc/x.safetensors"})
    with pytest.raises(FormatError, match=r"'model.norm.weight' lies in .* no plain name"):
        open_source(folder, TYPES)
    edit(index, weight_map={**where, "model.norm.weight": "a-00001-of-00002.safetensors"})
    with pytest.raises(FormatError, match=r"'model.norm.weight' of the index is not in it"):
        open_source(folder, TYPES)
    edit(index, weight_map=where)
    (folder / "a-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match=r"a-00002-of-00002.safetensors: missing; it holds"):
        open_source(folder, TYPES)


def test_bf16_and_f16(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    path = folder / "model.safetensors"
    whole = load_torch(path)
    half = {k: v.to(torch.bfloat16 if "mlp" in k else torch.float16) for k, v in whole.items()}
    save_torch(half, path)
    source = open_source(folder, TYPES)
    for name, want in half.items():
        tensor = source.tensors[name]
        assert tensor.dtype == ("BF16" if "mlp" in name else "F16")
        np.testing.assert_array_equal(tensor.load_f32(), want.to(torch.float32).numpy())
        assert tensor.load().dtype == (np.float32 if "mlp" in name else np.float16)
        np.testing.assert_array_equal(tensor.rows(0, 2), want[:2].to(torch.float32).numpy())


def test_tied_head_and_buffers_are_left_out(folder: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 1
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.int64)

    rewrite(folder, change)
    source = open_source(folder, TYPES)
    assert "lm_head.weight" not in source.tensors and len(source.tensors) == 29
    assert len(source.file_tensor_names) == 31


def test_untied_head_must_be_there(folder: Path) -> None:
    edit(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(FormatError, match=r"1 missing tensor\(s\): 'lm_head.weight'"):
        open_source(folder, TYPES)


def test_missing_unexpected_and_misshapen(folder: Path) -> None:
    key = "model.layers.2.mlp.up_proj.weight"
    good = load_file(folder / "model.safetensors")[key]
    rewrite(folder, lambda t: t.pop(key))
    with pytest.raises(FormatError, match=f"missing.*{key}"):
        open_source(folder, TYPES)
    rewrite(folder, lambda t: t.update({key: good[:-1].copy()}))
    with pytest.raises(FormatError, match=rf"tensor '{key}'.*\(127, 72\).*\(128, 72\)"):
        open_source(folder, TYPES)
    rewrite(folder, lambda t: t.update({key: good, "model.layers.0.strange": good}))
    with pytest.raises(UnsupportedError, match=r"'model.layers.0.strange'"):
        open_source(folder, TYPES)
    rewrite(folder, lambda t: (t.pop("model.layers.0.strange"), t.update({key: good.view("i4")})))
    with pytest.raises(UnsupportedError, match=f"'{key}' has the type I32.*Supported: F32 F16"):
        open_source(folder, TYPES)


def test_gpt2_without_prefix(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(HF / "gpt2-tiny", tmp_path / "model"))
    want = load_file(folder / "model.safetensors")
    bare = {k.removeprefix("transformer."): v for k, v in want.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
    save_file(bare, folder / "model.safetensors")
    source = open_source(folder, TYPES)
    assert set(source.tensors) == set(want)


def test_defaults_of_left_out_keys(folder: Path) -> None:
    config = folder / "config.json"
    edit(config, head_dim=None, rope_scaling=None, num_key_value_heads=3, attention_bias=None)
    source = open_source(folder, TYPES)
    assert source.config["head_dim"] == 8 and source.config["attention_bias"] is False
    edit(config, rope_parameters={"rope_theta": 5e4, "rope_type": "default"}, rope_theta=None)
    source = open_source(folder, TYPES)
    assert source.config["rope_theta"] == 5e4 and source.config["rope_scaling"] is None
    edit(config, rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=None)
    source = open_source(folder, TYPES)
    assert source.config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "error", "what"),
    [
        (
            {"model_type": "bert"},
            UnsupportedError,
            r"'bert' \(LlamaForCausalLM\).*Supported: gpt2,",
        ),
        ({"model_type": None}, UnsupportedError, "model type None"),
        ({"hidden_size": "big"}, FormatError, "hidden_size is 'big'"),
        ({"num_hidden_layers": 10**12}, FormatError, "layers, but the file has 29 tensors"),
        ({"num_attention_heads": 4}, FormatError, "no multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, FormatError, "head_dim 7 is odd"),
        ({"vocab_size": True}, FormatError, "vocab_size is True"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedError, "by 'gptq'"),
        ({"is_encoder_decoder": True}, UnsupportedError, "encoder-decoder"),
    ],
)
def test_bad_configs(folder: Path, changes: dict[str, Any], error: type, what: str) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises(error, match=what):
        open_source(folder, TYPES)


STRANGE: list[Any] = [[], {}, [[]], {"a": 1}, "x", "", -1, 0, 1e308, float("nan"), True, 2**70]


#: Keys that builders compute with, and the strange values that are fine for some of them.
MATTERS = {"rms_norm_eps", "rope_theta", "sliding_window", "hidden_act", "n_positions", "n_inner"}
FINE: list[Any] = [None, "x", "", 2**70]


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "gpt2-tiny", "gemma3-tiny"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_strange_values_of_any_key(tmp_path: Path, name: str, file: str) -> None:
    """Whatever a key holds, the outcome is a source or one of Hornito's errors."""
    folder = Path(shutil.copytree(HF / name, tmp_path / "model"))
    tokenizer_files(folder, {"type": "Sequence", "processors": [None]}, chat_template="x")
    path = folder / file
    good = json.loads(path.read_text())
    scaling = {"rope_scaling": None, "rope_parameters": None, "layer_types": None}
    opened = refused = 0
    for key in {**good, **scaling, "sliding_window": None, "tokenizer_class": None}:
        for value in STRANGE:
            path.write_text(json.dumps({**good, key: value}))
            try:
                source = open_source(folder, (*TYPES, "gemma3_text"))
                opened += 1
                assert file != "config.json" or key not in MATTERS or source.config[key] in FINE
            except HornitoError:
                refused += 1
    assert opened > 10 and (refused > 10 or file != "config.json")


def test_other_weight_files_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"found pytorch_model.bin.*safetensors"):
        open_source(folder, TYPES)


def test_broken_json(folder: Path) -> None:
    for raw in (b"{", b"\xff", b"[" * 100_000, b'{"a": 1, "a": 2}'):
        (folder / "generation_config.json").write_bytes(raw)
        with pytest.raises(FormatError, match=r"generation_config\.json: not valid JSON"):
            open_source(folder, TYPES)
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(FormatError, match="not a JSON object"):
        open_source(folder, TYPES)


def bos_processor(first: list[Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": [*first, {"Sequence": {"id": "A"}}]}


def tokenizer_files(folder: Path, processor: Any, **config: Any) -> None:
    added = [{"id": 1, "content": "<s>"}, {"id": 5, "content": "</s>"}]
    data = {"added_tokens": added, "post_processor": processor}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    edit(folder / "tokenizer_config.json", bos_token="<s>", eos_token={"content": "</s>"}, **config)


def test_every_end_token_counts(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=[7, 2])
    edit(folder / "generation_config.json", eos_token_id=[9, 7], temperature=0.6)
    tokenizer_files(folder, None)
    source = open_source(folder, TYPES)
    assert source.eos_ids == (7, 2, 9, 5)
    assert source.generation_config["temperature"] == 0.6
    assert source.token_strings == {"bos_token": "<s>", "eos_token": "</s>"}


def test_token_strings_of_older_checkpoints(folder: Path) -> None:
    tokenizer_files(folder, None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "special_tokens_map.json", bos_token="<old>", eos_token={"content": "</s>"})
    source = open_source(folder, TYPES)
    assert source.token_strings == {"bos_token": "<s>", "eos_token": "</s>"}
    assert 5 in source.eos_ids


@pytest.mark.parametrize(
    ("processor", "config", "want"),
    [
        (None, {}, False),
        (bos_processor([{"SpecialToken": {"id": "<s>"}}]), {}, True),
        (bos_processor([]), {}, False),
        (
            {
                "type": "Sequence",
                "processors": [
                    {"type": "ByteLevel"},
                    bos_processor([{"SpecialToken": {"id": "<s>"}}]),
                ],
            },
            {},
            True,
        ),
        (None, {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, True),
        (None, {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}, False),
        (
            bos_processor([{"SpecialToken": {"id": "<s>"}}]),
            {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False},
            False,
        ),
    ],
)
def test_bos_rule(folder: Path, processor: Any, config: dict[str, Any], want: bool) -> None:
    tokenizer_files(folder, processor, **config)
    source = open_source(folder, TYPES)
    assert source.bos_id == 1 and source.add_bos is want


def test_where_the_template_lies(folder: Path) -> None:
    tokenizer_files(folder, None, chat_template="from config")
    assert open_source(folder, TYPES).chat_template == "from config"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert open_source(folder, TYPES).chat_template == "d"
    (folder / "chat_template.jinja").write_text("from file\n", encoding="utf-8")
    assert open_source(folder, TYPES).chat_template == "from file\n"


def container(path: Path, header: Any, body: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + body)
    return path


def entry(begin: int, end: int, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "body", "what"),
    [
        ({"t": entry(0, 8)}, bytes(4), "'t': truncated"),
        ({"t": entry(0, 4, [2])}, bytes(4), "'t': shape .* takes 8 bytes"),
        ({"t": entry(0, 4, [2**62, 2**62])}, bytes(4), "'t': shape"),
        ({"t": entry(0, 4, [-1])}, bytes(4), "'t': bad shape"),
        ({"t": entry(0, 4, "x")}, bytes(4), "'t': bad shape"),
        ({"t": entry(4, 0)}, bytes(4), "'t': truncated"),
        ({"t": {"dtype": "F32"}}, b"", "'t': its header entry"),
        ({"t": entry(4, 8)}, bytes(8), "'t' leaves a hole after the header"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 8)}, bytes(8), "'b' overlaps tensor 'a'"),
        ({"t": entry(0, 4)}, bytes(8), "4 bytes follow the last tensor"),
        (b'{"t": 1, "t": 2}', b"", "'t' stands there twice"),
        (b"[]", b"", "not a JSON object"),
        (b"\xff\xfe", b"", "not valid JSON"),
    ],
)
def test_damaged_containers(tmp_path: Path, header: Any, body: bytes, what: str) -> None:
    path = container(tmp_path / "x.safetensors", header, body)
    with pytest.raises(FormatError, match=what) as error:
        read_safetensors(path)
    assert "x.safetensors" in str(error.value)


def test_header_lengths(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for length in (3, 2**40, 2**64 - 1):
        with pytest.raises(FormatError, match="claims"):
            read_safetensors(container(path, b"{}", length=length))
    path.write_bytes(b"\1\0")
    with pytest.raises(FormatError, match="truncated: 2 bytes"):
        read_safetensors(path)
    with pytest.raises(UnsupportedError, match="unknown dtype Q9"):
        read_safetensors(container(path, {"t": entry(0, 4, [1], "Q9")}, bytes(4)))


def test_truncation_of_a_checkpoint(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    for end in [*range(0, header, 37), *range(header, len(raw), 20_011), len(raw) - 1]:
        path.write_bytes(raw[:end])
        with pytest.raises(FormatError, match=r"model.safetensors"):
            open_source(folder, TYPES)


def test_supported_types_are_the_model_modules() -> None:
    import hornito.models

    files = {p.stem for p in Path(hornito.models.__path__[0]).glob("[!_]*.py")}
    assert supported_model_types() == tuple(sorted(files))


@pytest.mark.parametrize("layout", ["language_model.model.", "model.language_model."])
def test_text_part_of_gemma3(tmp_path: Path, layout: str) -> None:
    """A `gemma3` checkpoint gives its text model: nested config, prefixed tensors, no vision."""
    inner = read_config("gemma3-tiny")
    weights = load_file(HF / "gemma3-tiny" / "model.safetensors")
    renamed = {name.replace("model.", layout, 1): value for name, value in weights.items()}
    vision = "vision_tower." if layout.startswith("language") else "model.vision_tower."
    renamed[f"{vision}encoder.weight"] = np.zeros((3, 4), np.float32)
    save_file(renamed, tmp_path / "model.safetensors")
    ids = {key: inner.pop(key) for key in ("bos_token_id", "eos_token_id")}
    whole = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": inner,
        "vision_config": {"hidden_size": 4},
        **ids,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    source, plain = (open_source(where) for where in (tmp_path, HF / "gemma3-tiny"))
    assert source.model_type == "gemma3_text" and source.eos_ids == (ids["eos_token_id"],)
    assert any("1 tensors of the vision part are left out" in line for line in source.warnings)
    for key, value in plain.config.items():
        if key not in ("architectures", "_name_or_path"):
            assert source.config[key] == value, key
    assert list(source.tensors) == list(plain.tensors)
    for key, tensor in plain.tensors.items():
        np.testing.assert_array_equal(source.tensors[key].load_f32(), tensor.load_f32())
    del whole["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(FormatError, match="a gemma3 model without text_config"):
        open_source(tmp_path)


def test_sizes_that_gemma3_leaves_out(tmp_path: Path) -> None:
    """Published configs name only what differs from the class's defaults."""
    transformers = pytest.importorskip("transformers")
    from hornito.importers.families import complete_config
    from hornito.importers.multimodal import text_config

    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    whole = {"model_type": "gemma3", "text_config": inner}
    found = text_config(whole, "config.json")
    assert found is not None
    completed = complete_config(found, "config.json", 1000)
    want = transformers.AutoConfig.for_model(**inner).to_dict()
    for key in (
        "vocab_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "query_pre_attn_scalar",
        "sliding_window",
        "layer_types",
        "rope_theta",
        "rope_local_base_freq",
    ):
        assert completed[key] == want[key], key
