"""Log lines: a sentence, plus a stable ``action``; set up by `serve`, never at import."""

from __future__ import annotations

import logging
import os
import queue
import re
import sys
import threading
import time
import uuid
from logging.handlers import QueueHandler, QueueListener
from typing import TYPE_CHECKING, TextIO

import structlog

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from structlog.typing import Processor

    from optpipe_api.metrics import ServiceMetrics

__all__ = ["LogQueue", "Telemetry", "set_up_logs"]


def set_up_logs(form: str) -> LogQueue:
    """Write logs to stderr, as text for people or one JSON object per line for machines.

    Whoever logs does not wait for them to be written; close what is returned before the end. What
    libraries warn of (uvicorn: that a request is no HTTP) goes the same way.
    """
    lines = LogQueue(sys.stderr)
    renderer = _renderer(form)
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "json":
        # Locals may hold keys and whole request bodies.
        without_locals = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        common.append(structlog.processors.ExceptionRenderer(without_locals))
    # Not in the tree of loggers: nobody else's handlers or levels concern it.
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


def _renderer(form: str) -> Processor:
    if form == "json":
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(),
        # The default draws every local variable: seconds of work on the event loop.
        exception_formatter=structlog.dev.plain_traceback,
    )


# --- Lines are handed to the stream by a thread: whoever logs never waits.
# Logs are written from the event loop, too. Whoever reads them (a pipe to another program, a
# terminal that was stopped) may stop reading; a pipe then holds some 64 KiB more, and a server that
# wrote to it itself would stand still at the next line.

_MAX_LINES = 10_000
_PATIENCE_S = 2.0


class LogQueue:
    """A bounded queue of log lines and the thread that writes them to a stream, in order.

    While the stream takes none, the last lines beyond ``max_lines`` are lost, and counted: the log
    says so as soon as it goes on. Once closed, lines are written straight through.

    ``stream``: where lines go. When it is broken they go nowhere: no log is no reason to stop
    serving.
    """

    def __init__(self, stream: TextIO, max_lines: int = _MAX_LINES) -> None:
        self._queue: queue.Queue[logging.LogRecord] = queue.Queue(max_lines)
        self._listener = _Listener(self._queue, _StreamWriter(stream))
        self._listener.start()

    def handler(
        self, level: int = logging.NOTSET, formatter: logging.Formatter | None = None
    ) -> logging.Handler:
        """Return a handler that puts lines into the queue."""
        handler = _BoundedHandler(self._queue, self._listener)
        handler.setLevel(level)
        handler.setFormatter(formatter)
        return handler

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Wait until everything is written, but no longer than that."""
        if not self._listener.is_closed:
            self._listener.is_closed = True
            # The stream may take nothing, and must not hold up the end of the process.
            end = threading.Thread(target=self._listener.stop, daemon=True)
            end.start()
            end.join(patience_s)


class _Listener(QueueListener):
    """Passes lines on, and says when some were lost."""

    def __init__(self, lines: queue.Queue[logging.LogRecord], writer: _StreamWriter) -> None:
        super().__init__(lines, writer)
        self._lines = lines
        self.num_lost = 0
        self.is_closed = False

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

    def __init__(self, lines: queue.Queue[logging.LogRecord], listener: _Listener) -> None:
        super().__init__(lines)
        self._listener = listener

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._listener.is_closed:
            self._listener.handle(record)
            return
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._listener.num_lost += 1


class _StreamWriter(logging.Handler):
    """Writes to the file of a stream, where it has one.

    A thread that hangs inside of the stream itself would hold its lock, and the interpreter, which
    flushes the stream at its end, would abort; likewise with the lock of a handler.
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
            # Closed, or nobody is left to read it.
            return


# --- Every request has an id, is measured, and is logged where it changes or refuses something.

_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_NO_ROUTE = "none"
_FIRST_REFUSAL = 400
_ABORTED = 499


class Telemetry:
    """Around everything else.

    The id is the client's ``X-Request-ID`` where that is a short word.
    The id comes back in the answer's ``X-Request-ID``, and stands in every line that is logged on
    behalf of the request.
    """

    def __init__(self, app: ASGIApp, *, metrics: ServiceMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _id_of(scope)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request=request_id.decode())
        answer = _Answer(send, request_id)
        began = time.perf_counter()
        try:
            await self._app(scope, receive, answer)
        finally:
            self._note(scope, answer, time.perf_counter() - began)

    def _note(self, scope: Scope, answer: _Answer, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        self._metrics.answered(method, _route_of(scope), answer.status, seconds)
        if method in _READS and answer.status < _FIRST_REFUSAL:
            return
        structlog.get_logger(__name__).info(
            f"{method} {scope['path'][:200]!r} was answered with {answer.status}",
            action="http.request",
            status=answer.status,
            ms=round(seconds * 1000, 1),
            **({"made": answer.location} if answer.location else {}),
        )


class _Answer:
    """Passes an answer on, with the request's id; remembers what it said."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._request_id = request_id
        self.status = _ABORTED
        self.location = ""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            self.location = next(
                (value.decode("latin-1") for name, value in headers if name == b"location"), ""
            )
            message = {**message, "headers": [*headers, (b"x-request-id", self._request_id)]}
        await self._send(message)


def _id_of(scope: Scope) -> bytes:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _route_of(scope: Scope) -> str:
    """Return the template of the route: paths hold ids, of which there are endlessly many."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else _NO_ROUTE
