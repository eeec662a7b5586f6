"""A stream that never makes anybody wait: lines are handed to the stream beneath by a thread.

Logs are written from the event loop, too. Whoever reads them (a pipe to another program, a terminal
that was stopped) may stop reading; a pipe then holds some 64 KiB more, and a server that wrote to
it itself would stand still at the next line.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import TextIO

import structlog

__all__ = ["LineWriter"]

_MAX_LINES = 10_000
_PATIENCE_S = 2.0


class LineWriter:
    """Takes lines at once and writes them in order, as fast as the stream beneath takes them.

    While it takes none, the last lines beyond ``max_lines`` are lost, and counted: the log says so
    as soon as it goes on. Safe from every thread; once closed it writes straight through.

    Parameters
    ----------
    stream
        Where lines go. When it is broken they go nowhere: no log is no reason to stop serving.
    """

    def __init__(self, stream: TextIO, max_lines: int = _MAX_LINES) -> None:
        self._stream = stream
        self._file = _file_of(stream)
        self._max_lines = max_lines
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._num_lost = 0
        self._is_closed = False
        # A daemon: a stream that takes nothing must not hold up the end of the process.
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Take a line, which brings its own end; never waits."""
        if self._is_closed:
            self._pass_on(text)
        elif self._lines.qsize() < self._max_lines:
            self._lines.put(text)
        else:
            self._num_lost += 1
        return len(text)

    def flush(self) -> None:
        """Do nothing: every line is on its way."""

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Wait until everything is written, but no longer than that."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lines.put(None)
        self._thread.join(patience_s)

    def _run(self) -> None:
        while (text := self._lines.get()) is not None:
            self._pass_on(text)
            if self._num_lost and self._lines.qsize() <= self._max_lines // 2:
                lost, self._num_lost = self._num_lost, 0
                structlog.get_logger(__name__).warning(
                    "lines of this log were lost: they came faster than they could be written",
                    action="log.lost",
                    lines=lost,
                )

    def _pass_on(self, text: str) -> None:
        try:
            if self._file is None:
                self._stream.write(text)
                self._stream.flush()
            else:
                _write_all(self._file, text.encode(errors="backslashreplace"))
        except (OSError, ValueError):
            # Closed, or nobody is left to read it.
            return


def _file_of(stream: TextIO) -> int | None:
    """Return the file descriptor of a stream; None where it has none.

    A thread that hangs inside of the stream itself would hold its lock, and the interpreter, which
    flushes the stream at its end, would abort.
    """
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
