"""Log lines: a sentence, plus a stable ``action``; set up by `serve`, never at import."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import structlog

from optpipe_api.log_writer import LineWriter

if TYPE_CHECKING:
    from structlog.typing import Processor

__all__ = ["set_up_logs"]


def set_up_logs(form: str) -> LineWriter:
    """Write logs to stderr, as text for people or one JSON object per line for machines.

    Whoever logs does not wait for them to be written; close what is returned before the end. What
    libraries warn of (uvicorn: that a request is no HTTP) goes the same way.
    """
    writer = LineWriter(sys.stderr)
    renderer = _renderer(form)
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "json":
        # Locals may hold keys and whole request bodies.
        untold = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        common.append(structlog.processors.ExceptionRenderer(untold))
    structlog.configure(
        processors=[*common, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(writer),  # type: ignore[arg-type]
    )
    logging.lastResort = _foreign(writer, common, renderer)
    return writer


def _renderer(form: str) -> Processor:
    if form == "json":
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(),
        # The default draws every local variable: seconds of work on the event loop.
        exception_formatter=structlog.dev.plain_traceback,
    )


def _foreign(writer: LineWriter, common: list[Processor], renderer: Processor) -> logging.Handler:
    """Return what writes the warnings of libraries, which know only `logging`."""
    handler = logging.StreamHandler(writer)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=common,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    return handler
