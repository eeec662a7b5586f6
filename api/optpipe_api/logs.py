"""Log lines: a sentence, plus a stable ``action``; set up by `serve`, never at import."""

from __future__ import annotations

import logging
import sys

import structlog

__all__ = ["set_up_logs"]


def set_up_logs(form: str) -> None:
    """Write logs to stderr, as text for people or one JSON object per line for machines."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            # The default draws every local variable: seconds of work on the event loop.
            exception_formatter=structlog.dev.plain_traceback,
        )
    )
    tracebacks = [structlog.processors.dict_tracebacks] if form == "json" else []
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *tracebacks,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
