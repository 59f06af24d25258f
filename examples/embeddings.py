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
    tokenizer = Tokenizer.from_file(vocabulary)
except Exception as error:  # of no class of their own
    sys.exit(f"{sys.argv[0]}: {vocabulary}: {error}")
try:
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(sentences)
    ids, mask = np.array([(e.ids, e.attention_mask) for e in encoded]).swapaxes(0, 1)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    parsed = parse(Path(model))
    inputs = {name: inputs[name] for name in parsed.inputs}
    with open_device() as device, TensorModel(device, bind_to(parsed, inputs).graph) as loaded:
        hidden = loaded.run(inputs)["last_hidden_state"]
    vectors = (hidden * mask[..., None]).sum(1)  # over real tokens; only the direction counts
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for sentence, row in zip(sentences, vectors @ vectors.T, strict=True):
        print(" ".join(f"{cosine:6.3f}" for cosine in row), sentence)
except (HornitoError, OSError) as error:
    sys.exit(f"{sys.argv[0]}: {error}")
