"""Prefix reuse: a prompt starts from the live snapshot that shares most of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hornito.runtime.session import Session
from hornito.runtime.snapshot import EMBEDDED, Snapshot


@dataclass(frozen=True, slots=True)
class Match:
    """A snapshot and how many of its first tokens a prompt can take over."""

    snapshot: Snapshot
    tokens: int


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their start; embeddings equal nothing."""
    a, b = list(a[: len(b)]), list(b[: len(a)])
    same, end = 0, len(a)
    while same < end:  # slices are compared at the speed of C
        middle = (same + end + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            end = middle - 1
    shared = a[:same]
    return shared.index(EMBEDDED) if EMBEDDED in shared else same


def best_match(snapshots: Iterable[Snapshot], ids: Sequence[int]) -> Match | None:
    """The snapshot from which most of `ids` need no evaluation.

    At least the last of `ids` is always left to evaluate. A snapshot whose sliding layers no longer
    hold what an earlier position needs counts only as a whole.
    """
    best: Match | None = None
    for snapshot in snapshots:
        if snapshot.lost:
            continue
        tokens = min(common_prefix(snapshot.ids, ids), len(ids) - 1)
        if tokens < snapshot.position and tokens < snapshot.first_kept:
            continue
        if tokens > (best.tokens if best else 0):
            best = Match(snapshot, tokens)
    return best


def start_from_prefix(session: Session, ids: Sequence[int]) -> int:
    """Bring a session to the longest prefix of `ids` that need not be evaluated again.

    That is what the session itself holds, or a live snapshot. At least the last of `ids` is left to
    evaluate.

    Returns:
        the tokens of the prefix, which are the session's position.
    """
    with session.engine.lock:
        own = min(common_prefix(session.ids, ids), len(ids) - 1)
        if own < session.position and own < session.blocks.first_kept:
            own = 0
        match = best_match(list(session.engine.snapshots), ids)
        if match is not None and match.tokens > own:
            session.restore(match.snapshot)
            own = match.tokens
        session.rewind(own)
        return own
