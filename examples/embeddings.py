"""How close sentences are, by a sentence-embedding model exported to ONNX:

python examples/embeddings.py model.onnx tokenizer.json "A cat sleeps." "A pet naps." "Stocks fell."
"""

import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from hornito import HornitoError
from hornito.importers.onnx_generic import bind_to, parse
from hornito.tensor.model import TensorModel
from hornito.vk.device import open_device

if len(sys.argv) < 4:
    print("usage,", __doc__, file=sys.stderr)
    sys.exit(2)
model, vocabulary, *sentences = sys.argv[1:]
try:
    tokenizer = Tokenizer.from_str(Path(vocabulary).read_text(encoding="utf-8"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(sentences)
    ids = np.array([e.ids for e in encoded])
    mask = np.array([e.attention_mask for e in encoded])
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    parsed = parse(Path(model))
    inputs = {name: inputs[name] for name in parsed.inputs}
    with open_device() as device, TensorModel(device, bind_to(parsed, inputs).graph) as loaded:
        hidden = loaded.run(inputs)["last_hidden_state"]
    # The mean over real tokens, of length 1.
    vectors = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for sentence, row in zip(sentences, vectors @ vectors.T, strict=True):
        print(" ".join(f"{cosine:6.3f}" for cosine in row), sentence)
except (HornitoError, OSError) as error:
    sys.exit(f"{sys.argv[0]}: {error}")
