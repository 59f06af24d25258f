"""Arrays that a thread uses again and again.

Fresh memory costs a page fault every 4 KiB, and the threads of a process wait for each other's.
"""

from __future__ import annotations

import math
import threading

import numpy as np

from hornito.quant.formats import Floats


class Scratch(threading.local):
    """Float32 arrays of the calling thread, by name; they go when it ends."""

    def __init__(self) -> None:
        self._held: dict[str, Floats] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Floats:
        """An array of that shape with any content, which the next `take` of the name gives away."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.size < size:
            held = self._held[name] = np.empty(size, np.float32)
        return held[:size].reshape(shape)


SCRATCH = Scratch()
