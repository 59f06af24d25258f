#!/usr/bin/env python3
"""Makes tests/data/hf/smollm3-tiny: a random SmolLM 3 of four layers, and transformers' answers.

Needs torch and transformers (the extra `oracle`). Weights are a seeded generator's numbers that
fp16 holds exactly, so that every storage type has the same model. golden.npz has the keys of the
other tiny checkpoints: `prompt` [24], `tokens` [32] (greedy), `prefill_logits` [24, V],
`step_top_ids` and `step_top_logits` [32, 8], `margin` [32].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "data" / "hf" / "smollm3-tiny"
SEED = 11
PROMPT_SEED = 1  # of eight, the one whose narrowest step is widest
STEPS = 32
CONFIG: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "dtype": "float16",
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 64,
    "layer_types": ["full_attention"] * 4,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 2000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 512,
}


def random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, npt.NDArray[np.float16]]:
    """Numbers that keep activations near 1, rounded to fp16."""
    rng = np.random.default_rng(SEED)
    made = {}
    for name, shape in sorted(shapes.items()):
        numbers = rng.standard_normal(shape)
        if len(shape) == 1:
            numbers = numbers * 0.15 + 1.0
        elif "embed_tokens" in name:
            numbers = numbers * 2.4 / shape[1] ** 0.5
        else:
            numbers = numbers * 1.4 / shape[1] ** 0.5
        made[name] = numbers.astype(np.float16)
    return made


def main() -> int:
    """Writes the folder."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**CONFIG)
    model: Any = AutoModelForCausalLM.from_config(config)
    model = model.float().eval()
    state = model.state_dict()
    shapes = {name: tuple(t.shape) for name, t in state.items() if name != "lm_head.weight"}
    weights = random_weights(shapes)
    for name, array in weights.items():
        state[name].copy_(torch.from_numpy(array.astype(np.float32)))
    rng = np.random.default_rng(PROMPT_SEED)
    prompt = rng.integers(3, CONFIG["vocab_size"], 24).tolist()
    ids, rows = list(prompt), []
    with torch.no_grad():
        prefill = model(torch.tensor([ids])).logits[0].numpy()
        for _ in range(STEPS):
            rows.append(model(torch.tensor([ids])).logits[0, -1].numpy())
            ids.append(int(rows[-1].argmax()))
    logits = np.stack(rows)
    top = np.argsort(-logits, axis=1, kind="stable")[:, :8]
    ordered = np.sort(logits, axis=1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=2, sort_keys=True) + "\n")
    save_file(weights, FOLDER / "model.safetensors", metadata={"format": "pt"})
    np.savez_compressed(
        FOLDER / "golden.npz",
        prompt=np.array(prompt),
        tokens=np.array(ids[24:]),
        prefill_logits=prefill,
        step_top_ids=top.astype(np.int32),
        step_top_logits=np.take_along_axis(logits, top, axis=1),
        margin=ordered[:, -1] - ordered[:, -2],
    )
    print(f"{FOLDER}: margin {float((ordered[:, -1] - ordered[:, -2]).min()):.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
