"""What keeps an engine's bookkeeping whole: one thread at a time, and no Ctrl-C in the middle."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from hornito.runtime.engine import Engine

    class HasEngine(Protocol):
        """An object whose methods belong to one engine."""

        engine: Engine


P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner", bound="HasEngine")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends.

    For blocks that change state on the host and the device together and wait for nothing. Signals
    reach only the main thread; in others, and where Python code does not handle SIGINT, this is
    nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def locked(
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """A method that has the engine to itself: calls of other threads wait for it."""

    @functools.wraps(method)
    def run(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.engine.lock:
            return method(self, *args, **kwargs)

    return run
