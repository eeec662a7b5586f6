"""Log lines, metrics for Prometheus at ``/metrics``, and traces for OpenTelemetry.

A line is a sentence plus a stable ``action``; lines are set up by `serve`, never at import. The
registry of metrics, which `docs/service.md` lists, is the application's own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import re
import sys
import threading
import time
import uuid
from functools import partial
from logging.handlers import QueueHandler, QueueListener
from typing import TYPE_CHECKING, TextIO

import structlog
from opentelemetry.trace import get_current_span
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.datastructures import Headers, MutableHeaders

from optpipe.answers import JobState
from optpipe.errors import InputError, MissingExtraError, install_command
from optpipe_api.engine.engine import EngineObserver
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.services.events import Purpose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from opentelemetry.sdk.trace import TracerProvider
    from prometheus_client.metrics_core import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from structlog.typing import Processor

    from optpipe_api.jobs import JobRecord
    from optpipe_api.services.events import ConnectionLimit

__all__ = [
    "CONTENT_TYPE",
    "UNTRACED",
    "LogQueue",
    "ServiceMetrics",
    "Telemetry",
    "close_tracer_provider",
    "open_tracer_provider",
    "set_up_logs",
]


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LONG_S = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_REQUEST_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60)
_STALL_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_GAPS = (0.000001, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_PROBE_S = 0.05


class ServiceMetrics(EngineObserver):
    """Counts and measures jobs, requests and the event loop. Thread-safe."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        routed = ["method", "route"]
        self._accepted = counter("optpipe_jobs_accepted", "Submissions, by cache.", ["cache"])
        self._ended = counter("optpipe_jobs_ended", "Attempts, by state after.", ["state"])
        self._requests = counter("optpipe_http_requests", "By route.", [*routed, "status"])
        self._followers = gauge("optpipe_followers", "Streams and waiting requests.", ["kind"])
        self._waits = histogram(
            "optpipe_queue_wait_seconds", "Until the first attempt.", buckets=_LONG_S
        )
        self._solves = histogram("optpipe_solve_seconds", "Of an attempt.", buckets=_LONG_S)
        self._gaps = histogram("optpipe_gap_ratio", "Of jobs that succeeded.", buckets=_GAPS)
        self._durations = histogram(
            "optpipe_http_request_seconds", "Until the last byte.", routed, buckets=_REQUEST_S
        )
        self._stalls = histogram(
            "optpipe_event_loop_stall_seconds", "How late the event loop was.", buckets=_STALL_S
        )
        self._worst_stall = gauge("optpipe_event_loop_worst_stall_seconds", "Since the start.")
        self._worst_s = 0.0

    def watch_store(self, counts: Callable[[], Mapping[JobState, int]]) -> None:
        """Read the number of jobs in each state from the store at every scrape."""
        self._registry.register(_StoreCollector(counts))

    def watch_connections(self, connections: ConnectionLimit) -> None:
        """Count the open event streams and waiting requests at every scrape."""
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
        self._requests.labels(method, route, str(status)).inc()
        self._durations.labels(method, route).observe(seconds)

    async def watch_loop(self) -> None:
        """Measure how late this event loop is, until cancelled."""
        while True:
            due = time.perf_counter() + _PROBE_S
            await asyncio.sleep(_PROBE_S)
            seconds = max(0.0, time.perf_counter() - due)
            self._stalls.observe(seconds)
            self._worst_s = max(seconds, self._worst_s)
            self._worst_stall.set(self._worst_s)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's format; queries the store, so use a thread."""
        return generate_latest(self._registry)


class _StoreCollector:
    """Counts jobs by state in the store, and reports whether the store answers."""

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
        """Yield nothing, so that the registration does not query the store."""
        yield from ()


