"""Proving kernels while nobody uses the device: a thread that makes way within one submission."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hornito.errors import DeviceLostError, HornitoError
from hornito.runtime.guard import uninterrupted
from hornito.runtime.proof import Proof

if TYPE_CHECKING:
    from hornito.runtime.engine import Engine

log = logging.getLogger("hornito")

IDLE_SECONDS = 0.2
"""How long nothing must have run before kernels are tested."""


class _EndedError(Exception):
    """The proof has to end before it is through."""


class _RenewedError(Exception):
    """The engine has another device: what is left has to be proved there."""


class IdleProof:
    """Tests what a load left unproven, in the pauses that the engine's user announces.

    Between `resume` and `pause` the device is this object's; `pause` returns when it is free again,
    which takes one submission, or the making of one pipeline, at most. Plans are made outside of
    that. Who uses the engine calls `pause` first, and `close` before the engine is closed. When its
    device was opened again during a pause, the next `resume` goes on with what is unproven there.
    Where nothing is unproven there is no thread.

    Args:
        lost: called by the thread when a kernel took the device with it; by default that is logged.

    Attributes:
        done: whether nothing is left to test, or nothing more can be tested on this device.
    """

    def __init__(
        self, engine: Engine, lost: Callable[[DeviceLostError], None] | None = None
    ) -> None:
        self._engine = engine
        self._device = engine.device
        self._lost = lost
        self._changed = threading.Condition()
        self._begins: float | None = None  # when the device may be used, by time.monotonic
        self._using = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self.done = engine.trust.complete

    def __enter__(self) -> IdleProof:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # -- for the engine's user ----------------------------------------------------------------

    def resume(self) -> None:
        """Nothing runs from now on: test, when that has been so for a while."""
        with self._changed:
            if self.done and self._engine.device is not self._device:
                self._device = self._engine.device
                self.done, self._thread = self._engine.trust.complete, None
            if self.done or self._closing:
                return
            self._begins = time.monotonic() + IDLE_SECONDS
            self._changed.notify_all()
            if self._thread is None:
                work = threading.Thread(target=self._work, name="hornito-proof", daemon=True)
                self._thread = work
                work.start()

    def pause(self) -> None:
        """Something is to run: have the device free when this returns."""
        with self._changed:
            self._begins = None
            while self._using:
                self._changed.wait()

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Test while a block waits for something else, such as a user's input."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def close(self) -> None:
        """End, with what is known by now kept on disk; a second call does nothing.

        Ctrl-C waits until the thread has ended: what comes next may close the device.
        """
        with uninterrupted():
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join()

    # -- the thread ---------------------------------------------------------------------------

    def take(self) -> None:
        """Make way for whoever wants the device, and wait until it is free."""
        with self._changed:
            self._release()
            while (seconds := self._until_free()) != 0:
                self._changed.wait(seconds)
            if self._closing:
                raise _EndedError
            if self._engine.device is not self._device:
                raise _RenewedError
            self._using = True

    def give(self) -> None:
        """Leave the device to others."""
        with self._changed:
            self._release()

    def _release(self) -> None:
        self._using = False
        self._changed.notify_all()

    def _until_free(self) -> float | None:
        """Seconds until the device may be used; None for until something changes."""
        if self._closing:
            return 0
        return None if self._begins is None else max(0.0, self._begins - time.monotonic())

    def _work(self) -> None:
        try:
            while not self._prove():
                pass
            log.info("kernels: %s", self._engine.trust.line)
        except _EndedError:
            log.debug("the proof of kernels ended early")
        except DeviceLostError as error:
            self._tell(error)
        except HornitoError as error:
            log.warning("the kernels left can't be proved now: %s", error)
        except Exception:
            log.exception("the proof of kernels failed; those without a verdict stay unused")
        finally:
            with self._changed:
                self.done = True
                self._release()

    def _prove(self) -> bool:
        """Test all that is unproven; False when the engine has another device by now."""
        try:
            self.take()
            if not self._engine.trust.complete:
                Proof(self._engine, self).run(each=True)
            return True
        except _RenewedError:
            with self._changed:
                self._device = self._engine.device
            return False

    def _tell(self, error: DeviceLostError) -> None:
        if self._lost is not None:
            self._lost(error)
        elif self._engine.recover:
            text = str(error).partition(";")[0]
            log.warning("%s; it is opened again when it is used next", text)
        else:
            log.error("%s", error)
