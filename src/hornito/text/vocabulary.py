"""What two machines compare to find out whether their models have the same words."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from hornito.text.tokenizer import Tokenizer

_PADDING = re.compile(r"\[PAD\d+\]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids of a model and what they spell, as one number.

    Attributes:
        size: one more than the largest id with a word of its own.
        sha256: of the words in the order of their ids, in hexadecimal digits.
    """

    size: int
    sha256: str


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer, the same for every form of one model.

    GGUF's names of ids without a word (`[PAD49153]`) are empty here, as they are in a Hugging Face
    directory, and what is empty at the end is left out.
    """
    pieces = (tokenizer.id_to_piece(token) for token in range(tokenizer.vocab_size))
    words = ["" if _PADDING.fullmatch(piece) else piece for piece in pieces]
    while words and not words[-1]:
        words.pop()
    return Vocabulary(len(words), hashlib.sha256("\0".join(words).encode()).hexdigest())