def set_up_logs(form: str) -> LogQueue:
    """Write logs to stderr, as text for people or one JSON object per line for machines.

    Close the returned queue before the end of the process. Warnings of libraries go the same way.
    """
    lines = LogQueue(sys.stderr)
    # The default exception formatter draws every local variable: seconds of work on the event loop.
    renderer: Processor = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "json":
        renderer = structlog.processors.JSONRenderer()
        # Locals may hold keys and whole request bodies.
        without_locals = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        common.append(structlog.processors.ExceptionRenderer(without_locals))
    # This logger is not in the tree of loggers, so no other handlers or levels affect it.
    logger = logging.Logger("optpipe_api")  # noqa: LOG001
    logger.addHandler(lines.handler())
    structlog.configure(
        processors=[*common, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: logger,
    )
    foreign = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=common,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    logging.lastResort = lines.handler(logging.WARNING, foreign)
    return lines


# --- A thread writes the lines, so that no request waits for the log.
# The reader of the log (another program, a stopped terminal) may stop reading. A pipe then takes
# 64 KiB more, and a server that wrote to it itself would stop at the next line.

_MAX_LINES = 10_000
_PATIENCE_S = 2.0


class LogQueue(QueueListener):
    """A bounded queue of log lines and the thread that writes them to a stream, in order.

    While the stream blocks, the last lines beyond ``max_lines`` are lost. The log reports their
    number when it continues. Once closed, the queue is bypassed.

    ``stream``: the target of the lines. If it is broken, lines are dropped, and the service
    continues.
    """

    def __init__(self, stream: TextIO, max_lines: int = _MAX_LINES) -> None:
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(max_lines)
        super().__init__(self._lines, _StreamWriter(stream))
        self.num_lost = 0
        self.is_closed = False
        self.start()

    def handler(
        self, level: int = logging.NOTSET, formatter: logging.Formatter | None = None
    ) -> logging.Handler:
        """Return a handler that puts lines into the queue."""
        handler = _BoundedHandler(self)
        handler.setLevel(level)
        handler.setFormatter(formatter)
        return handler

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Wait until all lines are written, at most ``patience_s``."""
        if not self.is_closed:
            self.is_closed = True
            # The stream may take nothing, and must not hold up the end of the process.
            end = threading.Thread(target=self.stop, daemon=True)
            end.start()
            end.join(patience_s)

    def enqueue_sentinel(self) -> None:
        self._lines.put(self._sentinel)  # type: ignore[attr-defined]

    def handle(self, record: logging.LogRecord) -> None:
        super().handle(record)
        if self.num_lost and self._lines.qsize() <= self._lines.maxsize // 2:
            num_lost, self.num_lost = self.num_lost, 0
            structlog.get_logger(__name__).warning(
                "lines of this log were lost: they came faster than they could be written",
                action="log.lost",
                lines=num_lost,
            )


class _BoundedHandler(QueueHandler):
    """Puts lines into the queue, or counts them."""

    def __init__(self, lines: LogQueue) -> None:
        super().__init__(lines.queue)
        self._log_queue = lines

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._log_queue.is_closed:
            self._log_queue.handle(record)
            return
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._log_queue.num_lost += 1


class _StreamWriter(logging.Handler):
    """Writes to the file of a stream, if it has one.

    A thread that hangs inside the stream itself would hold the stream's lock. The interpreter
    flushes the stream at its end, and would abort. The lock of a handler has the same effect.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        try:
            self._file: int | None = stream.fileno()
        except (AttributeError, OSError, ValueError):
            self._file = None

    def createLock(self) -> None:  # noqa: N802 - the name is logging's
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        # Since Python 3.13 the handler of the standard library needs its lock.
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.getMessage()}\n"
        try:
            if self._file is None:
                self._stream.write(text)
                self._stream.flush()
                return
            data = text.encode(errors="backslashreplace")
            while data:
                data = data[os.write(self._file, data) :]
        except (OSError, ValueError):
            # The file is closed, or has no reader left.
            return


# --- Every request has an id and is measured. Changes and refusals are logged.

_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_NO_ROUTE = "none"
_FIRST_REFUSAL = 400
_ABORTED = 499


