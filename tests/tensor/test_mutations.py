"""Damaged ONNX files end in a message or a correct import, never in a crash."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hornito.errors import HornitoError
from hornito.importers.onnx_generic import Binding, import_generic, parse, symbolic_dims
from tensor.models import bert_tiny


def test_mutated_models_end_in_messages(tmp_path: Path) -> None:
    data = bert_tiny().SerializeToString()
    rng = np.random.default_rng(3)
    path = tmp_path / "bad.onnx"
    refused = 0
    for turn in range(200):
        changed = bytearray(data)
        for at in rng.integers(0, 60000 if turn % 2 else len(data), 4):
            changed[int(at)] = int(rng.integers(0, 256))
        path.write_bytes(bytes(changed))
        try:
            parsed = parse(path)
            import_generic(parsed, Binding(dims=dict.fromkeys(symbolic_dims(parsed), 4)))
        except HornitoError:
            refused += 1
    assert 50 < refused < 200
