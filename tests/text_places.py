"""Which character of a text each of some bytes belongs to, apart from the code under test."""

from __future__ import annotations

from collections.abc import Sequence


def character_places(pieces: Sequence[bytes]) -> list[int]:
    """The character, of all pieces decoded at once, that the first byte of each is of.

    An empty piece has the place of the byte that comes next.
    """
    rest = b"".join(pieces)
    owners: list[int] = []
    while rest:
        character = owners[-1] + 1 if owners else 0
        size = _first_character(rest)
        owners += [character] * size
        rest = rest[size:]
    owners.append(owners[-1] + 1 if owners else 0)
    starts = [0]
    for piece in pieces[:-1]:
        starts.append(starts[-1] + len(piece))
    return [owners[start] for start in starts]


def _first_character(data: bytes) -> int:
    """Bytes of the first character, or of what is one U+FFFD instead."""
    for size in range(1, 5):
        try:
            data[:size].decode()
            return min(size, len(data))
        except UnicodeDecodeError:
            continue
    try:
        data.decode()
    except UnicodeDecodeError as error:
        assert error.start == 0
        return error.end
    raise AssertionError("unreachable")
