"""examples/embeddings.py on a tiny BERT with a tokenizer of a few words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tensor.models import bert_tiny, save
from tree import ROOT


@pytest.mark.gpu
def test_embeddings(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "a", "cat", "sleeps", "dog"))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    vocabulary = tmp_path / "tokenizer.json"
    tokenizer.save(str(vocabulary))
    example = ROOT / "examples" / "embeddings.py"
    assert len(example.read_text().splitlines()) <= 40
    model = save(bert_tiny(), tmp_path)
    sentences = ["a cat", "a cat", "a dog sleeps a"]
    command = [sys.executable, str(example), str(model), str(vocabulary), *sentences]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    assert [row[3] for row in rows] == sentences
    # Padding makes no difference: the first two are the same sentence.
    assert rows[0][:2] == ["1.000", "1.000"]
    assert float(rows[0][2]) < 0.999
