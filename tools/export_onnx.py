#!/usr/bin/env python3
"""Exports a decoder to ONNX as `optimum-cli export onnx --task text-generation-with-past` does.

The source is a Hugging Face directory, or a GGUF file: its numbers as fp32 then become a directory
first (`--checkpoint DIR` keeps it), so that the same weights exist in all three formats. Eager
attention keeps Gemma 2's cap on scores, which SDPA drops. Needs
torch, transformers (the extra `oracle`) and `pip install optimum-onnx`; nothing of the package or
of its tests but this needs optimum. `--external` writes the weights beside the file.

    python tools/export_onnx.py SOURCE OUT [--checkpoint DIR] [--opset 18] [--external]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from hornito.errors import HornitoError, UsageError
from hornito.importers import Source, open_source

TASK = "text-generation-with-past"
ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def write_checkpoint(source: Source, folder: Path) -> None:
    """A source's tensors (as fp32), config and tokenizer as a Hugging Face directory.

    Raises:
        UsageError: no transformers class is known for its model type.
    """
    from safetensors.numpy import save_file

    kind = ARCHITECTURES.get(source.model_type)
    if kind is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UsageError(f"no transformers class is known for {source.model_type!r}, only: {known}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.load_f32() for name, tensor in source.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ends = list(source.eos_ids)
    config = {
        **source.config,
        "model_type": source.model_type,
        "architectures": [kind],
        "dtype": "float32",
        "bos_token_id": source.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(source.generation_config) + "\n")
    if source.tokenizer_json is not None:
        (folder / "tokenizer.json").write_bytes(source.tokenizer_json)
        # Without these words transformers takes the family's own class, which adds tokens.
        words = {**source.token_strings, "add_bos_token": source.add_bos}
        facts = {"tokenizer_class": "PreTrainedTokenizerFast", **words}
        if source.chat_template is not None:
            facts["chat_template"] = source.chat_template
        (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n")


def export(checkpoint: Path, out: Path, opset: int | None, attention: str, external: bool) -> Path:
    """Export a Hugging Face directory; returns the ONNX file.

    Raises:
        UsageError: optimum is not there.
    """
    try:
        import torch
        from optimum.exporters.onnx import onnx_export_from_model
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(
            f"exporting needs torch, transformers and optimum's exporter ({error}): "
            "pip install 'hornito[oracle]' optimum-onnx"
        ) from error
    loaded = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation=attention, dtype=torch.float32
    )
    onnx_export_from_model(loaded, out, opset=opset, task=TASK, do_validation=False)
    for file in checkpoint.glob("*.json"):
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges")):
            shutil.copy(file, out)
    model = out / "model.onnx"
    if external:
        move_weights(model)
    return model


def move_weights(model: Path) -> None:
    """Put the weights of a file into MODEL.onnx_data beside it."""
    import onnx

    onnx.save(
        onnx.load(str(model)),
        str(model),
        save_as_external_data=True,
        location=f"{model.name}_data",
        size_threshold=100,
    )


def main() -> int:
    """Parses the command line and exports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, help="Hugging Face directory or GGUF file")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--checkpoint", type=Path, help="keep a GGUF's weights as a directory here")
    parser.add_argument("--opset", type=int, help="default: the exporter's own")
    parser.add_argument(
        "--attention", default="sdpa", choices=("sdpa", "eager"), help="which of transformers' own"
    )
    parser.add_argument(
        "--external", action="store_true", help="weights in a file beside the model"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as spare:
        checkpoint = arguments.source
        if checkpoint.is_file():
            checkpoint = arguments.checkpoint or Path(spare)
            write_checkpoint(open_source(arguments.source), checkpoint)
        facts = arguments.opset, arguments.attention, arguments.external
        print(export(checkpoint, arguments.out, *facts))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HornitoError as error:
        sys.exit(f"export_onnx: {error}")
