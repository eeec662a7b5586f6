"""The engine: a fixed number of slots, each solving one job at a time in a process of its own.

A slot (`optpipe_api.engine.slot`) is a thread that claims jobs from the store; the thread waits
while the process works. Each slot keeps its next process started and its imports done, so that a
job starts at once. Where the processes run, on this machine or on a cluster, the slots do not know.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import structlog

from optpipe_api.engine.attempt import Attempt
from optpipe_api.engine.observer import SILENT, Observer
from optpipe_api.engine.owner import is_gone, new_owner
from optpipe_api.engine.slot import PAUSE_S, Slot
from optpipe_api.errors import SolverFailedError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe_api.engine.messages import Message
    from optpipe_api.engine.process import SolverProcess
    from optpipe_api.jobs import Claim
    from optpipe_api.settings import Settings
    from optpipe_api.store.contract import JobStore

__all__ = ["SlotEngine"]


class SlotEngine:
    """Takes jobs from a store and solves them.

    Parameters
    ----------
    on_change
        Called from the engine's threads with the id of each job that changed.
    start_process
        Starts a solver process, see `Solvers.start`.
    observer
        Is told of every attempt's begin and end.
    """

    def __init__(
        self,
        store: JobStore,
        settings: Settings,
        on_change: Callable[[str], None],
        start_process: Callable[[], SolverProcess],
        observer: Observer = SILENT,
    ) -> None:
        self._store = store
        self._observer = observer
        self._settings = settings
        self._on_change = on_change
        # Leases of an earlier life of this server are not ours.
        self._owner = new_owner()
        self._closing = threading.Event()
        self._work = threading.Semaphore(0)
        self._attempts: dict[str, Attempt] = {}
        self._looked_at = time.time()
        self._slots = self._make_slots(start_process)
        self._threads = [
            threading.Thread(target=self._outlive, args=(slot.serve,), name=f"slot-{index}")
            for index, slot in enumerate(self._slots)
        ]
        self._threads.append(
            threading.Thread(target=self._outlive, args=(self._expire,), name="leases")
        )

    def _make_slots(self, start_process: Callable[[], SolverProcess]) -> list[Slot]:
        return [
            Slot(
                self._store,
                self._settings,
                self._owner,
                start_process=start_process,
                closing=self._closing,
                work=self._work,
                solve=self._solve,
            )
            for _ in range(self._settings.solver_processes)
        ]

    def start(self) -> None:
        """Begin to take jobs."""
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Say that a job was queued."""
        self._work.release()

    def cancel(self, job_id: str) -> None:
        """Stop an attempt that runs here; the store knows already that this is wanted."""
        attempt = self._attempts.get(job_id)
        if attempt is not None:
            attempt.cancel()

    def close(self) -> None:
        """Give running jobs back with their incumbents, stop all processes and threads."""
        self._closing.set()
        for _ in self._threads:
            self._work.release()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether every thread runs."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def is_able(self) -> bool:
        """Whether every thread runs, and solver processes start: those of one slot at least."""
        return self.is_alive and not all(slot.is_broken for slot in self._slots)

    def _outlive(self, step: Callable[[], None]) -> None:
        """Repeat a step until the engine closes, whatever happens in it."""
        while not self._closing.is_set():
            try:
                step()
            except (StoreUnavailableError, SolverFailedError) as error:
                self._log().warning(str(error), action=f"engine.{error.code}")
                self._closing.wait(PAUSE_S)
            except Exception:  # noqa: BLE001 - a slot that ends is lost until the next restart
                self._log().exception("a fault of the engine", action="engine.fault")
                self._closing.wait(PAUSE_S)

    def _solve(self, claim: Claim, process: SolverProcess, opening: Sequence[Message]) -> None:
        job_id = claim.lease.job_id
        attempt = Attempt(claim, process, self._store, self._settings, self._on_change)
        self._attempts[job_id] = attempt
        self._log().info(
            "an attempt begins",
            action="job.attempt",
            job=job_id,
            attempt=claim.lease.attempt,
            process=process.name,
        )
        self._on_change(job_id)
        self._observer.started(claim.job)
        try:
            attempt.run(self._closing, opening)
        finally:
            self._tell_end(attempt)
            if self._attempts.get(job_id) is attempt:
                del self._attempts[job_id]

    def _tell_end(self, attempt: Attempt) -> None:
        if attempt.left is not None:
            self._observer.ended(attempt.left, attempt.seconds)
            # Those that shared its solve may have to be solved themselves.
            self.wake()

    def _expire(self) -> None:
        settings = self._settings
        if time.time() - self._looked_at > settings.heartbeat_s + settings.lease_s / 2:
            # This server itself stood still, as a machine that slept does, and the leases of its
            # own attempts have run out as well: these are renewed first.
            self._closing.wait(settings.heartbeat_s)
        self._take_back()
        self._looked_at = time.time()
        self._closing.wait(settings.heartbeat_s)

    def _take_back(self) -> None:
        for job in self._store.expire(self._settings.max_attempts, is_gone):
            self._log().info(
                f"the job's server stopped answering; the job is {job.state.value}",
                action="job.expired",
                job=job.id,
            )
            self._on_change(job.id)
            self.wake()

    def _log(self) -> structlog.stdlib.BoundLogger:
        log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)
        return log
