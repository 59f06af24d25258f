"""What the scheduler is asked for, and what it says back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hornito.answer import Answer
from hornito.errors import HornitoError
from hornito.runtime.results import Chunk, TokenLogprob
from hornito.runtime.sampler import Sampler, SamplingParams
from hornito.runtime.session import Session
from hornito.runtime.snapshot import Snapshot
from hornito.structured.formats import ResponseFormat


class BusyError(HornitoError):
    """The queue of requests is full."""


class UnavailableError(HornitoError):
    """The model can't answer now: it is being loaded again, or the server is stopping."""


@dataclass(frozen=True, slots=True)
class Work:
    """One answer that is wanted.

    Attributes:
        ids: the prompt.
        params: how tokens are chosen.
        max_tokens: new tokens at most; 0 only with `scores`.
        stop: strings that end it.
        ignore_eos: go on past end tokens.
        continuation: as for `hornito.answer.Answer`.
        form: what form it has; one that `LLM.grammars` can start.
        scores: log-probabilities of the prompt's tokens are wanted, with so many most likely ones.
    """

    ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    continuation: bool = True
    form: ResponseFormat | None = None
    scores: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt has been evaluated; `cached_tokens` of it were held already."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of the prompt's tokens but the first, part by part."""

    places: list[TokenLogprob]


Event = Started | Scores | Chunk | HornitoError
"""An answer is `Started`, then chunks of which the last has a finish reason; or an error ends it.
Scores come before `Started`."""

Deliver = Callable[[int, Event], None]

_numbers = itertools.count()


@dataclass(eq=False, slots=True)
class Group:
    """The answers of one request.

    Attributes:
        owner: requests of one owner share a turn.
        snapshot: the prompt that several of its answers begin with.
        cancelled: nobody listens any more.
    """

    deliver: Deliver
    owner: object
    jobs: list[Job] = field(default_factory=list)
    snapshot: Snapshot | None = None
    cancelled: bool = False
    number: int = field(default_factory=lambda: next(_numbers))


@dataclass(eq=False, slots=True)
class Job:
    """One answer on its way.

    Attributes:
        evaluated: tokens of the prompt that are in the session.
        cached: how many of them were held already.
        first_token, last_token: when the first and the newest token came, by `time.monotonic`.
        error: why it can't go on.
    """

    group: Group
    index: int
    work: Work
    queued: float = field(default_factory=time.monotonic)
    session: Session | None = None
    sampler: Sampler | None = None
    answer: Answer | None = None
    evaluated: int = 0
    cached: int = 0
    first_token: float = 0.0
    last_token: float = 0.0
    error: HornitoError | None = None

    def tell(self, event: Event) -> None:
        """Say something to whoever asked."""
        if not self.group.cancelled:
            self.group.deliver(self.index, event)

    @property
    def prompt_left(self) -> int:
        """Tokens of the prompt that are still to be evaluated."""
        return len(self.work.ids) - self.evaluated


class Queue:
    """Jobs that wait for a slot, in a fair order; safe between threads.

    The next job is of the owner that has fewest running, and of that owner's oldest request: a
    request of a hundred prompts does not hold up a small one.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.changed = threading.Condition()
        self._waiting: list[Job] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, jobs: Sequence[Job]) -> None:
        """Append the jobs of a request.

        Raises:
            BusyError: as many as may wait do.
        """
        with self.changed:
            if len(self._waiting) >= self.limit:
                raise BusyError(
                    f"{len(self._waiting)} answers are waiting, which is as many as may; try again "
                    "later"
                )
            self._waiting += jobs
            self.changed.notify_all()

    def take(self, running: Sequence[Job]) -> Job | None:
        """The next job whose turn it is; None when none can begin."""
        with self.changed:
            ready = [job for job in self._waiting if not _follows(job, running)]
            if not ready:
                return None
            owners = [job.group.owner for job in running]
            job = min(ready, key=lambda job: (owners.count(job.group.owner), job.group.number))
            self._waiting.remove(job)
            return job

    def drop(self, unwanted: Callable[[Job], bool]) -> list[Job]:
        """Remove jobs and return them."""
        with self.changed:
            dropped = [job for job in self._waiting if unwanted(job)]
            self._waiting = [job for job in self._waiting if not unwanted(job)]
            return dropped

    def siblings(self, job: Job) -> list[Job]:
        """Waiting answers to the same prompt of the same request."""
        with self.changed:
            return [
                other
                for other in self._waiting
                if other.group is job.group and other.work.ids == job.work.ids
            ]


def _follows(job: Job, running: Sequence[Job]) -> bool:
    """Whether a job had better wait until another of its request has evaluated their prompt."""
    return any(
        other.group is job.group and other.prompt_left and other.work.ids == job.work.ids
        for other in running
    )
