"""Tokenizers of GGUF files: vocabulary keys rebuilt as a tokenizer.json.

Byte-level BPE vocabularies (`gpt2`) become a file of the `tokenizers` library. SentencePiece ones
(`llama`) merge by score, which that library can't express exactly; they become Hornito's own JSON,
which `hornito.text.sentencepiece` reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hornito.errors import FormatError, UnsupportedError
from hornito.importers.pretokenizers import PRETOKENIZERS, PreTokenizer

#: Value of the key `type` in Hornito's own tokenizer JSON.
SENTENCEPIECE = "hornito-sentencepiece-bpe"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
#: Control tokens that end an answer wherever they exist, whatever the keys say.
END_TOKENS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<EOT>",
        "_<EOT>",
        "< EOT >",
    )
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer of a GGUF file.

    Attributes:
        kind: `gpt2` (byte-level BPE) or `llama` (SentencePiece BPE).
        tokens: text of each id, as stored.
        types: int `[size]`, the type of each id (NORMAL, CONTROL, ...).
        merges: pairs in order of rank (byte-level BPE).
        scores: float32 `[size]` (SentencePiece).
        pre: how text is split before BPE (byte-level BPE).
        add_space_prefix: whether text gets a space in front (SentencePiece).
        bos_id, eos_ids, unk_id, add_bos, chat_template: as in `Source`.
        rstrip: ids of tokens that swallow white space after them (SentencePiece).
    """

    kind: str
    tokens: list[str]
    types: npt.NDArray[np.int32]
    merges: list[tuple[str, str]]
    scores: npt.NDArray[np.float32]
    pre: PreTokenizer | None
    add_space_prefix: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    unk_id: int | None
    pad_id: int | None
    add_bos: bool
    chat_template: str | None
    rstrip: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.tokens)

    def token_strings(self) -> dict[str, str]:
        """Texts that chat templates refer to by name."""
        eos = self.eos_ids[0] if self.eos_ids else None
        named = {
            "bos_token": self.bos_id,
            "eos_token": eos,
            "unk_token": self.unk_id,
            "pad_token": self.pad_id,
        }
        return {key: self.tokens[i] for key, i in named.items() if i is not None}

    def to_json(self) -> bytes:
        """The tokenizer file: of the `tokenizers` library, or Hornito's own for SentencePiece."""
        data = self._sentencepiece() if self.kind == "llama" else self._byte_level()
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8")

    def _added(self) -> list[dict[str, Any]]:
        chosen = np.flatnonzero((self.types == CONTROL) | (self.types == USER_DEFINED))
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {
                "id": int(i),
                "content": self.tokens[i],
                **flags,
                "special": bool(self.types[i] == CONTROL),
            }
            for i in chosen
            if self.tokens[i]
        ]

    def _byte_level(self) -> dict[str, Any]:
        assert self.pre is not None
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            "normalizer": self.pre.normalizer,
            "pre_tokenizer": self.pre.to_json(),
            "post_processor": None,
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": self.pre.ignore_merges,
                "vocab": {token: i for i, token in enumerate(self.tokens)},
                "merges": self.merges,
            },
        }

    def _sentencepiece(self) -> dict[str, Any]:
        return {
            "type": SENTENCEPIECE,
            "version": 1,
            "add_space_prefix": self.add_space_prefix,
            "unk_id": self.unk_id,
            "rstrip": list(self.rstrip),
            "tokens": self.tokens,
            "types": self.types.tolist(),
            "scores": [float(score) for score in self.scores],
        }


