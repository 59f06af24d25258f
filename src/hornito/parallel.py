"""Work on the processor's threads: numpy, hashing and files let other threads run meanwhile."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = min(32, os.cpu_count() or 1)
"""More would wait for Python's lock, and each takes memory of its own."""


class Workers:
    """Threads for a piece of work, as a context; they start when there is something to do.

    Leaving the context waits for what has begun and drops what has not, so an error or Ctrl-C ends
    the work as soon as the tasks that run are done.

    Args:
        count: of threads; None for `THREADS`.
    """

    def __init__(self, count: int | None = None) -> None:
        count = count or THREADS
        self._ahead = 2 * count
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def in_order(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        ahead: int | None = None,
    ) -> Iterator[Result]:
        """What a function makes of each item, in the order of the items, with its errors.

        Args:
            ahead: most tasks that run or whose results wait to be taken; None for two a thread.
        """
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(self._pool.submit(function, item))
            if len(waiting) >= (ahead or self._ahead):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def workers_or_own(workers: Workers | None) -> Iterator[Workers]:
    """The workers given, or for None some of one's own."""
    if workers is not None:
        yield workers
        return
    with Workers() as own:
        yield own
