"""SentencePiece BPE: merge the adjacent pair whose joined token has the highest score.

The `tokenizers` library merges by rank of the pair, which differs where two pairs make the same
token or scores tie; here the definition itself is run. Method: Kudo and Richardson, 2018,
https://arxiv.org/abs/1808.06226, as implemented in SentencePiece and llama.cpp.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hornito.errors import FormatError
from hornito.text.marks import unmarked

SPACE = "\u2581"
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_CACHE_WORDS = 1 << 16
_WORD = re.compile(f"{SPACE}*[^{SPACE}]*")


class SentencePieceBPE:
    """A score-based vocabulary; see `hornito.importers.tokenizer` for its JSON."""

    def __init__(self, data: Mapping[str, Any], control_ids: frozenset[int] = frozenset()) -> None:
        """Take the parsed JSON; FormatError when its parts do not fit together.

        User-defined tokens in `control_ids` count as control tokens.
        """
        try:
            self.tokens = [str(token) for token in data["tokens"]]
            self.types = [int(kind) for kind in data["types"]]
            self._scores = [float(score) for score in data["scores"]]
            self._space_first = bool(data["add_space_prefix"])
            unknown = data["unk_id"]
            self._rstrip = frozenset(int(i) for i in data.get("rstrip", ()))
            self._unknown = int(unknown) if unknown is not None else None
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"tokenizer: damaged SentencePiece vocabulary: {error!r}") from error
        size = len(self.tokens)
        if not size or len(self.types) != size or len(self._scores) != size:
            raise FormatError(
                f"tokenizer: {size} tokens, {len(self.types)} types, {len(self._scores)} scores"
            )
        if self._unknown is not None and not 0 <= self._unknown < size:
            raise FormatError(f"tokenizer: unk_id {self._unknown}, but there are {size} tokens")
        # Control tokens never come out of merges: text can't spell them.
        self._pieces: dict[str, int] = {}
        self._bytes: dict[int, int] = {}
        self._control: dict[str, int] = {}
        self._defined: dict[str, int] = {}
        for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind == _BYTE:
                value = _byte_value(token)
                if value is not None:
                    self._bytes[value] = i
            elif kind == _CONTROL or (kind == _USER_DEFINED and i in control_ids):
                self._control[token] = i
            elif kind != _UNKNOWN and token:
                self._pieces[token] = i
                if kind == _USER_DEFINED:
                    self._defined[token] = i
        self._find_defined = _Finder(self._defined)
        self._find_all = _Finder({**self._defined, **self._control})
        # Where no token has a space after something else, no merge crosses into the next word.
        self._by_word = not any(re.search(f"[^{SPACE}]{SPACE}", token) for token in self._pieces)
        self._cache: dict[str, tuple[int, ...]] = {}

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.tokens)

    @property
    def strips_first_space(self) -> bool:
        """Whether the first space of a decoded sequence is the vocabulary's own."""
        return self._space_first

    def text(self, token_id: int) -> str:
        """The vocabulary's spelling of an id."""
        return self.tokens[token_id]

    @property
    def special(self) -> Mapping[str, int]:
        """Control tokens by text."""
        return self._control

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that an id adds to the text."""
        token, kind = self.tokens[token_id], self.types[token_id]
        if kind == _BYTE:
            value = _byte_value(token)
            return bytes([value]) if value is not None else token.encode("utf-8")
        if kind in (_CONTROL, _USER_DEFINED):
            return token.encode("utf-8")
        return token.replace(SPACE, " ").encode("utf-8")

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of `text`; control tokens in it are recognised only with `parse_special`."""
        finder = self._find_all if parse_special else self._find_defined
        out: list[int] = []
        space_due, swallow = self._space_first, False
        for found, token_id in finder.split(text):
            piece = found.lstrip() if swallow else found
            if token_id is not None:
                out.append(token_id)
                space_due, swallow = self._space_first, token_id in self._rstrip
            elif piece:
                out += self._encode_plain((" " if space_due else "") + piece)
                space_due = swallow = False
        return out

    def encode_marked(self, marked: str, mark: str) -> list[int]:
        """Ids of a rendered chat in which `mark` stands inside every control token that is text.

        Text between control tokens is encoded apart from its surroundings anyway, so the parts
        between the unmarked ones can be encoded one by one.
        """
        out: list[int] = []
        at = 0
        for match in unmarked(mark, self._control).finditer(marked):
            out += self.encode(marked[at : match.start()].replace(mark, ""), False)
            out.append(self._control[match[0]])
            at = match.end()
            if out[-1] in self._rstrip:
                at += len(marked[at:]) - len(marked[at:].lstrip())
        return out + self.encode(marked[at:].replace(mark, ""), False)

    def _encode_plain(self, text: str) -> list[int]:
        text = text.replace(" ", SPACE)
        if not self._by_word:
            return list(self._merge(text))
        out: list[int] = []
        for match in _WORD.finditer(text):
            word = match[0]
            ids = self._cache.get(word)
            if ids is None:
                ids = self._merge(word)
                if len(self._cache) < _CACHE_WORDS and len(word) < 64:
                    self._cache[word] = ids
            out += ids
        return out

    def _merge(self, text: str) -> tuple[int, ...]:
        """Merge greedily by score, leftmost on ties."""
        count = len(text)
        parts: list[str] = list(text)
        following = list(range(1, count + 1))
        preceding = list(range(-1, count - 1))
        heap: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            joined = parts[left] + parts[right]
            token = self._pieces.get(joined)
            if token is not None:
                heapq.heappush(heap, (-self._scores[token], left, right, joined))

        for i in range(count - 1):
            offer(i, i + 1)
        while heap:
            _, left, right, joined = heapq.heappop(heap)
            # A pair that has changed since it was offered: its text tells. Parts merged into
            # another are empty, and a part only grows.
            if not parts[left] or not parts[right] or parts[left] + parts[right] != joined:
                continue
            parts[left], parts[right] = joined, ""
            after = following[right]
            following[left] = after
            if after < count:
                preceding[after] = left
                offer(left, after)
            if preceding[left] >= 0:
                offer(preceding[left], left)
        out: list[int] = []
        for part in parts:
            if part:
                out += self._ids_of(part)
        return tuple(out)

    def _ids_of(self, part: str) -> list[int]:
        token = self._pieces.get(part)
        if token is not None:
            return [token]
        spelled = [self._bytes.get(value) for value in part.encode("utf-8")]
        known = [i for i in spelled if i is not None]
        if len(known) == len(spelled):
            return known
        return [self._unknown] if self._unknown is not None else []


def _byte_value(token: str) -> int | None:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    return int(match[1], 16) if match else None


class _Finder:
    """Finds whole tokens in raw text: leftmost, of those the longest."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._lengths: dict[str, list[int]] = {}
        for token in tokens:
            if token:
                self._lengths.setdefault(token[0], []).append(len(token))
        for lengths in self._lengths.values():
            lengths[:] = sorted(set(lengths), reverse=True)
        starts = "".join(re.escape(char) for char in self._lengths)
        self._start = re.compile(f"[{starts}]") if starts else None

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yield `(plain text, None)` and `(token, id)` in order."""
        if self._start is None:
            yield text, None
            return
        begin = at = 0
        while (match := self._start.search(text, at)) is not None:
            at = match.start()
            for length in self._lengths[text[at]]:
                token = self._tokens.get(text[at : at + length])
                if token is not None:
                    yield text[begin:at], None
                    yield text[at : at + length], token
                    begin = at = at + length
                    break
            else:
                at += 1
        yield text[begin:], None
