"""The work of the scheduler on one loaded model, round by round; all of it in one thread."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from hornito.answer import Answer
from hornito.errors import DeviceLostError, DeviceMemoryError, HornitoError
from hornito.runtime.decode import DecodeRun
from hornito.runtime.prompt_scores import score_rows
from hornito.runtime.results import Timings
from hornito.runtime.sampler import Sampler
from hornito.serve.prefix_cache import PrefixCache
from hornito.serve.work import Job, Queue, Scores, Started

if TYPE_CHECKING:
    from hornito.api import LLM
    from hornito.runtime.emitted import Record
    from hornito.runtime.session import Session

log = logging.getLogger("hornito")

CHUNK_SECONDS = 0.25
"""Time that a chunk of a prompt may take while answers are being made."""

STEPS_SECONDS = 0.05
"""Time that the steps of a submission may take: for so long nobody comes in or goes."""

CROWDED = 4
"""Part of these steps that is made while prompts wait behind them."""


class Watch(Protocol):
    """What is told about the work, for metrics."""

    def first_token(self, seconds: float) -> None:
        """An answer's first token came so long after its request."""

    def finished(self, outcome: str, job: Job) -> None:
        """An answer ended: with a finish reason, `cancelled` or `failed`."""


class NoWatch:
    """Looks at nothing."""

    def first_token(self, seconds: float) -> None:
        """Ignored."""

    def finished(self, outcome: str, job: Job) -> None:
        """Ignored."""


