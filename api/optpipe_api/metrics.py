"""What Prometheus may ask for at ``/metrics``, as `docs/service.md` lists it.

The registry is the application's own.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from optpipe.wire import JobState
from optpipe_api.engine.engine import EngineObserver
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.services.events import Purpose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from optpipe_api.jobs import JobRecord
    from optpipe_api.services.events import ConnectionLimit

__all__ = ["CONTENT_TYPE", "ServiceMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LONG_S = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_REQUEST_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60)
_STALL_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_GAPS = (0.000001, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_PROBE_S = 0.05


class ServiceMetrics(EngineObserver):
    """Counts what happens. Safe from every thread."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._accepted = Counter(
            "optpipe_jobs_accepted", "Submissions, by cache.", ["cache"], registry=registry
        )
        self._ended = Counter(
            "optpipe_jobs_ended", "Attempts, by state after.", ["state"], registry=registry
        )
        self._waits = Histogram(
            "optpipe_queue_wait_seconds",
            "From submission to the first attempt.",
            buckets=_LONG_S,
            registry=registry,
        )
        self._solves = Histogram(
            "optpipe_solve_seconds", "Of one attempt.", buckets=_LONG_S, registry=registry
        )
        self._gaps = Histogram(
            "optpipe_gap_ratio", "Of jobs that succeeded.", buckets=_GAPS, registry=registry
        )
        self._followers = Gauge(
            "optpipe_followers", "Streams and waiting requests.", ["kind"], registry=registry
        )
        self._requests = Counter(
            "optpipe_http_requests",
            "Requests, by route.",
            ["method", "route", "status"],
            registry=registry,
        )
        self._durations = Histogram(
            "optpipe_http_request_seconds",
            "Until the last byte.",
            ["method", "route"],
            buckets=_REQUEST_S,
            registry=registry,
        )
        self._of_requests: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._stalls = Histogram(
            "optpipe_event_loop_stall_seconds",
            "How late the event loop was.",
            buckets=_STALL_S,
            registry=registry,
        )
        self._worst_stall = Gauge(
            "optpipe_event_loop_worst_stall_seconds", "Since the start.", registry=registry
        )
        self._worst_s = 0.0

    def watch_store(self, counts: Callable[[], Mapping[JobState, int]]) -> None:
        """Ask the store for the number of jobs in each state at every scrape."""
        self._registry.register(_StoreCollector(counts))

    def watch_connections(self, connections: ConnectionLimit) -> None:
        """Look at every scrape how many event streams and waiting requests are open."""
        for purpose in Purpose:
            count = partial(connections.num_open, purpose)
            self._followers.labels(purpose.value).set_function(count)

    def accepted(self, job: JobRecord) -> None:
        self._accepted.labels(job.cache.value).inc()

    def started(self, job: JobRecord) -> None:
        """Measure how long a job waited for its first attempt."""
        if job.attempt == 1 and job.started_at is not None:
            self._waits.observe(max(0.0, job.started_at - job.created_at))

    def ended(self, job: JobRecord, seconds: float) -> None:
        self._ended.labels(job.state.value).inc()
        self._solves.observe(seconds)
        if job.state is JobState.SUCCEEDED and job.gap is not None:
            self._gaps.observe(job.gap)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Measure a request; ``route`` is a template, never a path."""
        count, duration = self._labelled(method, route, status)
        count.inc()
        duration.observe(seconds)

    def _labelled(self, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
        """Return the two metrics of such a request, looked up once: there are a few hundred."""
        key = (method, route, status)
        found = self._of_requests.get(key)
        if found is None:
            count = self._requests.labels(method, route, str(status))
            found = self._of_requests[key] = (count, self._durations.labels(method, route))
        return found

    async def watch_loop(self) -> None:
        """Measure how late this event loop is, until cancelled."""
        while True:
            due = time.perf_counter() + _PROBE_S
            await asyncio.sleep(_PROBE_S)
            self._stalled(max(0.0, time.perf_counter() - due))

    def text(self) -> bytes:
        """Return everything, as Prometheus reads it; asks the store: for threads."""
        return generate_latest(self._registry)

    def _stalled(self, seconds: float) -> None:
        self._stalls.observe(seconds)
        if seconds > self._worst_s:
            self._worst_s = seconds
            self._worst_stall.set(seconds)


class _StoreCollector:
    """Jobs by state, counted where they are; a store that does not answer is a number too."""

    def __init__(self, counts: Callable[[], Mapping[JobState, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("optpipe_store_up", "Whether the database answers.")
        try:
            counts = self._counts()
        except StoreUnavailableError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        states = GaugeMetricFamily("optpipe_jobs", "Jobs, by state.", labels=["state"])
        for state, count in counts.items():
            states.add_metric([state.value], count)
        yield states

    def describe(self) -> Iterator[Metric]:
        """Nothing: to be registered must not ask the store."""
        yield from ()
