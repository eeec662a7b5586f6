"""One slot of the engine: a process is started, gets ready, waits for a job, and solves it.

A job is taken only by a process that is ready. To start one takes a second, or minutes where the
search has to be compiled or the machine is busy: meanwhile the job waits in the queue, where any
other server may take it, and neither its time nor its attempts are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from optpipe_api.engine.process import Place

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from optpipe_api.engine.messages import Message
    from optpipe_api.engine.process import SolverProcess
    from optpipe_api.jobs import Claim
    from optpipe_api.settings import Settings
    from optpipe_api.store.contract import JobStore

__all__ = ["PAUSE_S", "Slot"]

PAUSE_S = 1.0
"""Between two tries of what may work a moment later."""

_LONG_PAUSE_S = 10.0
_TICK_S = 0.1


class Slot:
    """Solves one job at a time, each in a process of its own.

    Parameters
    ----------
    owner
        In whose name jobs are claimed.
    closing
        Set when the engine closes.
    work
        Released when a job may have come.
    solve
        Solves a claimed job in a process, which has said these messages so far.
    """

    def __init__(
        self,
        store: JobStore,
        settings: Settings,
        owner: str,
        *,
        start_process: Callable[[], SolverProcess],
        closing: threading.Event,
        work: threading.Semaphore,
        solve: Callable[[Claim, SolverProcess, Sequence[Message]], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._owner = owner
        self._start_process = start_process
        self._closing = closing
        self._work = work
        self._solve = solve
        self._num_failed = 0

    @property
    def is_broken(self) -> bool:
        """Whether no process of it has started, however often it was tried."""
        return self._num_failed >= self._settings.max_attempts

    def serve(self) -> None:
        """Start a process and solve one job in it, unless the engine closes before one comes."""
        process = self._start_process()
        try:
            opening = self._opening(process)
            if opening is None:
                return
            if any(message.kind == "ready" for message in opening):
                self._num_failed = 0
                self._serve_ready(process, opening)
            else:
                self._num_failed += 1
                self._serve_failed(process, opening)
        finally:
            process.stop()

    def _opening(self, process: SolverProcess) -> list[Message] | None:
        """Return what a process says first, however long that takes; nothing where it just ended.

        None when the engine closes, or the process has no machine to start on.
        """
        while not self._closing.is_set():
            messages = process.receive(_TICK_S)
            if process.place is Place.LOST:
                self._tell_lost(process)
                return None
            if messages is None:
                return []
            if messages:
                return messages
        return None

    def _serve_ready(self, process: SolverProcess, opening: Sequence[Message]) -> None:
        claim = self._next_claim(process)
        if claim is None:
            return
        if process.is_alive:
            self._solve(claim, process, opening)
        else:
            # It died between two looks, and not of this job.
            self._store.requeue(claim.lease)

    def _next_claim(self, process: SolverProcess) -> Claim | None:
        """Wait for a job; None when the engine closes, or the process ends before one comes."""
        while not self._closing.is_set():
            if not process.is_alive:
                self._tell_lost(process)
                return None
            claim = self._store.claim(self._owner, self._settings.lease_s)
            if claim is not None:
                return claim
            self._work.acquire(timeout=self._settings.poll_s)
        return None

    def _serve_failed(self, process: SolverProcess, opening: Sequence[Message]) -> None:
        """Try again where that may help; else let a job say what is wrong, if one waits."""
        why = opening[0].header.get("message", "") if opening else process.how_it_died()
        self._log().warning(f"a solver process did not start: {why}", action="engine.no_start")
        if not self.is_broken:
            self._closing.wait(PAUSE_S)
            return
        claim = self._store.claim(self._owner, self._settings.lease_s)
        if claim is not None:
            self._solve(claim, process, opening)
        else:
            self._work.acquire(timeout=_LONG_PAUSE_S)

    def _tell_lost(self, process: SolverProcess) -> None:
        self._log().warning(process.how_it_died(), action="engine.no_process")
        self._closing.wait(PAUSE_S)

    def _log(self) -> structlog.stdlib.BoundLogger:
        log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
        return log
