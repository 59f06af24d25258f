"""Tokenizers of the `tokenizers` library (any tokenizer.json), as a backend of `Tokenizer`."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hornito.errors import FormatError, UnsupportedError
from hornito.text.marks import free_marks, unmarked

if TYPE_CHECKING:
    import tokenizers

SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others follow U+0100.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if chr(byte) not in table)
    return {**table, **{chr(0x100 + i): byte for i, byte in enumerate(rest)}}


def _load(raw: bytes) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        loaded = tokenizers.Tokenizer.from_buffer(raw)
    except BaseException as error:
        # The library's own panics derive from BaseException; Ctrl-C and exit are not ours.
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise FormatError(f"tokenizer.json can't be read: {str(error)[:300]}") from error
    # Files may ask for truncation and padding, which are for training.
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _declared(raw: bytes, control_ids: frozenset[int]) -> tuple[bytes, tokenizers.Tokenizer]:
    """Load a file in which every added token of `control_ids` is a control token."""
    loaded = _load(raw)
    added = loaded.get_added_tokens_decoder()
    if all(added[i].special for i in control_ids if i in added):
        return raw, loaded
    data = json.loads(raw)
    for entry in data["added_tokens"]:
        if entry["id"] in control_ids:
            entry["special"] = True
    changed = json.dumps(data, ensure_ascii=False).encode("utf-8")
    return changed, _load(changed)


def _decoders(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict):
        if state.get("type") == "Sequence":
            for inner in state.get("decoders") or []:
                yield from _decoders(inner)
        else:
            yield state


class HuggingFaceTokenizer:
    """One tokenizer.json. Safe to share between threads.

    Attributes:
        size: one more than the largest id.
        special: control tokens by text.
        strips_first_space: whether decoding drops the first space of a sequence.
    """

    def __init__(self, raw: bytes, control_ids: frozenset[int] = frozenset()) -> None:
        """Read the file; FormatError when damaged, UnsupportedError for an unknown decoder.

        Added tokens in `control_ids` count as control tokens, whatever the file says.
        """
        self._raw, self._tokenizer = _declared(raw, control_ids)
        # `encode_special_tokens` is a switch on the tokenizer, so encoding is one at a time.
        self._lock = threading.Lock()
        self._added = self._tokenizer.get_added_tokens_decoder()
        self.special: Mapping[str, int] = {
            token.content: i for i, token in self._added.items() if token.special and token.content
        }
        largest = max(self._added, default=-1) + 1
        self.size = max(self._tokenizer.get_vocab_size(with_added_tokens=True), largest)
        decoder = self._tokenizer.decoder
        parts = list(_decoders(json.loads(decoder.__getstate__()))) if decoder else []
        kinds = {str(part.get("type")) for part in parts}
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        if self._alphabet is None and not (kinds and kinds <= _WORD_DECODERS):
            raise UnsupportedError(
                f"tokenizer.json decodes by {', '.join(sorted(kinds)) or 'nothing'}, which is not "
                "supported. Supported: ByteLevel, and SentencePiece's Metaspace and ByteFallback"
            )
        self._byte_fallback = "ByteFallback" in kinds
        self.strips_first_space = self._alphabet is None and any(
            (part.get("type") == "Strip" and part.get("content") == " " and part.get("start"))
            or (part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never")
            for part in parts
        )
        self._aliases: tuple[str, tokenizers.Tokenizer, dict[int, int], dict[str, str]] | None
        self._aliases = None

    def text(self, token_id: int) -> str:
        """The vocabulary's spelling of an id; empty when it has no token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that an id adds to the text."""
        token = self.text(token_id)
        if self._alphabet is not None:
            values = [self._alphabet.get(char) for char in token]
            known = bytes(value for value in values if value is not None)
            # Added tokens are plain text and may hold characters outside the alphabet.
            return known if len(known) == len(values) else token.encode("utf-8")
        if self._byte_fallback and token_id not in self._added:
            match = _BYTE_TOKEN.fullmatch(token)
            if match:
                return bytes([int(match[1], 16)])
        return token.replace(SPACE, " ").encode("utf-8")

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of `text`; control tokens in it are recognised only with `parse_special`."""
        with self._lock:
            self._tokenizer.encode_special_tokens = not parse_special
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_marked(self, marked: str, mark: str) -> list[int]:
        """Ids of a rendered chat in which `mark` stands inside every control token that is text.

        Control tokens without the mark are swapped for aliases that no text can hold, added to a
        copy of the tokenizer with the same rules for spaces around them; then control tokens are
        not recognised at all. So everything else of the tokenizer's behaviour stays as it is.
        """
        with self._lock:
            _, tokenizer, back, alias_of = self._with_aliases(marked + mark)
            plain = unmarked(mark, self.special).sub(lambda m: alias_of[m[0]], marked)
            ids = tokenizer.encode(plain.replace(mark, ""), add_special_tokens=False).ids
        return [back.get(i, i) for i in ids]

    def _with_aliases(
        self, text: str
    ) -> tuple[str, tokenizers.Tokenizer, dict[int, int], dict[str, str]]:
        """`(character, tokenizer, alias id -> id, text -> alias)`, of a character not in `text`."""
        if self._aliases is not None and self._aliases[0] not in text:
            return self._aliases
        from tokenizers import AddedToken

        char = free_marks([text], 1)
        copy = _load(self._raw)
        alias_of = {text: f"{char}{i:x}{char}" for text, i in self.special.items()}
        copy.add_tokens(
            [
                AddedToken(
                    alias_of[token.content],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                    special=False,
                )
                for token in self._added.values()
                if token.content in alias_of
            ]
        )
        copy.encode_special_tokens = True
        back: dict[int, int] = {}
        for text, i in self.special.items():
            alias_id = copy.token_to_id(alias_of[text])
            assert alias_id is not None
            back[alias_id] = i
        self._aliases = (char, copy, back, alias_of)
        return self._aliases
