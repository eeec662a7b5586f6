"""Rank 0's line to the service, in two threads: one asks for schedules, one tells measured times.

Whatever happens to the service - it is slow, stopped, restarted, answers nonsense - happens in
these threads. They log it, wait, and try again; training never waits for them.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from optpipe.measurements import Measurements
    from optpipe.schedule import Schedule

__all__ = ["ServiceLine", "Source", "StepReport"]

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_WAIT_S = 30.0
_REST_S = 1.0
_LEAVE_S = 0.2

_log = logging.getLogger("optpipe.runtime.follow")


class Source(Protocol):
    """Where schedules come from and measured times go: `optpipe.client.Deployment` is one."""

    def schedule_if_newer(self, version: int, wait_s: float = 0.0) -> tuple[int, Schedule] | None:
        """Return the newest version and its number, waiting for one; None where none is newer."""

    def report(
        self,
        version: int,
        measurements: Measurements,
        *,
        step: int | None = None,
        step_ms: float | None = None,
    ) -> object:
        """Tell what was measured under a version."""


class StepReport(NamedTuple):
    """What was measured under a version up to a step; ``step_ms`` is the pipeline's time alone."""

    version: int
    step: int
    step_ms: float
    measurements: Measurements


class ServiceLine:
    """Asks a source for newer versions and tells it reports, in daemon threads.

    Parameters
    ----------
    source
        Used by both threads at once.
    version
        What runs already; 0 = nothing of this source.
    wait_s
        How long the source may wait for a newer version before it answers.
    first_pause_s
        After the first failure in a row; each further one doubles it, up to a minute.
    """

    def __init__(
        self,
        source: Source,
        version: int,
        *,
        wait_s: float = _WAIT_S,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self._source = source
        self._known = version
        self._wait_s = wait_s
        self._first_pause_s = first_pause_s
        self._news: tuple[int, Schedule] | None = None
        self._has_news = threading.Event()
        self._reports: queue.Queue[StepReport | None] = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, name="optpipe-follow", daemon=True),
            threading.Thread(target=self._tell, name="optpipe-report", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> tuple[int, Schedule] | None:
        """Return the newest version that was not taken yet; None at nearly every call."""
        if not self._has_news.is_set():
            return None
        self._has_news.clear()
        news, self._news = self._news, None
        return news

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a version to take; return whether there is."""
        return self._has_news.wait(timeout_s)

    def post(self, report: StepReport) -> None:
        """Tell a report some time soon; it replaces one that still waits to be told."""
        while True:
            try:
                self._reports.put_nowait(report)
            except queue.Full:
                self._take_back()
            else:
                return

    def close(self) -> None:
        """Let the threads end; one that waits for an answer ends with the process."""
        self._closed.set()
        self._take_back()
        self._reports.put(None)
        for thread in self._threads:
            thread.join(_LEAVE_S)

    def _take_back(self) -> None:
        try:
            self._reports.get_nowait()
        except queue.Empty:
            return

    def _ask(self) -> None:
        pause_s = self._first_pause_s
        while not self._closed.is_set():
            try:
                found = self._source.schedule_if_newer(self._known, self._wait_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                _log.warning(
                    "the service gives no schedule (%s: %s); version %d runs on, asking again "
                    "in %.0f s",
                    type(error).__name__,
                    error,
                    self._known,
                    pause_s,
                )
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = self._first_pause_s
            if found is None:
                # The source has waited; should it not have, this keeps us from asking all the time.
                self._closed.wait(min(_REST_S, self._wait_s))
            else:
                self._known, self._news = found[0], found
                self._has_news.set()

    def _tell(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                self._source.report(
                    report.version, report.measurements, step=report.step, step_ms=report.step_ms
                )
            except Exception as error:  # noqa: BLE001 - the next report says what this one did
                _log.warning(
                    "the times measured up to step %d were not reported (%s: %s)",
                    report.step,
                    type(error).__name__,
                    error,
                )
