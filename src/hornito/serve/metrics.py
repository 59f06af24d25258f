"""Figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from hornito.serve.scheduler import Scheduler
    from hornito.serve.work import Job

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_EACH = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class _CacheCollector(Collector):
    """Counts that the prefix cache keeps itself."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        """The counts of now."""
        cache = self._scheduler.cache
        for name, text, count in (
            ("lookups", "Prompts that came", cache.lookups),
            ("hits", "Prompts that started from kept tokens", cache.hits),
        ):
            yield CounterMetricFamily(f"hornito_prefix_cache_{name}", text, value=count)


class Metrics:
    """What the scheduler has done, and what it does now; its `Watch`."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"hornito_{name}", text, labels, registry=registry)

        self._answers = counter("answers", "Answers that ended, by how", ("outcome",))
        self._prompt = counter("prompt_tokens", "Tokens of prompts")
        self._cached = counter("cached_tokens", "Tokens of prompts that needed no evaluation")
        self._generated = counter("generated_tokens", "Tokens of answers")
        self._first = Histogram(
            "hornito_time_to_first_token_seconds",
            "From a request to its first token",
            buckets=_FIRST,
            registry=registry,
        )
        self._each = Histogram(
            "hornito_time_per_output_token_seconds",
            "Mean time of an answer's tokens behind the first",
            buckets=_EACH,
            registry=registry,
        )

    def follow(self, scheduler: Scheduler) -> None:
        """Show the state of a scheduler from now on."""

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"hornito_{name}", text, labels, registry=self.registry)

        def memory(name: str) -> float:
            return float(getattr(scheduler.llm.engine.memory, name))

        gauge("queue_length", "Answers that wait").set_function(lambda: len(scheduler.queue))
        gauge("answers_running", "Answers that have a slot").set_function(lambda: scheduler.running)
        gauge("up", "Whether requests are answered").set_function(
            lambda: float(scheduler.state == "ok")
        )
        gauge("unproven_kernels", "Kernels that wait for their test, unused").set_function(
            lambda: len(scheduler.llm.engine.trust.waiting)
        )
        gauge("unproven_shapes", "Shapes that kernels were not tested at yet").set_function(
            lambda: len(scheduler.llm.engine.trust.unproven)
        )
        self.registry.register(_CacheCollector(scheduler))
        planned = gauge("device_memory_bytes", "Device memory by purpose", ("purpose",))
        for purpose in ("weights", "kv", "activations", "state", "readback"):
            planned.labels(purpose).set_function(partial(memory, purpose))
        gauge("device_memory_allocated_bytes", "Device memory that is held").set_function(
            lambda: scheduler.llm.engine.device.allocated_bytes
        )
        gauge("kv_used_bytes", "Bytes of KV blocks in use, kept prefixes included").set_function(
            lambda: sum(pool.used * pool.kind.block_bytes for pool in scheduler.llm.engine.pools)
        )

    def first_token(self, seconds: float) -> None:
        """An answer's first token came so long after its request."""
        self._first.observe(seconds)

    def finished(self, outcome: str, job: Job) -> None:
        """An answer ended: with a finish reason, `cancelled` or `failed`."""
        self._answers.labels(outcome).inc()
        tokens = job.answer.count if job.answer is not None else 0
        self._prompt.inc(job.evaluated)
        self._cached.inc(job.cached)
        self._generated.inc(tokens)
        if tokens > 1:
            self._each.observe((job.last_token - job.first_token) / (tokens - 1))

    def embedded(self, tokens: int) -> None:
        """A request for embeddings was answered."""
        self._answers.labels("embedded").inc()
        self._prompt.inc(tokens)

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)
