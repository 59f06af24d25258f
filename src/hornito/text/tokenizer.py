"""Token ids of text and text of token ids, for every kind of vocabulary.

Text from a user never turns into control tokens: they are recognised only where the caller asks
for it (`parse_special`), and in a chat only in what the template itself wrote (`encode_chat`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from hornito.errors import FormatError, UsageError
from hornito.text.huggingface import HuggingFaceTokenizer
from hornito.text.sentencepiece import SentencePieceBPE
from hornito.text.stream import StreamDecoder
from hornito.text.tool_calls import CALL_MARKS

if TYPE_CHECKING:
    from hornito.package import Package

_SENTENCEPIECE = re.compile(rb'\s*\{\s*"type"\s*:\s*"hornito-sentencepiece-bpe"')


class _Backend(Protocol):
    @property
    def size(self) -> int: ...

    @property
    def strips_first_space(self) -> bool: ...

    @property
    def special(self) -> Mapping[str, int]: ...

    def text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, parse_special: bool) -> list[int]: ...

    def encode_marked(self, marked: str, mark: str) -> list[int]: ...


def _backend(raw: bytes, control_ids: frozenset[int]) -> _Backend:
    if not _SENTENCEPIECE.match(raw):
        return HuggingFaceTokenizer(raw, control_ids)
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"tokenizer: not valid JSON: {error}") from error
    return SentencePieceBPE(data, control_ids)


class Tokenizer:
    """Encodes and decodes for one model.

    Attributes:
        add_bos: whether text starts with BOS.
        bos_id: the id of BOS, or None.
        eos_ids: ids that end an answer.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        add_bos: bool = False,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        """Read a tokenizer.

        Args:
            tokenizer_json: a file of the `tokenizers` library, or Hornito's SentencePiece JSON.
            add_bos, bos_id, eos_ids: as in `hornito.importers.Source`.

        Raises:
            FormatError: the file is damaged.
            UnsupportedError: it decodes in a way that Hornito does not know.
        """
        self.add_bos = add_bos and bos_id is not None
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        # Some files declare their start and end tokens as plain text; a user must not spell them.
        control = {*self.eos_ids, *(() if bos_id is None else (bos_id,))}
        self._backend = _backend(tokenizer_json, frozenset(control))
        self._size = self._backend.size
        self._special_ids = frozenset(
            token for text, token in self._backend.special.items() if text not in CALL_MARKS
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._size

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Control tokens: text to id."""
        return self._backend.special

    @property
    def strips_first_space(self) -> bool:
        """Whether the first space of a decoded sequence belongs to the vocabulary's spelling."""
        return self._backend.strips_first_space

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a control token, not text; those that mark calls in replies are text."""
        return token_id in self._special_ids

    def encode(
        self, text: str, *, parse_special: bool = False, add_bos: bool | None = None
    ) -> list[int]:
        """Ids of `text`.

        Args:
            text: any text.
            parse_special: recognise control tokens that are spelled out in `text`; never set it
                for text from outside.
            add_bos: put BOS in front; None means as the model wants it. With `parse_special`, a
                text that already begins with BOS gets no second one.

        Raises:
            UsageError: `text` holds lone surrogates, which have no UTF-8 form.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"the text is not valid Unicode: {error}") from error
        ids = self._backend.encode(text, parse_special)
        wanted = self.add_bos if add_bos is None else add_bos
        return self._with_bos(ids, parse_special) if wanted else ids

    def _with_bos(self, ids: list[int], may_have_it: bool) -> list[int]:
        if self.bos_id is None or (may_have_it and ids[:1] == [self.bos_id]):
            return ids
        return [self.bos_id, *ids]

    def encode_chat(self, marked: str, mark: str | None = None) -> list[int]:
        """Ids of a rendered chat, with exactly one BOS where the model wants one.

        Args:
            marked: the rendered text (`ChatTemplate.render_marked`).
            mark: a character inside every spelling of a control token that came from a message;
                such a spelling stays plain text. None: there are none.
        """
        if mark is None:
            ids = self.encode(marked, parse_special=True, add_bos=False)
        else:
            ids = self._backend.encode_marked(marked, mark)
        return self._with_bos(ids, True) if self.add_bos else ids

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that an id adds to the text; empty for an id without a token."""
        return self._backend.token_bytes(token_id) if 0 <= token_id < self._size else b""

    def id_to_piece(self, token_id: int) -> str:
        """The vocabulary's own spelling of an id (`Ġthe`), or empty for an id without a token."""
        return self._backend.text(token_id) if 0 <= token_id < self._size else ""

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of a whole sequence; bytes are joined before they are read as UTF-8."""
        stream = StreamDecoder(self, skip_special=skip_special)
        return "".join([*(stream.push(i) for i in ids), stream.finish()])


def package_tokenizer(package: Package) -> Tokenizer:
    """The tokenizer of a package.

    Raises:
        UsageError: the package has none.
    """
    if "tokenizer.json" not in package.blobs:
        raise UsageError("this package has no tokenizer: prompts must be lists of token ids")
    facts = package.manifest.facts
    return Tokenizer(
        package.blob("tokenizer.json"),
        add_bos=facts["add_bos"],
        bos_id=facts["bos_id"],
        eos_ids=facts["eos_ids"],
    )