class _Reader:
    """Typed access to the keys `tokenizer.*`."""

    def __init__(self, path: str, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata

    def fail(self, key: str, what: str) -> FormatError:
        return FormatError(f"{self.path}: key tokenizer.{key} {what}")

    def text(self, key: str) -> str | None:
        value = self.metadata.get(f"tokenizer.{key}")
        if value is not None and not isinstance(value, str):
            raise self.fail(key, "is no text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.{key}", default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {str(value)[:40]}, not true or false")
        return value

    def texts(self, key: str) -> list[str] | None:
        value = self.metadata.get(f"tokenizer.{key}")
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.fail(key, "is no list of texts")
        return value

    def numbers(self, key: str, size: int) -> npt.NDArray[Any] | None:
        value = self.metadata.get(f"tokenizer.{key}")
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != size:
            length = len(value) if isinstance(value, np.ndarray | list) else "no list"
            raise self.fail(key, f"must be {size} numbers, one a token; it is {length}")
        return value

    def token_id(self, key: str, size: int) -> int | None:
        value = self.metadata.get(f"tokenizer.{key}")
        # Converters write -1 or 2^32 - 1 for "none".
        if value is None or value in (-1, 0xFFFFFFFF):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
            raise self.fail(key, f"is {str(value)[:40]}, but there are {size} tokens")
        return value


def _merges(reader: _Reader, known: set[str]) -> list[tuple[str, str]]:
    lines = reader.texts("ggml.merges")
    if lines is None:
        raise reader.fail("ggml.merges", "is missing: a byte-level BPE tokenizer needs it")
    merges = []
    for i, line in enumerate(lines):
        at = line.find(" ", 1)
        left, right = line[:at], line[at + 1 :]
        if at < 0 or left not in known or right not in known or left + right not in known:
            raise reader.fail(f"ggml.merges[{i}]", f"is {line[:60]!r}: not two known tokens")
        merges.append((left, right))
    return merges


def _pre_tokenizer(reader: _Reader, warnings: list[str]) -> PreTokenizer:
    name = reader.text("ggml.pre")
    if name is None:
        warnings.append(
            f"{reader.path}: key tokenizer.ggml.pre is missing, so text is split by the oldest "
            "rule and may give other tokens than the model was trained on. Convert the "
            "checkpoint again with a current converter."
        )
        name = "default"
    if name not in PRETOKENIZERS:
        raise UnsupportedError(
            f"{reader.path}: pre-tokenizer '{name[:60]}' is not supported. "
            f"Supported: {', '.join(sorted(PRETOKENIZERS))}"
        )
    return PRETOKENIZERS[name]


def _eos_ids(reader: _Reader, tokens: list[str], types: npt.NDArray[np.int32]) -> tuple[int, ...]:
    """The model's own end token first, then every other id that ends an answer."""
    found = [reader.token_id(f"ggml.{key}_token_id", len(tokens)) for key in ("eos", "eot", "eom")]
    control = np.flatnonzero((types == CONTROL) | (types == USER_DEFINED))
    found += [int(i) for i in control if tokens[i] in END_TOKENS]
    return tuple(dict.fromkeys(i for i in found if i is not None))


def _rstrip(
    metadata: Mapping[str, Any], tokens: list[str], types: npt.NDArray[np.int32]
) -> tuple[int, ...]:
    """Tokens of Phi-3 that swallow white space after them, which GGUF has no key for.

    In its tokenizer.json all control tokens do, but for the three that come from Llama or stand
    for the end of a document; and `</s>`, which is no control token there.
    """
    if metadata.get("general.architecture") != "phi3":
        return ()
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    return tuple(
        i
        for i, token in enumerate(tokens)
        if token == "</s>" or (types[i] == CONTROL and token not in kept)
    )


def read_vocabulary(
    path: str, metadata: Mapping[str, Any], warnings: list[str]
) -> Vocabulary | None:
    """The tokenizer that the keys of a GGUF file describe, or None when they describe none.

    Args:
        path: the file, for messages.
        metadata: all keys of the file.
        warnings: gets a line for whatever had to be assumed.

    Raises:
        FormatError: keys contradict each other.
        UnsupportedError: a kind of tokenizer or pre-tokenizer that is not supported.
    """
    reader = _Reader(path, metadata)
    kind = reader.text("ggml.model")
    if kind is None or kind in ("none", "no_vocab"):
        warnings.append(f"{path}: no tokenizer in it: the model takes and gives token ids only")
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"{path}: tokenizer model '{kind[:60]}' is not supported. Supported: gpt2 (byte-level "
            "BPE), llama (SentencePiece BPE)"
        )
    tokens = reader.texts("ggml.tokens")
    if not tokens:
        raise reader.fail("ggml.tokens", "is missing or empty")
    size = len(tokens)
    stored = reader.numbers("ggml.token_type", size)
    types = np.full(size, NORMAL, np.int32) if stored is None else stored.astype(np.int32)
    if stored is None:
        warnings.append(f"{path}: key tokenizer.ggml.token_type is missing: no special tokens")
    known = set(tokens)
    if len(known) != size:
        warnings.append(f"{path}: {size - len(known)} tokens stand twice in the vocabulary")
    pre: PreTokenizer | None = None
    merges: list[tuple[str, str]] = []
    scores = np.zeros(size, np.float32)
    if kind == "gpt2":
        pre = _pre_tokenizer(reader, warnings)
        merges = _merges(reader, known)
    else:
        given = reader.numbers("ggml.scores", size)
        if given is None:
            raise reader.fail("ggml.scores", "is missing: a SentencePiece tokenizer needs it")
        scores = given.astype(np.float32)
        if not np.all(np.isfinite(scores)):
            raise reader.fail("ggml.scores", "holds a number that is not finite")
    bos_id = reader.token_id("ggml.bos_token_id", size)
    unk_id = reader.token_id("ggml.unknown_token_id", size)
    if kind == "llama":
        # SentencePiece's own defaults, for keys that a file leaves out.
        bos_id = bos_id if bos_id is not None or "ggml.bos_token_id" in metadata else 1
        unk_id = 0 if unk_id is None else unk_id
    default_bos = kind == "llama" or (pre is not None and pre.add_bos)
    template = reader.text("chat_template")
    return Vocabulary(
        kind=kind,
        tokens=tokens,
        types=types,
        merges=merges,
        scores=scores,
        pre=pre,
        add_space_prefix=reader.flag("ggml.add_space_prefix", kind == "llama"),
        bos_id=bos_id,
        eos_ids=_eos_ids(reader, tokens, types),
        unk_id=unk_id,
        pad_id=reader.token_id("ggml.padding_token_id", size),
        add_bos=reader.flag("ggml.add_bos_token", default_bos) and bos_id is not None,
        chat_template=template or None,
        rstrip=_rstrip(metadata, tokens, types) if kind == "llama" else (),
    )