class Telemetry:
    """The outermost middleware: identifies, measures and logs requests.

    The id is the client's ``X-Request-ID`` if that is a short word.
    The answer has the id as ``X-Request-ID``, and every log line about the request contains it. If
    the request is traced, the lines name its trace too.
    """

    def __init__(self, app: ASGIApp, *, metrics: ServiceMetrics, is_traced: bool = False) -> None:
        self._app = app
        self._metrics = metrics
        self._is_traced = is_traced

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _id_of(scope)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request=request_id)
        if self._is_traced:
            trace_id = get_current_span().get_span_context().trace_id
            structlog.contextvars.bind_contextvars(trace=f"{trace_id:032x}")
        status, location = _ABORTED, ""

        async def note_answer(message: Message) -> None:
            nonlocal status, location
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=[*message.get("headers", ())])
                location = headers.get("location", "")
                headers["x-request-id"] = request_id
                message = {**message, "headers": headers.raw}
            await send(message)

        began = time.perf_counter()
        try:
            await self._app(scope, receive, note_answer)
        finally:
            seconds = time.perf_counter() - began
            method = scope["method"] if scope["method"] in _METHODS else "OTHER"
            self._metrics.answered(method, _route_of(scope), status, seconds)
            if method not in _READS or status >= _FIRST_REFUSAL:
                structlog.get_logger(__name__).info(
                    f"{method} {scope['path'][:200]!r} was answered with {status}",
                    action="http.request",
                    status=status,
                    ms=round(seconds * 1000, 1),
                    **({"made": location} if location else {}),
                )


def _id_of(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex


def _route_of(scope: Scope) -> str:
    """Return the template of the route; paths contain ids, so their number has no limit."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else _NO_ROUTE


# --- OpenTelemetry: FastAPI makes a span of each request, if the standard variables ask for it.

UNTRACED = frozenset({"/healthz", "/readyz", "/metrics"})


def open_tracer_provider() -> TracerProvider | None:
    """Return the tracer provider that OpenTelemetry's variables configure, or None.

    They configure one with ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``
    or ``OTEL_TRACES_EXPORTER=otlp``. Without them, neither SDK nor exporter is imported.

    Raises `InputError` for another exporter or protocol than OTLP over HTTP, and
    `MissingExtraError` if a package is not installed.
    """

    def read(name: str) -> str:
        return os.environ.get(f"OTEL_{name}", "").strip()

    endpoint = read("EXPORTER_OTLP_TRACES_ENDPOINT") or read("EXPORTER_OTLP_ENDPOINT")
    exporter = read("TRACES_EXPORTER") or ("otlp" if endpoint else "none")
    if exporter == "none" or read("SDK_DISABLED").lower() == "true":
        return None
    protocol = read("EXPORTER_OTLP_TRACES_PROTOCOL") or read("EXPORTER_OTLP_PROTOCOL")
    for name, given, allowed in (
        ("OTEL_TRACES_EXPORTER", exporter, "otlp"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", protocol or "http/protobuf", "http/protobuf"),
    ):
        if given != allowed:
            raise InputError(
                f"{name} = {given!r}: this service exports traces by {allowed} only; set that, "
                "or OTEL_TRACES_EXPORTER=none to switch traces off"
            )
    try:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415 - extra
        from opentelemetry.sdk import resources, trace  # noqa: PLC0415 - extra
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - extra
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"OTEL_... variables ask for traces, which need {error.name}, which is not installed; "
            f"run: {install_command('otel')}, or unset them"
        ) from None
    named = {"service.name": "optpipe", **resources.OTELResourceDetector().detect().attributes}
    provider = trace.TracerProvider(
        resource=resources.Resource.create(named), shutdown_on_exit=False
    )
    try:
        provider.add_span_processor(BatchSpanProcessor(trace_exporter.OTLPSpanExporter()))
    except ValueError as error:
        raise InputError(f"a variable OTEL_BSP_... or OTEL_EXPORTER_...: {error}") from None
    return provider


def close_tracer_provider(provider: TracerProvider, patience_s: float = _PATIENCE_S) -> None:
    """Export the last spans; a collector that does not answer costs at most ``patience_s``."""
    end = threading.Thread(target=provider.shutdown, daemon=True)
    end.start()
    end.join(patience_s)
    if end.is_alive():
        structlog.get_logger(__name__).warning(
            "the last spans may be lost: the OpenTelemetry collector does not answer",
            action="trace.lost",
        )
