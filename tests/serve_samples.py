"""An encoder package of a tiny BERT, with a tokenizer of a few words."""

from __future__ import annotations

from pathlib import Path

from hornito.importers.onnx_generic import Binding, parse
from hornito.tensor.package import GraphSpec, compile_graphs
from tensor.models import bert_tiny, save

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "sleeps", "dog")


def write_encoder(folder: Path) -> Path:
    """bert.vxm, for two inputs of up to 6 or 16 tokens, its tokenizer inside."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(2)  # published files have such settings; the server ignores them
    source = save(bert_tiny(), folder, "bert.onnx")
    tokenizer.save(str(folder / "tokenizer.json"))
    parsed = parse(source)
    specs = [
        GraphSpec(parsed, Binding(dims={"batch_size": 2, "sequence_length": length}))
        for length in (6, 16)
    ]
    compile_graphs(specs, folder / "bert.vxm")
    (folder / "tokenizer.json").unlink()  # the package has it
    return folder / "bert.vxm"
