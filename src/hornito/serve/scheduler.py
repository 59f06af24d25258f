"""The scheduler: a thread that answers the requests of many clients with one model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from hornito.errors import DeviceLostError, HornitoError
from hornito.runtime.idle import IdleProof
from hornito.serve.prefix_cache import PrefixCache
from hornito.serve.rounds import NoWatch, Rounds, Watch
from hornito.serve.work import Deliver, Group, Job, Queue, UnavailableError, Work

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.runtime.snapshot import Snapshot

T = TypeVar("T")

log = logging.getLogger("hornito")

RETRY_SECONDS = (0.0, 1.0, 5.0, 15.0)
"""Waits before each try to get a lost device back; the last one again and again."""


class Scheduler:
    """Answers requests, and proves kernels while there are none.

    Attributes:
        queue: what waits.
        state: `ok`; `device lost` until the device has been opened again; `stopping`; `failed`.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        queue_limit: int = 64,
        cache_bytes: int | None = None,
        prefixes: Sequence[Snapshot] = (),
        watch: Watch | None = None,
    ) -> None:
        """Start the thread.

        Args:
            llm: a loaded model, which the scheduler closes.
            queue_limit: answers that may wait.
            cache_bytes: budget of the prefix cache; None is all that the KV pools leave.
            prefixes: what prompts may start from for as long as the scheduler lives.
            watch: told about the work.
        """
        self.queue = Queue(queue_limit)
        self.state = "ok"
        self._cache_bytes = cache_bytes
        self._prefixes = list(prefixes)
        self._watch = watch or NoWatch()
        self._calls: list[Callable[[], None]] = []
        # After a loss it is the scheduler that decides who goes on: sessions must not do so alone.
        llm.engine.recover = False
        self._rounds = self._begin(llm)
        self._proof = IdleProof(llm.engine, self._report)
        self._thread = threading.Thread(target=self._work, name="hornito-scheduler", daemon=True)
        self._thread.start()

    def _begin(self, llm: LLM) -> Rounds:
        cache = PrefixCache(llm.engine, self._cache_bytes)
        return Rounds(llm, self.queue, cache, self._watch)

    # -- for any thread -----------------------------------------------------------------------

    @property
    def llm(self) -> LLM:
        """The model."""
        return self._rounds.llm

    @property
    def cache(self) -> PrefixCache:
        """What later prompts start from."""
        return self._rounds.cache

    @property
    def running(self) -> int:
        """Answers that have a slot."""
        return len(self._rounds.running)

    def submit(self, works: Sequence[Work], deliver: Deliver, owner: object = None) -> Group:
        """Ask for the answers of one request.

        Args:
            deliver: called with the index of the work and each event, by the scheduler's thread.
            owner: requests of one owner share a turn; by default each has its own.

        Raises:
            BusyError: too many wait already.
            UnavailableError: the model can't answer now.
        """
        group = Group(deliver, owner)
        if owner is None:
            group.owner = group
        jobs = [Job(group, index, work) for index, work in enumerate(works)]
        group.jobs = list(jobs)
        with self.queue.changed:
            if self.state != "ok":
                raise UnavailableError(self._why())
            self.queue.add(jobs)
        return group

    def cancel(self, group: Group) -> None:
        """Give up a request; its slots are free after what is in flight."""
        with self.queue.changed:
            group.cancelled = True
            self.queue.changed.notify_all()

    def call(self, action: Callable[[], T]) -> T:
        """Run something in the scheduler's thread, between two rounds, and return its result.

        Raises:
            UnavailableError: the scheduler has ended.
        """
        done = threading.Event()
        found: list[T] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                found.append(action())
            except BaseException as error:
                failures.append(error)
            finally:
                done.set()

        self._post(run)
        done.wait()
        if failures:
            raise failures[0]
        return found[0]

    def check_device(self) -> None:
        """Ask the driver whether the device is still there; when it is not, get it back.

        Raises:
            DeviceLostError: it is not.
        """
        if self.state != "ok":
            return
        try:
            self.llm.engine.device.completed()
        except DeviceLostError as error:
            self._report(error)
            raise

    def close(self) -> None:
        """End what runs and waits, stop the thread, close the model; a second call does nothing."""
        with self.queue.changed:
            self.state = "stopping"
            self.queue.changed.notify_all()
        self._thread.join()

    def _report(self, error: DeviceLostError) -> None:
        """Have the thread find out that the device is gone, unless it does so before."""
        rounds = self._rounds
        self._post(lambda: self._lose(error) if self._rounds is rounds else None)

    def _post(self, call: Callable[[], None]) -> None:
        with self.queue.changed:
            if not self._thread.is_alive():
                raise UnavailableError(self._why())
            self._calls.append(call)
            self.queue.changed.notify_all()

    def _why(self) -> str:
        if self.state != "device lost":
            return f"the server is {'stopping' if self.state == 'stopping' else 'broken'}"
        return "the device was lost, and the model is being put on it again; try again later"

    # -- the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException:
            # Nobody answers any more, and /health must say so.
            with self.queue.changed:
                self.state = "failed"
            self._fail_waiting(UnavailableError(self._why()))
            raise
        finally:
            self._proof.close()

    def _serve(self) -> None:
        while self.state != "stopping":
            with self.queue.changed:
                if self._rounds.idle and not self._calls and self.state != "stopping":
                    self._proof.resume()
                    self.queue.changed.wait()
                calls, self._calls = self._calls, []
            self._proof.pause()
            for call in calls:
                call()
            try:
                self._rounds.round()
            except DeviceLostError as error:
                self._lose(error)
            except HornitoError as error:
                log.error("a round failed: %s", error)
                self._rounds.fail_all(error)
            except Exception as error:
                log.exception("a round failed")
                self._rounds.fail_all(HornitoError(f"internal error: {type(error).__name__}"))
        self._end()

    def _end(self) -> None:
        self._proof.close()
        stopping = UnavailableError(self._why())
        self._rounds.fail_all(stopping)
        self._fail_waiting(stopping)
        with self.queue.changed:
            calls, self._calls = self._calls, []
        for call in calls:
            call()
        self._rounds.close()
        self.llm.close()

    def _fail_waiting(self, error: HornitoError) -> None:
        for job in self.queue.drop(lambda job: True):
            self._watch.finished("failed", job)
            job.tell(error)

    def _lose(self, error: DeviceLostError) -> None:
        """The device is gone: say so to everyone, then open it again, however long that takes."""
        log.error("%s", error)
        with self.queue.changed:
            if self.state == "stopping":
                return
            self.state = "device lost"
        self._proof.close()
        self._rounds.fail_all(error)
        self._fail_waiting(error)
        self.cache.clear()
        for attempt in range(1 << 30):
            wait = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
            with self.queue.changed:
                if self.state != "stopping" and wait:
                    self.queue.changed.wait(wait)
                if self.state == "stopping":
                    return
            try:
                self.llm.engine.revive(wanted=True)
                self._prefixes = [self._evaluated(prefix) for prefix in self._prefixes]
            except HornitoError as failure:
                log.error("the device can't be opened again yet: %s", failure)
                continue
            self._resume()
            return

    def _evaluated(self, prefix: Snapshot) -> Snapshot:
        """A prefix of a lost device, on the new one."""
        with self.llm.session() as session:
            session.prefill(prefix.ids)
            return session.snapshot()

    def _resume(self) -> None:
        before = self.cache
        self._rounds = self._begin(self.llm)
        self.cache.lookups, self.cache.hits = before.lookups, before.hits
        self._proof = IdleProof(self.llm.engine, self._report)
        with self.queue.changed:
            if self.state != "stopping":
                self.state = "ok"
        log.warning("the device is open again")
