"""The scheduler: a thread that answers the requests of many clients with one model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

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
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._loss: tuple[Rounds, DeviceLostError] | None = None  # that others have noticed
        self._over = False  # nobody takes calls any more
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
        done: Future[T] = Future()
        with self.queue.changed:
            if self._over:
                raise UnavailableError(self._why())
            self._calls.append((done, action))
            self.queue.changed.notify_all()
        return done.result()

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
        self.llm.close()  # of a thread that failed

    def _report(self, error: DeviceLostError) -> None:
        """Have the thread find out that the device is gone, unless it does so before."""
        with self.queue.changed:
            self._loss = (self._rounds, error)
            self.queue.changed.notify_all()

    def _why(self) -> str:
        if self.state != "device lost":
            return f"the server is {'stopping' if self.state == 'stopping' else 'broken'}"
        return "the device was lost, and the model is being put on it again; try again later"

    # -- the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._serve()
            self._end()
        except BaseException:
            # Nobody answers any more, and /health must say so.
            with self.queue.changed:
                self.state = "failed"
            raise
        finally:
            self._abandon()
            self._proof.close()

    def _serve(self) -> None:
        while self.state != "stopping":
            with self.queue.changed:
                waiting = self._calls or self._loss or self.state == "stopping"
                if self._rounds.idle and not waiting:
                    self._proof.resume()
                    self.queue.changed.wait()
                calls, self._calls = self._calls, []
                loss, self._loss = self._loss, None
            self._proof.pause()
            if loss is not None and loss[0] is self._rounds:
                self._lose(loss[1])
            _answer(calls)
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

    def _end(self) -> None:
        self._proof.close()
        stopping = UnavailableError(self._why())
        self._rounds.fail_all(stopping)
        self._fail(self.queue.drop(lambda job: True), stopping)
        with self.queue.changed:
            self._over = True
            calls, self._calls = self._calls, []
        _answer(calls)
        self._rounds.close()
        self.llm.close()

    def _abandon(self) -> None:
        """Whatever ended the thread, nobody waits for it any more."""
        error = UnavailableError(self._why())
        with self.queue.changed:
            self._over = True
            calls, self._calls = self._calls, []
        self._fail([*self._rounds.running, *self.queue.drop(lambda job: True)], error)
        self._rounds.running.clear()
        for done, _ in calls:
            done.set_exception(error)

    def _fail(self, jobs: Sequence[Job], error: HornitoError) -> None:
        for job in jobs:
            try:
                self._watch.finished("failed", job)
                job.tell(error)
            except Exception:
                log.exception("a request could not be told that it failed")

    def _lose(self, error: DeviceLostError) -> None:
        """The device is gone: say so to everyone, then open it again, however long that takes."""
        # What follows is advice for those who would have to open it again by themselves.
        log.error("%s", str(error).partition(";")[0])
        with self.queue.changed:
            if self.state == "stopping":
                return
            self.state = "device lost"
        self._proof.close()
        self._rounds.fail_all(error)
        self._fail(self.queue.drop(lambda job: True), error)
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
            except Exception:
                log.exception("the device can't be opened again yet")
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


def _answer(calls: Sequence[tuple[Future[Any], Callable[[], Any]]]) -> None:
    """Run what others wait for; what an action raises is theirs."""
    for done, action in calls:
        try:
            done.set_result(action())
        except BaseException as error:
            done.set_exception(error)