class Rounds:
    """Answers that share an engine.

    In each round, one submission of decode steps carries a row for every answer that is being made,
    and one chunk of one prompt is evaluated behind it. So long prompts do not hold up streams, nor
    streams prompts. What a request fails of ends that request alone.

    Attributes:
        running: answers that have a slot; the first is the next whose prompt goes on.
        cache: what later prompts start from.
    """

    def __init__(self, llm: LLM, queue: Queue, cache: PrefixCache, watch: Watch) -> None:
        self.llm = llm
        self.cache = cache
        self.running: list[Job] = []
        self._queue = queue
        self._watch = watch
        self._run: DecodeRun | None = None
        self._rows: list[Job] = []  # of the run
        self._changed = False  # answers came or went: the run has to be made anew
        self._row_seconds = 0.0  # of a row of a chunk, as measured
        self._step_seconds = 0.0  # of a step, when no chunk came between
        self._received = 0.0  # when the newest steps did, unless a chunk has come since
        self._ahead = 1 if llm.device_kind == "software" else 2
        buckets = llm.engine.plan.buckets
        self._most = min(
            llm.engine.options.slots, max(rows for kind, rows in buckets if kind == "batch")
        )

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self.running and not len(self._queue)

    def round(self) -> None:
        """Begin what can begin; a submission of steps, a chunk of a prompt, what came of both.

        Raises:
            DeviceLostError: the device is gone; so are all sessions.
        """
        self._drop_cancelled()
        self._admit()
        self._submit_steps()
        self._prefill()
        self._take_steps()

    def fail_all(self, error: HornitoError) -> None:
        """End every answer that runs, on whatever is left of the device, and keep nothing of it.

        This raises nothing: what goes wrong with one answer goes to the log, and on to the next.
        """
        try:
            self._end_run()
        except Exception:
            log.exception("the steps in flight could not be ended")
        for job in list(self.running):
            outcome = _outcome(job) or "failed"
            try:
                if outcome == "failed":
                    self._fail(job, job.error or error)
                else:
                    self._retire(job, outcome)
            except Exception:
                log.exception("an answer could not be ended")

    def close(self) -> None:
        """End the run and forget what was kept."""
        self._stop_run()
        self.cache.clear()

    # -- coming and going ---------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        for job in self._queue.drop(lambda job: job.group.cancelled):
            self._watch.finished("cancelled", job)
            self._leave_group(job)
        for job in [job for job in self.running if job.group.cancelled]:
            if job in self._rows:
                self._changed = True  # its session closes when what is in flight has come back
            else:
                self._finish(job, "cancelled")

    def _admit(self) -> None:
        while len(self.running) < self._most and self.llm.engine.free_slots:
            job = self._queue.take(self.running)
            if job is None:
                return
            work = job.work
            self.running.append(job)
            try:
                job.session = self.llm.session()
                constraint = None if work.form is None else self.llm.grammars.start(work.form)
                job.sampler = Sampler.start(work.params, len(work.ids), constraint)
                if work.scores is None:
                    job.cached = job.evaluated = self.cache.start(job.session, work.ids)
            except DeviceLostError:
                raise
            except Exception as error:
                self._fail(job, _hornito_error(error))

    def _finish(self, job: Job, outcome: str) -> None:
        """Keep what an answer evaluated, and give its slot back."""
        self.cache.keep(_session(job))
        self._retire(job, outcome)

    def _retire(self, job: Job, outcome: str) -> None:
        """Give the slot of an answer back."""
        self.running.remove(job)
        if job.session is not None:
            job.session.close()
        self._watch.finished(outcome, job)
        self._leave_group(job)

    def _leave_group(self, job: Job) -> None:
        group = job.group
        group.jobs.remove(job)
        if group.snapshot is not None and not any(other.session is None for other in group.jobs):
            group.snapshot.release()
            group.snapshot = None

    def _fail(self, job: Job, error: HornitoError) -> None:
        try:
            self._retire(job, "failed")
        finally:
            job.tell(error)

    # -- prompts ------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Evaluate a chunk of the prompt whose turn it is, and of others while there is time."""
        began, rows = time.monotonic(), 0
        for job in [job for job in self.running if job.answer is None]:
            size = self._chunk_size(job)
            if rows and (rows + size > self._most_rows or time.monotonic() - began > CHUNK_SECONDS):
                return
            rows += size
            self._received = 0.0
            # The next prompt has the next turn.
            self.running.remove(job)
            self.running.append(job)
            self._prefill_one(job, size)

    def _prefill_one(self, job: Job, size: int) -> None:
        began = time.monotonic()
        try:
            self._evaluate(job, size)
            if size >= self._least_rows:
                self._row_seconds = (time.monotonic() - began) / size
            if not job.prompt_left:
                self._begin_answer(job)
        except DeviceLostError:
            raise
        except Exception as error:
            self._fail(job, _hornito_error(error))

    @property
    def _chunks(self) -> list[int]:
        return sorted(r for kind, r in self.llm.engine.plan.buckets if kind == "chunk") or [1]

    @property
    def _least_rows(self) -> int:
        return self._chunks[0]

    @property
    def _most_rows(self) -> int:
        return self._chunks[-1]

    def _chunk_size(self, job: Job) -> int:
        """Tokens of the next call: as many as time allows, up to a multiple of the largest bucket.

        While answers are made that is at most one call's; otherwise calls follow each other without
        a pause.
        """
        most = unit = self._most_rows
        if self._rows:
            seconds = self._row_seconds or CHUNK_SECONDS
            allowed = [rows for rows in self._chunks if rows * seconds <= CHUNK_SECONDS]
            most = unit = max([self._least_rows, *allowed])
        elif self._row_seconds and job.work.scores is None:
            most *= max(1, int(CHUNK_SECONDS / (self._row_seconds * most)))
        left = job.prompt_left
        if job.work.scores is not None and left > 1:
            left -= 1  # the last token has no following one
        return min(left, most - _session(job).position % unit)

    def _evaluate(self, job: Job, size: int) -> None:
        session, work, at = job.session, job.work, job.evaluated
        assert session is not None
        ids = work.ids[at : at + size]
        last = size == job.prompt_left
        if work.scores is not None and not last:
            places = score_rows(session, ids, work.ids[at + 1 : at + size + 1], top=work.scores)
            job.tell(Scores(places))
        elif work.max_tokens:
            session.prefill(ids, sampler=job.sampler if last else None)
        job.evaluated += size

    def _begin_answer(self, job: Job) -> None:
        """The prompt is evaluated, and its last row has chosen the first token."""
        work, session = job.work, job.session
        assert session is not None
        job.answer = Answer(
            self.llm.tokenizer if self.llm.has_tokenizer else None,
            max_tokens=work.max_tokens,
            stop=work.stop,
            ends=() if work.ignore_eos else self.llm.engine.eos_ids,
            continuation=work.continuation,
            sampler=job.sampler,
        )
        if self.cache.keeps_prompts:
            self.cache.keep(session)
        if job.group.snapshot is None and self._queue.siblings(job):
            job.group.snapshot = session.snapshot()
        job.tell(Started(job.cached))
        if work.max_tokens:
            assert session.record is not None
            self._take(job, [session.record])
        else:
            job.first_token = job.last_token = time.monotonic()
            job.answer.end("length")
            self._say_end(job)
        if job.answer.ended():
            self._finish(job, job.answer.reason or "length")
        else:
            self._changed = True

    # -- steps --------------------------------------------------------------------------------

    def _submit_steps(self) -> None:
        """Keep the device busy with steps, unless the answers of the run are about to change."""
        if self._run is None:
            self._begin_run()
        run = self._run
        if run is None or self._changed or run.arrived:
            return
        prompts = any(job.answer is None for job in self.running)
        steps = self.llm.steps_per_submission
        if self._step_seconds:
            steps = min(steps, int(STEPS_SECONDS / self._step_seconds))
        steps = max(1, steps // (CROWDED if prompts else 1))
        ahead = 1 if prompts else self._ahead
        while run.ahead < ahead and run.left and self._reserve(run, steps):
            run.submit(steps)

    def _begin_run(self) -> None:
        rows = [job for job in self.running if job.answer is not None and not job.group.cancelled]
        self._changed = False
        if not rows:
            return
        self._run = DecodeRun(
            [_session(job) for job in rows],
            [job.work.max_tokens - _answer(job).count for job in rows],
            ignore_eos=[job.work.ignore_eos for job in rows],
            steps=self.llm.steps_per_submission,
            samplers=[job.sampler for job in rows],
        )
        self._rows = rows

    def _reserve(self, run: DecodeRun, steps: int) -> bool:
        """Have the KV blocks of the next submission ready.

        Where there are too few, the answer that began last gives up its own, and fails.
        """
        try:
            for index, job in enumerate(self._rows):
                _session(job).reserve(run.next_end(index, steps))
        except DeviceMemoryError as error:
            going = [job for job in self._rows if not _answer(job).ended()]
            max(going, key=lambda job: (job.group.number, job.index)).error = error
            self._changed = True
        return not self._changed

    def _take_steps(self) -> None:
        """Read the oldest submission, and make way when answers came or went."""
        run = self._run
        if run is None:
            return
        records = run.receive()
        self._note_speed(max(map(len, records or ()), default=0))
        for index, (job, new) in enumerate(zip(self._rows, records or (), strict=False)):
            job.error = job.error or run.errors[index]
            if new and not _answer(job).ended():
                try:
                    self._take(job, new)
                except Exception as error:
                    job.error = _hornito_error(error)
            if job.error is not None or _answer(job).ended():
                self._changed = True
        if records is None and not self._changed:
            self._end_all()
        if (self._changed and not run.ahead and not run.arrived) or records is None:
            self._stop_run()

    def _end_all(self) -> None:
        """The device has no step left for any row of the run: limits, or the context's end."""
        for job in self._rows:
            answer = _answer(job)
            if not answer.ended() and not job.group.cancelled:
                answer.end("length")
                self._say_end(job)

    def _note_speed(self, steps: int) -> None:
        """Measure a step, by the time since the steps before came."""
        now = time.monotonic()
        if steps and self._received:
            self._step_seconds = (now - self._received) / steps
        self._received = now if steps else 0.0

    def _take(self, job: Job, records: list[Record]) -> None:
        """Hand out the text of new tokens; the last piece of an answer follows at once."""
        answer, now = _answer(job), time.monotonic()
        if not job.first_token:
            job.first_token = now
            self._watch.first_token(now - job.queued)
        job.last_token = now
        piece = answer.take(records)
        if not answer.ended() and _session(job).position >= self.llm.engine.context:
            answer.end("length")
        job.tell(piece)
        if answer.ended():
            self._say_end(job)

    def _say_end(self, job: Job) -> None:
        """Hand out what an ended answer held back, and its reason."""
        job.tell(
            _answer(job).last(
                Timings(
                    len(job.work.ids),
                    job.first_token - job.queued,
                    max(_answer(job).count - 1, 0),
                    job.last_token - job.first_token,
                    job.cached,
                )
            )
        )

    def _stop_run(self) -> None:
        """End the run, and the answers of it that are complete or can't go on."""
        for job in self._end_run():
            outcome = _outcome(job)
            if job.error is not None:
                self._fail(job, job.error)
            elif outcome is not None:
                self._finish(job, outcome)

    def _end_run(self) -> list[Job]:
        """Have nothing in flight, and no run; returns the answers that it was of."""
        run, rows = self._run, self._rows
        self._run, self._rows, self._changed = None, [], False
        if run is not None:
            # Of a lost device there is nothing to wait for; the next round says that it is gone.
            with suppress(DeviceLostError):
                run.stop()
        return rows


def _outcome(job: Job) -> str | None:
    """How an answer ended; None for one that goes on."""
    if job.error is not None:
        return "failed"
    if job.group.cancelled:
        return "cancelled"
    return None if job.answer is None else job.answer.reason


def _hornito_error(error: Exception) -> HornitoError:
    """An error of one request; what nobody expected goes to the log, and its name to the client."""
    if isinstance(error, HornitoError):
        return error
    log.error("a request failed", exc_info=error)
    return HornitoError(f"internal error: {type(error).__name__}")


def _session(job: Job) -> Session:
    assert job.session is not None
    return job.session


def _answer(job: Job) -> Answer:
    assert job.answer is not None
    return job.answer
