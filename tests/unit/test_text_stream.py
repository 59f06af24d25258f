"""Streaming: whole characters, nothing of a stop string, the same text however tokens fall."""

from __future__ import annotations

import random

import pytest

from hornito.errors import UsageError
from hornito.text.stream import StreamDecoder, find_stop, held_back


class Bytes:
    """A vocabulary of byte strings; ids in `special` are control tokens."""

    def __init__(
        self, pieces: list[bytes], special: frozenset[int] = frozenset(), space: bool = False
    ) -> None:
        self.pieces, self.special, self.strips_first_space = pieces, special, space

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special


def stream(pieces: list[bytes], **options: object) -> tuple[list[str], StreamDecoder]:
    decoder = StreamDecoder(Bytes(pieces), **options)  # type: ignore[arg-type]
    out = [decoder.push(i) for i in range(len(pieces))]
    return [*out, decoder.finish()], decoder


def test_never_a_partial_character() -> None:
    pieces = [b"a\xf0", b"\x9f", b"\x8c", b"\x8b!", "é".encode()]
    out, decoder = stream(pieces)
    assert out == ["a", "", "", "🌋!", "é", ""]
    assert decoder.text == "a🌋!é" and decoder.stopped is None


def test_broken_bytes_become_replacement_characters() -> None:
    whole = b"x\xff\xe2\x82y\xf0\x9f"
    for size in (1, 2, 3, 7):
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        out, _ = stream(pieces)
        assert "".join(out) == whole.decode("utf-8", "replace") == "x\ufffd\ufffdy\ufffd"
    out, _ = stream([b"ok \xf0\x9f"])
    assert out == ["ok ", "\ufffd"]


def test_stop_string_across_tokens() -> None:
    out, decoder = stream([b"one ", b"<", b"sto", b"p> two"], stop=["<stop>"])
    assert out == ["one ", "", "", "", ""]
    assert decoder.stopped == "<stop>" and decoder.text == "one "


def test_what_only_looked_like_a_stop_is_given_out() -> None:
    out, decoder = stream([b"a", b"##", b"#b", b"#"], stop=["####", "#c"])
    assert out == ["a", "", "###b", "", "#"]
    assert decoder.text == "a###b#" and decoder.stopped is None


def test_nothing_after_a_stop() -> None:
    out, _ = stream([b"a STOP b", b"c"], stop=["STOP"])
    assert out == ["a ", "", ""]


def test_the_stop_that_is_complete_first_counts() -> None:
    assert find_stop("xabcde", ["bcd", "abcde"]) == (2, "bcd")
    assert find_stop("xabcde", ["cd", "bcd"]) == (2, "bcd")
    assert find_stop("xabc", ["d"]) is None
    assert find_stop("", ["d"]) is None


def test_held_back() -> None:
    assert held_back("abc##", ["###"]) == 2
    assert held_back("ab", ["abc", "b"]) == 2
    assert held_back("a", ["a"]) == 0
    assert held_back("xyz", []) == 0
    assert held_back("\n", ["\n\nHuman:"]) == 1


def test_same_text_however_tokens_fall() -> None:
    rng = random.Random(3)
    for _ in range(400):
        text = "".join(rng.choice("ab#é🌋") for _ in range(rng.randrange(1, 14)))
        stops = ["".join(rng.choice("ab#é") for _ in range(rng.randrange(1, 4))) for _ in "12"]
        raw = text.encode()
        by_character = [c.encode() for c in text]
        cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.randrange(5)))
        by_chance = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        results = set()
        for pieces in (by_character, by_chance, [raw], [bytes([b]) for b in raw]):
            out, decoder = stream(pieces, stop=stops)
            assert "".join(out) == decoder.text
            results.add((decoder.text, decoder.stopped))
        assert len(results) == 1, (text, stops)
        found = find_stop(text, stops)
        assert results == {(text[: found[0]], found[1]) if found else (text, None)}


def test_special_tokens() -> None:
    vocabulary = Bytes([b"a", b"<|end|>", b"b"], frozenset({1}))
    hidden = StreamDecoder(vocabulary)
    assert [hidden.push(i) for i in (0, 1, 2)] == ["a", "", "b"]
    shown = StreamDecoder(vocabulary, skip_special=False)
    assert [shown.push(i) for i in (0, 1, 2)] == ["a", "<|end|>", "b"]


def test_first_space() -> None:
    vocabulary = Bytes([b" Hi", b" you"], space=True)
    answer = StreamDecoder(vocabulary)
    assert [answer.push(i) for i in (0, 1)] == ["Hi", " you"]
    going_on = StreamDecoder(vocabulary, continuation=True)
    assert [going_on.push(i) for i in (0, 1)] == [" Hi", " you"]


@pytest.mark.parametrize("stop", ["abc", [""], [None], [b"x"]])
def test_bad_stops(stop: object) -> None:
    with pytest.raises(UsageError, match="stop must be a list of non-empty strings"):
        StreamDecoder(Bytes([]), stop=stop)  # type: ignore[arg-type]
