"""What steps say of their rows: records that the device writes into a ring the host can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hornito.errors import HornitoError
from hornito.ops.base import MOST_TOP
from hornito.ops.head import RECORD_BYTES
from hornito.plan.plan import RING

NOT_A_NUMBER = 0xFFFFFFFE


class Record(NamedTuple):
    """What a step says of its row: the next token, its log-probability, and the most likely ones.

    `top` is empty unless the sampling parameters ask for it. All are of the model's own
    distribution, before bias, penalties, temperature and filters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Emitted:
    """The rings of an engine's rows, and how far each was read.

    Args:
        words: the words of a readback item, by name.
        rows: by kind of bucket, how many rows have a ring.
    """

    def __init__(
        self, words: Callable[[str], npt.NDArray[np.uint32]], rows: Mapping[str, int]
    ) -> None:
        self._words = words
        self._next = {kind: [0] * count for kind, count in rows.items()}

    def take(
        self, kind: str, rows: int, count: int, tops: Sequence[int] = ()
    ) -> list[list[Record]]:
        """What each of the first `rows` rows emitted in `count` steps.

        A row that stopped has fewer than `count`. Sequence numbers are used up either way: they
        never repeat in an engine's life.

        Args:
            tops: how many most likely tokens each row was asked for.

        Returns:
            the records, which `not_finite` has to look at: logits may hold a NaN.
        """
        view = self._words(f"{kind}.records").reshape(-1, RING, RECORD_BYTES // 4)
        top = self._words(f"{kind}.top").reshape(-1, RING, MOST_TOP, 2)
        found: list[list[Record]] = []
        for row in range(rows):
            first, records = self._next[kind][row], list[Record]()
            wanted = tops[row] if tops else 0
            for number in range(first, first + count):
                token, logprob, sequence, _ = view[row, number % RING].tolist()
                if sequence != (number + 1) & 0xFFFFFFFF:
                    break
                likely = _top(top[row, number % RING, :wanted]) if wanted else ()
                records.append(Record(token, float(np.uint32(logprob).view(np.float32)), likely))
            found.append(records)
        self.skip(kind, rows, count)
        return found

    def skip(self, kind: str, rows: int, count: int) -> None:
        """Pass over what the first `rows` rows emitted in `count` steps."""
        for row in range(rows):
            self._next[kind][row] += count

    def next_number(self, kind: str, row: int) -> int:
        """The next sequence number of a row's records."""
        return self._next[kind][row] & 0xFFFFFFFF


def not_finite(records: Sequence[Record], row: int) -> HornitoError | None:
    """What is wrong with the records of a row, when its logits held a NaN or an infinity."""
    if all(record.token != NOT_A_NUMBER for record in records):
        return None
    return HornitoError(
        f"the logits of row {row} are not finite: a value overflowed or the weights are damaged; "
        "run `hornito verify` on the package, or load with precision high (--precision high, or "
        "precision='high')"
    )


def _top(words: npt.NDArray[np.uint32]) -> tuple[tuple[int, float], ...]:
    """(id, log-probability) of each entry; a small vocabulary leaves some empty."""
    values = words[:, 1].copy().view(np.float32).tolist()
    pairs = zip(words[:, 0].tolist(), values, strict=True)
    return tuple((token, value) for token, value in pairs if token != 0xFFFFFFFF)
