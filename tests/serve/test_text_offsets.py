"""`text_offset`: the place of the character that a token's first byte belongs to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hornito.runtime.results import TokenLogprob
from hornito.serve.tokens import CompletionLogprobs, Places, join_completion_logprobs
from text_places import character_places

#: Starts and ends of characters of every length, bytes that are neither, and U+FFFD itself.
TRICKY = [
    *(bytes([byte]) for byte in (0x20, 0x41, 0x80, 0x8F, 0x90, 0xA0, 0xBF, 0xC0, 0xC3, 0xF5)),
    *(bytes([byte]) for byte in (0xE0, 0xE2, 0xED, 0xEF, 0xF0, 0xF4, 0xFF)),
    *("é".encode(), b"\xef\xbf", b"\xbd", "\ufffd".encode(), b"\xe2\x82", b"\xf0\x9f\x99", b""),
]


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(TRICKY), st.binary(max_size=5)), max_size=12))
def test_places_are_those_of_all_bytes_at_once(pieces: list[bytes]) -> None:
    places = Places()
    found = [places.take(piece) for piece in pieces]
    want = character_places(pieces) if pieces else []
    # An empty token behind half a character does not know yet whether that goes on.
    for piece, got, expected in zip(pieces, found, want, strict=True):
        assert got == expected or (not piece and got == expected - 1)
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("pieces", "want"),
    [
        ([b"a", "é".encode(), b"b"], [0, 1, 2]),
        # One character in three tokens: all of them are where it is.
        ([b"a", b"\xe2", b"\x82", b"\xac", b"b"], [0, 1, 1, 1, 2]),
        # Half a character and a whole one: "\ufffdA".
        ([b"\xc3", b"A", b"b"], [0, 1, 2]),
        # Half of one and half of another: "\ufffdé".
        ([b"\xe2\x82", b"\xc3", b"\xa9", b"!"], [0, 1, 1, 2]),
        # A character ends, and the next begins, within one token.
        ([b"\xc3", b"\xa9\xe2\x82", b"\xac", b"!"], [0, 0, 1, 2]),
        # Bytes that can't be anything are a character each.
        ([b"\xff", b"\x80\x80", b"x"], [0, 1, 3]),
        # Half a surrogate pair has no UTF-8: three bytes that begin nothing.
        ([b"\xed", b"\xa0", b"\x80", b"x"], [0, 1, 2, 3]),
        # U+FFFD spelled out is a character like any other.
        ([b"\xef\xbf", b"\xbd", b"x"], [0, 0, 1]),
    ],
)
def test_places(pieces: list[bytes], want: list[int]) -> None:
    places = Places()
    assert [places.take(piece) for piece in pieces] == want == character_places(pieces)


class Spells:
    """A vocabulary of bytes; the ids below 3 are control tokens."""

    strips_first_space = True

    def __init__(self, *tokens: bytes) -> None:
        self.tokens = tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id < 3


def places_of(*tokens: int) -> list[TokenLogprob]:
    return [TokenLogprob(token, -1.0, ()) for token in tokens]


def test_a_prompt_and_its_answer() -> None:
    """The vocabulary's first space is not in the text; an answer never ends the prompt's character.

    The text is "hi\\ufffd" and then "\\ufffd you".
    """
    tokenizer = Spells(b"<s>", b"", b"", b" hi", b"\xc3", b"\xa9", b" you")
    logprobs = CompletionLogprobs(tokenizer, 0, echo=True)  # type: ignore[arg-type]
    parts = [logprobs.first(0, spelled=False), logprobs.part(places_of(3, 4))]
    logprobs.begin_answer(len("hi\ufffd"))
    parts += [logprobs.part(places_of(5)), logprobs.part(places_of(0, 6, 6))]
    joined = join_completion_logprobs(parts)
    assert joined["text_offset"] == [0, 0, 2, 3, 4, 4, 8]
    assert joined["tokens"] == ["<s>", " hi", r"bytes:\xc3", r"bytes:\xa9", "<s>", " you", " you"]
    # Spelled out, the control token is the beginning, and the space behind it is text.
    logprobs = CompletionLogprobs(tokenizer, 0, echo=True)  # type: ignore[arg-type]
    first = logprobs.first(0, spelled=True)
    rest = logprobs.part(places_of(3, 4), spelled=True)
    assert [*first["text_offset"], *rest["text_offset"]] == [0, 3, 6]
    # An answer alone goes on from its prompt: its first space is text.
    alone = CompletionLogprobs(tokenizer, 0, echo=False)  # type: ignore[arg-type]
    assert alone.part(places_of(6, 6))["text_offset"] == [0, 4]
